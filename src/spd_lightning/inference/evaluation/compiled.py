"""Plain decoding with a compiled forward of the whole target: the baseline that is not bound by launches.

`torch.compile` over Transformers' static cache, on a GPU with CUDA graphs. Its arithmetic is fused, so its logits are
not bit for bit those of the stages. Knows no stages and no drafter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import BackendCompilerFailed
from transformers import StaticCache

from spd_lightning.inference.answer import Run
from spd_lightning.inference.autoregressive import decode_plainly
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage import cache_keyword
from spd_lightning.inference.verify import Verifier, make_verifier
from spd_lightning.modules.target import FrozenTarget

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder

WARM_UP = 4
"""Tokens that are decoded before anything is timed: the first forwards compile and record."""


class CompiledTarget:
    """A whole target whose forwards of one token are compiled; of prompts, whose lengths differ, they are not.

    Args:
        target: the target.
        max_length: positions that the cache holds.

    Raises:
        ValueError: if this machine has nothing to compile with.
    """

    def __init__(self, target: FrozenTarget, max_length: int) -> None:
        self.model: Any = target.model
        self.device = target.head_weight.device
        self.cache = StaticCache(config=self.model.config, max_cache_len=max_length)
        self.cache_keyword = cache_keyword(self.model)
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        self.compiled = torch.compile(self.model.forward, mode=mode)
        try:
            self.logits([0], 0)
            for position in range(1, WARM_UP):
                self.logits([0], position)
        except BackendCompilerFailed as error:
            raise ValueError(
                f"the compiled baseline needs a compiler for {self.device.type} (a C++ compiler or Triton), which "
                f"failed: {str(error).strip().splitlines()[0]}; leave `compiled` out of --methods"
            ) from error

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], position: int) -> torch.Tensor:
        """Of the last one of `tokens`, `vocab`; a prompt begins at position 0 and forgets what was before."""
        if position == 0:
            self.cache.reset()
        forward = self.model.forward if position == 0 else self.compiled
        output = forward(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            position_ids=torch.arange(position, position + len(tokens), device=self.device)[None],
            logits_to_keep=1,
            use_cache=True,
            **{self.cache_keyword: self.cache},
        )
        return output.logits[0, -1]


class VerifiedTarget:
    """A `Target` (see `decode_plainly`) of a compiled one and what draws tokens from its logits."""

    def __init__(self, compiled: CompiledTarget, verifier: Verifier) -> None:
        self.compiled = compiled
        self.verifier = verifier

    def forward(self, tokens: Sequence[int], position: int) -> int:
        return self.verifier.draw(self.compiled.logits(tokens, position), position + len(tokens))

    def abandon_plain(self, token: int, position: int) -> None:
        """Nothing is under way between two tokens."""


def compiled_starter(
    decoder: "PipelineDecoder", whole: Callable[[], FrozenTarget]
) -> tuple[Callable[[Sequence[Mapping[str, str]], SamplingParams], Run], Callable[[], CompiledTarget]]:
    """How to begin an answer by the compiled target, and what compiles it, before any clock runs.

    Args:
        decoder: whose tokenizer, limits and rules of drawing hold.
        whole: loads the whole target, in the decoder's dtype and on its device.
    """

    @cache
    def compiled() -> CompiledTarget:
        return CompiledTarget(whole(), decoder.max_length)

    def start(messages: Sequence[Mapping[str, str]], params: SamplingParams) -> Run:
        ids, params = decoder.checked(messages, params)
        stop = decoder.stop_condition(params)
        verifier = make_verifier(params, len(decoder.tokenizer))
        return Run(ids, decode_plainly(VerifiedTarget(compiled(), verifier), ids, stop), stop, None)

    return start, compiled
