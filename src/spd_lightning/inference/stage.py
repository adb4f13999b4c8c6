"""A slice of the target with its own caches: one token a cycle, or a prompt as one block. Knows its index; no rank."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spd_lightning.inference.caches import StageCache
from spd_lightning.inference.stage_loading import StageModules, load_stage
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import TargetDtype


@dataclass(frozen=True)
class StageOutput:
    """What a stage hands on.

    Attributes:
        hidden: the residual stream behind its last layer.
        anchors: raw streams at the anchors inside it, by layer count.
        logits: of the last position, from the last stage only.
    """

    hidden: Float[Tensor, "1 seq dim"]
    anchors: dict[int, Float[Tensor, "1 seq dim"]]
    logits: Float[Tensor, " vocab"] | None


class Stage:
    """Stage `number` of `num_stages`; the first embeds, the last norms and projects.

    Args:
        modules: the layers, and what the ends of the pipeline have beside them.
        number: `1..num_stages`.
        num_stages: `n`.
        first_layer: `e_{number-1}`: target layers before this stage.
        anchors: layer counts `b` that the drafter reads; those outside this stage, and 0, are left to others.
        capacity: positions that the caches hold.
        slots: recurrent states kept per layer; what a pipeline's stage needs when absent (design §5).
    """

    cache_type: type[StageCache] = StageCache

    def __init__(
        self,
        modules: StageModules,
        number: int,
        num_stages: int,
        first_layer: int,
        anchors: Sequence[int],
        capacity: int,
        slots: int | None = None,
    ) -> None:
        assert 1 <= number <= num_stages
        self.number = number
        self.modules = modules
        self.taps = {
            anchor - first_layer - 1: anchor
            for anchor in anchors
            if first_layer < anchor <= first_layer + len(modules.layers)
        }
        weight = next(modules.layers.parameters())
        config = modules.config
        self.cache = self.cache_type(
            modules.layer_types,
            capacity,
            slots=num_stages - number + 1 if slots is None else slots,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.cache_keyword = cache_keyword(modules.layers[0])

    @classmethod
    def load(
        cls,
        target: str,
        layout: FeatureLayout,
        number: int,
        capacity: int,
        dtype: TargetDtype = "auto",
        device: torch.device | str = "cpu",
    ) -> "Stage":
        """Stage `number` of a target folder or hub id, from only the weight files that hold it.

        Raises:
            ValueError: as `load_stage`.
        """
        last, (first_layer, last_layer) = layout.num_stages, layout.stage_ends[number - 1 : number + 1]
        modules = load_stage(target, first_layer, last_layer, number == 1, number == last, dtype, device)
        return cls(modules, number, last, first_layer, layout.anchors, capacity)

    @torch.no_grad()
    def run(self, entering: Int[Tensor, "1 seq"] | Float[Tensor, "1 seq dim"], position: int) -> StageOutput:
        """Advances one token, or a whole prompt from position 0 on.

        Args:
            entering: token ids into the first stage, the previous stage's `hidden` into the others.
            position: of the first entering token; everything before it has been run.
        """
        modules = self.modules
        hidden = modules.embedding(entering) if modules.embedding is not None and self.number == 1 else entering
        count = hidden.shape[1]
        assert count == 1 or position == 0, "only a prompt comes as a block"
        positions = torch.arange(position, position + count, device=hidden.device)[None]
        rotary = modules.rotary(hidden, positions)
        anchors: dict[int, Tensor] = {}
        self.cache.begin(position, count)
        for index, layer in enumerate(modules.layers):
            hidden = layer(
                hidden,
                position_embeddings=rotary,
                attention_mask=None,  # right for one token, and under SDPA for a block from an empty cache
                position_ids=positions,
                use_cache=True,
                **{self.cache_keyword: self.cache},
            )
            if index in self.taps:
                anchors[self.taps[index]] = hidden
        self.cache.end(count)
        logits = None
        if modules.norm is not None and modules.head is not None:
            logits = modules.head(modules.norm(hidden[:, -1:]))[0, 0]
        return StageOutput(hidden, anchors, logits)

    def rollback(self, length: int) -> None:
        """Keeps the positions `0 .. length - 1`."""
        self.cache.rollback(length)

    def clear(self) -> None:
        """Readies the stage for another sequence."""
        self.cache.clear()


def cache_keyword(module: torch.nn.Module) -> str:
    """The name under which this release of Transformers hands a layer or a whole model its cache."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
