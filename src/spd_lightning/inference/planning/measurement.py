"""Times of the pieces on this machine: layers, head and drafters of the real sizes, with random weights.

So a plan can be measured before there are weights, and without room for a whole target: a few layers of each type are
enough. Knows no splits and no cycle.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.planning.costs import DrafterCosts, TargetCosts
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import StageModules
from spd_lightning.modules.drafter import INIT_STD, PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.target import FAMILIES
from spd_lightning.modules.target_files import read_model_config
from spd_lightning.modules.tiny_target import random_model, tiny_config

WARM_UP, REPEATS = 5, 20
CACHE_BYTES = 256 << 20
"""As many layers run one after the other as weigh this: fewer would stay in the processor's caches between forwards."""
SPEC_LAYERS = (1, 4)
"""Drafters of so many layers are timed; each layer more costs the same."""
PIECES_VOCAB = 8
"""Rows of embeddings of which only one row is read."""
OWN_KEYS = ("model_type", "num_hidden_layers", "layer_types", "vocab_size", "dtype", "tie_word_embeddings")
"""Of the target's configuration, what the layers that are timed have otherwise."""


class MeasuredTimes:
    """Times the pieces of a target and of drafters for it; each once, when it is first asked for.

    Args:
        name_or_path: folder or hub id of the target; only its configuration is read.
        target: its pieces; attention looks back on `target.length` tokens.
        device: where the forwards run; `auto` takes a GPU if there is one.
    """

    is_measured = True

    def __init__(self, name_or_path: str, target: TargetCosts, device: str) -> None:
        self.target = target
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.dtype = getattr(torch, target.size.dtype if target.dtype == "auto" else target.dtype)
        config = read_model_config(name_or_path)
        self.family = FAMILIES[config["model_type"]]
        self.settings = {
            name: value for name, value in config.items() if name not in OWN_KEYS and not name.endswith("token_id")
        }
        self.capacity = target.length + WARM_UP + REPEATS
        self.progress = tqdm(desc="timing", unit=" pieces", disable=None, leave=False)
        self.stage_fixed_ms = self._rotary_ms()
        self.head_ms = self._head_ms()
        self.layer_ms = cache(self._layer_ms)
        self._drafters_ms: dict[Any, tuple[float, float]] = {}

    @property
    def explanation(self) -> str:
        where = "cuda" if self.device.type == "cuda" else f"{self.device.type}, {torch.get_num_threads()} threads"
        return (
            f"MEASURED on this machine ({where}): medians of {REPEATS} forwards with random weights, each piece by "
            f"itself, at {self.target.length:,} tokens of context"
        )

    def drafter_ms(self, drafter: DrafterCosts, fill: int) -> float:
        """One draft; between one token in flight and a full pipeline the times follow what is read."""
        last = drafter.layout.num_stages
        if 1 < fill < last:
            few, many = self.drafter_ms(drafter, 1), self.drafter_ms(drafter, last)
            reads = [drafter.draft_at(level).read_bytes for level in (1, fill, last)]
            return few + (many - few) * (reads[1] - reads[0]) / (reads[2] - reads[0])
        few, many = SPEC_LAYERS
        size = replace(drafter.size, num_layers=few)
        key = (drafter.row_inputs(fill), size)  # all that the work depends on: many splits have the same
        if key not in self._drafters_ms:
            deeper = replace(size, num_layers=many)
            self._drafters_ms[key] = (
                self._draft_ms(replace(drafter, size=size), fill), self._draft_ms(replace(drafter, size=deeper), fill)
            )  # fmt: skip
        ms_of_few, ms_of_many = self._drafters_ms[key]
        per_layer = max(0.0, ms_of_many - ms_of_few) / (many - few)
        return ms_of_few + per_layer * (drafter.size.num_layers - few)

    def _rotary_ms(self) -> float:
        """What a stage computes once for all its layers."""
        modules = self._stage_modules(self.target.size.layer_types[0], 1)
        hidden = self._states(1)
        return self._median_ms(lambda index: modules.rotary(hidden, torch.full((1, 1), index, device=self.device)))

    def _head_ms(self) -> float:
        """Final norm and head."""
        size = self.target.size
        with torch.device("meta"):
            head = nn.Linear(size.hidden_size, size.vocab_size, bias=False)
        head, norm = self._filled(head), nn.RMSNorm(size.hidden_size, device=self.device, dtype=self.dtype)
        hidden = self._states(1)
        return self._median_ms(lambda _: head(norm(hidden)))

    def _layer_ms(self, layer_type: str) -> float:
        """One layer with its cache, the mean of several that run one after the other."""
        weight_bytes = self.target.by_type[layer_type].weight_bytes
        count = min(self.target.size.layer_types.count(layer_type), -(-CACHE_BYTES // weight_bytes))
        stage = Stage(self._stage_modules(layer_type, count), 2, 3, count, (), self.capacity)
        stage.run(self._states(self.target.length), 0)
        hidden = self._states(1)
        milliseconds = self._median_ms(lambda index: stage.run(hidden, self.target.length + index))
        return max(0.0, milliseconds - self.stage_fixed_ms) / count

    def _draft_ms(self, drafter: DrafterCosts, fill: int) -> float:
        config, num_rows = drafter_config(drafter), len(drafter.row_inputs(fill))
        with torch.device("meta"):
            module = PipelineDraftModule(config)
        embedding = nn.Embedding(PIECES_VOCAB, config.hidden_size, dtype=self.dtype, device=self.device)
        session = DraftSession(self._filled(module), embedding, self.capacity)
        prompt = torch.zeros((1, self.target.length), dtype=torch.long, device=self.device)
        session.prefill(prompt, {anchor: self._states(self.target.length) for anchor in session.anchors if anchor})

        def draft(index: int) -> Tensor:
            newest = session.length + num_rows - 1  # the rows follow what the cache holds
            return session.draft_logits(CyclePlan(index, 0, fill, newest, config.num_stages), 0)

        return self._median_ms(draft)

    def _stage_modules(self, layer_type: str, count: int) -> StageModules:
        """So many layers of one type as a stage between others."""
        overrides = dict(self.settings, vocab_size=PIECES_VOCAB, eos_token_id=None)
        if self.family != "llama":  # whose layers are of one type
            overrides["layer_types"] = [layer_type] * count
        config = tiny_config(self.family, count, **overrides)
        with torch.device("meta"):
            model = random_model(config)
        return StageModules(
            layers=self._filled(model.model.layers),
            embedding=None,
            norm=None,
            head=None,
            rotary=type(model.model.rotary_emb)(config=config).to(self.device),
            config=config,
            layer_types=(layer_type,) * count,
            vocab_size=PIECES_VOCAB,
        )

    def _states(self, count: int) -> Tensor:
        return torch.randn((1, count, self.target.size.hidden_size), dtype=self.dtype, device=self.device)

    def _filled(self, module: Any) -> Any:
        """A module of the meta device with weights: random, since equal ones could be faster on a GPU."""
        module.to(self.dtype).to_empty(device=self.device).requires_grad_(False)
        for parameter in module.parameters():
            parameter.normal_(std=INIT_STD)
        return module.eval()

    @torch.no_grad()
    def _median_ms(self, run: Callable[[int], Any]) -> float:
        """Of `run(0)`, `run(1)`, ..., without the first ones."""
        milliseconds = []
        for index in range(WARM_UP + REPEATS):
            self._wait()
            began = time.perf_counter()
            run(index)
            self._wait()
            milliseconds.append(1000 * (time.perf_counter() - began))
        self.progress.update()
        return median(milliseconds[WARM_UP:])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def drafter_config(drafter: DrafterCosts) -> DrafterConfig:
    """A drafter of these sizes; rotary base and epsilon, which cost nothing, are any."""
    size, layout = drafter.size, drafter.layout
    return DrafterConfig(
        num_stages=layout.num_stages,
        stage_layers=layout.stage_layers,
        anchors=layout.anchors,
        rows=layout.rows,
        num_spec_layers=size.num_layers,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_heads=size.query_width // size.head_dim,
        num_kv_heads=size.kv_width // size.head_dim,
        head_dim=size.head_dim,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        feature_norm="rms" if size.num_gains else "none",
        draft_vocab_size=size.draft_vocab_size,
        schedule=layout.schedule,
        gated_attention=size.gate_width > 0,
    )
