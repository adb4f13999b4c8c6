"""A slice of the target that advances the nodes of a level as one batch. Knows its index; no rank and no verdicts."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spd_lightning.inference.stage import Stage, StageOutput
from spd_lightning.inference.tree.caches import StatePool, TreeCache
from spd_lightning.inference.tree.schedule import Level, Pruning


class TreeStage:
    """A stage's own layers on trees. The prompt is run by the stage itself.

    Args:
        stage: whose layers and buffers these are.
        num_stages: `n`.
        max_width: nodes of a level at most.
    """

    def __init__(self, stage: Stage, num_stages: int, max_width: int) -> None:
        self.stage = stage
        self.number = stage.number
        self.device = next(stage.modules.layers.parameters()).device
        self.cache = TreeCache(stage.cache, slots=1 + (num_stages - stage.number) * max_width)

    def start(self) -> None:
        """Goes on behind the prompt that the stage has run."""
        self.cache.start(self.device)

    @torch.no_grad()
    def run(self, entering: Int[Tensor, "1 nodes"] | Float[Tensor, "1 nodes dim"], level: Level) -> StageOutput:
        """Advances the nodes of a level, each behind its own ancestors.

        Args:
            entering: token ids into the first stage, the previous stage's `hidden` into the others.
            level: the nodes, in this order.
        """
        modules = self.stage.modules
        hidden = modules.embedding(entering) if modules.embedding is not None and self.number == 1 else entering
        assert hidden.shape[1] == len(level.nodes)
        positions = torch.full(hidden.shape[:2], level.position, device=hidden.device)
        rotary = modules.rotary(hidden, positions)
        mask = self.cache.begin(level, hidden.dtype)
        anchors: dict[int, Tensor] = {}
        for index, layer in enumerate(modules.layers):
            # Recurrent layers see one token of each of so many sequences, attention layers one masked block.
            is_recurrent = isinstance(self.cache.layers[index], StatePool)
            hidden = layer(
                hidden.transpose(0, 1) if is_recurrent else hidden,
                position_embeddings=rotary,
                attention_mask=None if is_recurrent else mask,
                position_ids=positions,
                use_cache=True,
                **{self.stage.cache_keyword: self.cache},
            )
            hidden = hidden.transpose(0, 1) if is_recurrent else hidden
            if index in self.stage.taps:
                anchors[self.stage.taps[index]] = hidden
        logits = None
        if modules.norm is not None and modules.head is not None:
            assert len(level.nodes) == 1, "only the root comes to the last stage"
            logits = modules.head(modules.norm(hidden))[0, 0]
        return StageOutput(hidden, anchors, logits)

    def prune(self, pruning: Pruning) -> None:
        """Keeps what a verdict leaves."""
        self.cache.prune(pruning)
