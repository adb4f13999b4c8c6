"""The loop of one decode: plan, run, advance, stop on what is committed. Knows no tensors and no transport."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from spd_lightning.inference.schedule import CyclePlan, PipelineSchedule, Rollback, Verdict
from spd_lightning.inference.stats import DecodeStats, Judgement
from spd_lightning.inference.stopping import StopCondition


@dataclass(frozen=True)
class CycleOutcome:
    """What a cycle brought.

    Attributes:
        draft: what was proposed, as the schedule takes it: a token, or the candidates of a tree's level.
        verdict: on the judged position; none while the pipeline is filling.
    """

    draft: Any
    verdict: Verdict | None


@runtime_checkable
class Schedule(Protocol):
    """The decode algorithm: of a chain (`PipelineSchedule`), or of a tree (`TreeSchedule`)."""

    tokens: list[int]
    num_cycles: int

    @property
    def num_verified(self) -> int:
        """How many tokens are certain, prompt included."""
        ...

    def plan(self) -> CyclePlan:
        """What the coming cycle does."""
        ...

    def advance(self, draft: Any, verdict: Verdict | None, /) -> Rollback | None:
        """Closes a cycle; what to undo."""
        ...


@runtime_checkable
class Pipeline(Protocol):
    """Stages, drafter and verifier, wherever they run."""

    def prefill(self, prompt: Sequence[int]) -> int:
        """Takes a prompt in, forgetting what was before; the target's token behind it."""
        ...

    def cycle(self, schedule: Any) -> CycleOutcome:
        """Runs the cycle that the schedule plans; does not advance it."""
        ...

    def rollback(self, rollback: Any) -> None:
        """Undoes what a verdict made void."""
        ...

    def abandon(self, schedule: Any) -> None:
        """Ends a decode that nobody listens to any more, between two cycles."""
        ...


def decode(
    pipeline: Pipeline,
    num_stages: int,
    prompt: Sequence[int],
    stop: StopCondition,
    stats: DecodeStats,
    make_schedule: Callable[[int, Sequence[int], int], Schedule] = PipelineSchedule,
) -> Generator[int]:
    """Yields committed tokens, the prefill's first. What is in flight at the end is dropped.

    The generator may be closed before the end; then the pipeline is told so.

    Args:
        pipeline: does the work.
        num_stages: `n`.
        prompt: token ids.
        stop: fed every committed token; the decode ends when it says so.
        stats: counts that are added to as the decode goes.
        make_schedule: of `num_stages`, the prompt and the first token: the pipeline's kind.

    Raises:
        RuntimeError: if the cycles do not end; a bug.
    """
    schedule = make_schedule(num_stages, prompt, pipeline.prefill(prompt))
    drafted_at: dict[int, int] = {}
    stop.push(schedule.tokens[-1])
    try:
        yield schedule.tokens[-1]
        while stop.end is None:
            # At least one token is committed every n cycles.
            if schedule.num_cycles >= num_stages * (stop.max_new_tokens + 1):
                raise RuntimeError(
                    f"{schedule.num_cycles} cycles for {stop.max_new_tokens} tokens: the decode does not end"
                )
            plan = schedule.plan()
            drafted_at[plan.drafted] = plan.fill
            outcome = pipeline.cycle(schedule)
            rollback = schedule.advance(outcome.draft, outcome.verdict)
            stats.num_cycles += 1
            if outcome.verdict is None:
                continue
            judged = schedule.num_verified - 1
            stats.num_committed += 1
            stats.judgements.append(Judgement(judged, drafted_at.pop(judged), outcome.verdict.accepted))
            if stop.push(outcome.verdict.token) is None and rollback is not None:
                pipeline.rollback(rollback)
            yield outcome.verdict.token
    except GeneratorExit:
        if stop.end is None:
            pipeline.abandon(schedule)
        raise
