"""The decode algorithm as plain integers: who works on which position, what a verdict does (design §5).

Every runtime, and every rank of one, drives a copy of this object. Knows no tensors, no sampling and no transport.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The target's judgement of the token behind the one that left the last stage.

    Attributes:
        accepted: whether the draft stays.
        token: what is committed at the judged position: the draft if accepted, else the target's own choice.
    """

    accepted: bool
    token: int


@dataclass(frozen=True)
class CyclePlan:
    """What one cycle does.

    Attributes:
        cycle: number of this cycle, from 0.
        epoch: flushes so far; activations of earlier epochs are void.
        fill: tokens in flight at the start, `1..n`.
        newest: position of the newest token in flight, of depth 0 until the stages have run.
        num_stages: `n`.
    """

    cycle: int
    epoch: int
    fill: int
    newest: int
    num_stages: int

    def position_at(self, stage: int) -> int | None:
        """The position that stage `1..n` advances in this cycle, if any: the one of depth `stage - 1`."""
        return self.newest - stage + 1 if stage <= self.fill else None

    def count_at(self, stage: int) -> int:
        """How many tokens stage `1..n` advances in this cycle."""
        return 0 if self.position_at(stage) is None else 1

    @property
    def num_leaves(self) -> int:
        """How many tokens a draft is made behind."""
        return 1

    @property
    def drafted(self) -> int:
        """The position that the drafter proposes a token for."""
        return self.newest + 1

    @property
    def judged(self) -> int | None:
        """The position that is judged: the one behind what leaves the last stage."""
        return self.newest - self.num_stages + 2 if self.fill == self.num_stages else None


@dataclass(frozen=True)
class Rollback:
    """A rejection: every cache keeps the positions `0 .. length - 1` and nothing else stays in flight."""

    length: int


class PipelineSchedule:
    """The tokens of one sequence, how many of them are verified, and how many are in flight.

    In-flight positions are contiguous and end with the newest token; the oldest of them is always verified, the
    others are drafts. So these three are the pipeline's whole state.

    Args:
        num_stages: `n`.
        prompt: token ids of the prompt, at least one.
        first_token: what the target says after the prompt; it comes out of the prefill.
    """

    def __init__(self, num_stages: int, prompt: Sequence[int], first_token: int) -> None:
        if num_stages < 1:
            raise ValueError(f"num_stages={num_stages}: at least one stage is needed")
        if not prompt:
            raise ValueError("the prompt is empty: at least one token is needed")
        self.num_stages = num_stages
        self.tokens = [*prompt, first_token]
        self.num_verified = len(self.tokens)
        self.num_cycles = self.num_judged = self.num_accepted = self.num_flushes = 0

    @property
    def fill(self) -> int:
        return len(self.tokens) - self.num_verified + 1

    @property
    def verified(self) -> list[int]:
        """The tokens that are certain, prompt included."""
        return self.tokens[: self.num_verified]

    def plan(self) -> CyclePlan:
        """What the coming cycle does; the stages and the drafter may work on it at the same time."""
        return CyclePlan(self.num_cycles, self.num_flushes, self.fill, len(self.tokens) - 1, self.num_stages)

    def advance(self, draft: int, verdict: Verdict | None) -> Rollback | None:
        """Closes a cycle.

        Args:
            draft: the token proposed in this cycle.
            verdict: on the judged position; none while the pipeline is filling.

        Returns:
            What to undo, after a rejection.
        """
        plan = self.plan()
        assert (verdict is None) == (plan.judged is None), f"cycle {plan.cycle}: a verdict exactly when one is due"
        self.num_cycles += 1
        self.tokens.append(draft)
        if verdict is None:
            return None
        self.num_judged += 1
        self.num_accepted += verdict.accepted
        judged = self.num_verified
        assert judged == plan.judged
        assert not verdict.accepted or self.tokens[judged] == verdict.token, "an accepted draft is what is committed"
        self.num_verified += 1
        if verdict.accepted:
            return None
        self.num_flushes += 1
        self.tokens[judged:] = [verdict.token]
        return Rollback(judged)
