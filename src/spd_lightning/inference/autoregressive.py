"""Plain decoding by the same stage code: the baseline, and what every SPD output must equal. Knows no drafter."""

from collections.abc import Generator, Sequence
from typing import Protocol, runtime_checkable

import torch

from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import Verifier


@runtime_checkable
class Target(Protocol):
    """All stages, wherever they run, and what draws tokens from their logits."""

    def forward(self, tokens: Sequence[int], position: int) -> int:
        """Runs a prompt from position 0 on, forgetting what was before, or one more token; the token behind it."""
        ...

    def abandon_plain(self, token: int, position: int) -> None:
        """Ends a decode that nobody listens to any more, before `token` is run."""
        ...


class StagedTarget:
    """A `Target` of stages in this process.

    Args:
        stages: all stages, first to last, in the caches of which the decode lives.
        verifier: draws tokens from logits.
    """

    def __init__(self, stages: Sequence[Stage], verifier: Verifier) -> None:
        self.stages = stages
        self.verifier = verifier
        self.device = next(stages[0].modules.layers.parameters()).device

    def forward(self, tokens: Sequence[int], position: int) -> int:
        hidden, logits = torch.tensor([list(tokens)], device=self.device), None
        for stage in self.stages:
            if position == 0:
                stage.clear()
            output = stage.run(hidden, position)
            hidden, logits = output.hidden, output.logits
        assert logits is not None
        return self.verifier.draw(logits, position + len(tokens))

    def abandon_plain(self, token: int, position: int) -> None:
        """Nothing is under way between two tokens."""


def decode_autoregressively(
    stages: Sequence[Stage], verifier: Verifier, prompt: Sequence[int], stop: StopCondition
) -> Generator[int]:
    """Yields tokens one by one, each through all stages of this process before the next begins; see `decode_plainly`.

    Args:
        stages: all stages, first to last.
        verifier: draws tokens from logits.
        prompt: token ids.
        stop: fed every token; the decode ends when it says so.
    """
    return decode_plainly(StagedTarget(stages, verifier), prompt, stop)


def decode_plainly(target: Target, prompt: Sequence[int], stop: StopCondition) -> Generator[int]:
    """Yields tokens one by one.

    The prompt is prefilled in one block, and every later token is one forward of one token: the shapes of the
    pipeline, so on the CPU the logits are equal bit for bit. The generator may be closed before the end; then the
    target is told so.

    Args:
        target: does the work.
        prompt: token ids.
        stop: fed every token; the decode ends when it says so.
    """
    token, position = target.forward(prompt, 0), len(prompt)
    try:
        while stop.push(token) is None:
            yield token
            token = target.forward([token], position)
            position += 1
        yield token
    except GeneratorExit:
        if stop.end is None:
            target.abandon_plain(token, position)
        raise
