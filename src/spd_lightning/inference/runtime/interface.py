"""What decodes behind a `PipelineDecoder`. Knows no drafters."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Literal

import torch

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.token_scores import TokenScores, scored
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.inference.verify import make_verifier

Method = Literal["pipelined", "tree", "plain"]
"""`pipelined` decodes with the drafter's chains, `tree` with its trees, `plain` one token after the other."""


class Runtime(ABC):
    """A loaded target and drafter.

    Attributes:
        is_lead: whether this process may ask for answers.
        num_devices: devices that a decode occupies.
        shape: of the trees that it can decode with; none without trees.
    """

    is_lead: bool
    num_devices: int
    shape: TreeShape | None

    @abstractmethod
    def decode(
        self,
        method: Method,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopCondition,
        stats: DecodeStats,
        scores: TokenScores | None = None,
    ) -> Generator[int]:
        """Yields committed tokens, the prefill's first; closed before its end, it abandons the decode.

        Args:
            method: of decoding.
            prompt: token ids.
            params: with a seed if they sample.
            stop: fed every committed token; the decode ends when it says so.
            stats: counts that are added to as the decode goes, but not by plain decoding.
            scores: takes the log-probability of each committed token, in order.
        """

    def clock(self) -> float:
        """Seconds, by which decodes with a drafter are measured."""
        return time.perf_counter()

    @abstractmethod
    def follow(self, make_stop: Callable[[SamplingParams], StopCondition]) -> None:
        """On ranks other than the lead: does their part of every request until the lead closes."""

    @abstractmethod
    def check(self) -> None:
        """On the lead, between requests: raises `RankFailure` if another rank is lost."""

    @abstractmethod
    def close(self) -> None:
        """On the lead: lets the other ranks end."""


class OneProcess(Runtime):
    """A runtime without other ranks.

    Args:
        stages: the whole target, first layers to last.
        num_tokens: `len(tokenizer)`; rows of logits beyond are padding.
        device: where everything is.
        shape: of trees, or none.
    """

    is_lead = True
    num_devices = 1

    def __init__(
        self, stages: Sequence[Stage], num_tokens: int, device: torch.device, shape: TreeShape | None = None
    ) -> None:
        self.stages = stages
        self.num_tokens = num_tokens
        self.device = device
        self.shape = shape

    def _plain(
        self, prompt: Sequence[int], params: SamplingParams, stop: StopCondition, scores: TokenScores | None = None
    ) -> Generator[int]:
        """Decodes without drafts; see `decode_autoregressively`."""
        verifier = scored(make_verifier(params, self.num_tokens), scores)
        return decode_autoregressively(self.stages, verifier, prompt, stop)

    def follow(self, make_stop: Callable[[SamplingParams], StopCondition]) -> None:
        """There is nobody to follow."""

    def check(self) -> None:
        """There is nobody to lose."""

    def close(self) -> None:
        """There is nobody to tell."""
