"""How close plain decoding was to another token: the margin of its two best logits. Knows stages of this process."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.runtime.interface import OneProcess
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import GreedyVerifier


class MarginVerifier(GreedyVerifier):
    """Draws greedily, and keeps the margin of the last draw."""

    margin = 0.0

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        best, second = logits[: self._num_tokens].topk(2).values.tolist()
        self.margin = best - second
        return super().draw(logits, position)


def top2_margin(decoder: PipelineDecoder, prompt: Sequence[int], num_tokens: int) -> float | None:
    """Between the two best logits for token `num_tokens` (from 1) of the greedy answer, by plain decoding once more.

    None over several ranks, where the logits are on another one.
    """
    runtime = decoder.runtime
    if not isinstance(runtime, OneProcess):
        return None
    verifier = MarginVerifier(len(decoder.tokenizer))
    stop = StopCondition((), num_tokens, (), decoder.tokenizer)
    for _ in decode_autoregressively(runtime.stages, verifier, prompt, stop):
        pass
    return verifier.margin
