"""Where the time of a cycle goes: named spans, by cycle and fill level. A timer and its twin that does nothing.

Timing never changes which code runs: roles always open their spans, and what they are given decides whether a clock is
read. Knows no ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from spd_lightning.inference.schedule import CyclePlan

if TYPE_CHECKING:
    import torch

PDM, VERIFY, COMMUNICATION, SYNCHRONISATION = "pdm", "verify", "communication", "synchronisation"


def stage_span(number: int) -> str:
    """The name of a stage's forward."""
    return f"stage {number}"


@runtime_checkable
class Timer(Protocol):
    """What roles report to."""

    def cycle(self, plan: CyclePlan) -> AbstractContextManager[None]:
        """The whole of a cycle; spans within are its parts."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """A part of the cycle, or nothing outside of one."""
        ...


class NoTimer:
    """Reads no clock."""

    def cycle(self, plan: CyclePlan) -> AbstractContextManager[None]:
        return nullcontext()

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass
class CycleTimes:
    """One cycle, as one process spent it.

    Attributes:
        fill: tokens in flight at its start.
        seconds: of the whole cycle.
        spans: seconds by name; a name that comes twice is summed.
    """

    fill: int
    seconds: float = 0.0
    spans: dict[str, float] = field(default_factory=dict)


class CycleTimer:
    """Keeps the times of every cycle.

    Args:
        now: a clock in seconds. For a GPU it must wait for the device first (`device_seconds`).
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.cycles: list[CycleTimes] = []
        self._current: CycleTimes | None = None

    @contextmanager
    def cycle(self, plan: CyclePlan) -> Iterator[None]:
        self._current = current = CycleTimes(plan.fill)
        began = self.now()
        try:
            yield
            current.seconds = self.now() - began
            self.cycles.append(current)
        finally:
            self._current = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        if self._current is None:
            yield
            return
        spans, began = self._current.spans, self.now()
        yield
        spans[name] = spans.get(name, 0.0) + self.now() - began


NO_TIMER = NoTimer()


def device_seconds(device: "torch.device") -> float:
    """Seconds of the wall clock, once the device has done what it was told to do."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()
