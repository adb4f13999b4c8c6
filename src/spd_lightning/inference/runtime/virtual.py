"""A clock per rank, advanced as if every rank had a device of its own, while one process does all the work.

The pieces are measured as they run one after the other; the clock puts them side by side, with a given link between
ranks. Wall clock and virtual clock answer different questions and are never added.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from spd_lightning.inference.runtime.interface import Method
from spd_lightning.inference.runtime.local import LocalRuntime
from spd_lightning.inference.runtime.rank import law_slots, level_laws
from spd_lightning.inference.runtime.wire import Message, Request
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.timing import PDM, VERIFY, CycleTimer, CycleTimes, device_seconds, stage_span
from spd_lightning.inference.token_scores import TokenScores


@dataclass(frozen=True)
class Link:
    """What a transfer between two ranks takes.

    Attributes:
        latency: seconds until the first byte is there.
        bytes_per_second: from then on.
        record: seconds of the all-gather that ends each cycle.
    """

    latency: float = 20e-6
    bytes_per_second: float = 25e9
    record: float = 50e-6

    def __post_init__(self) -> None:
        for name in ("latency", "record"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"link {name}={getattr(self, name)}: a number of seconds of at least 0 is needed")
        if not self.bytes_per_second > 0:
            raise ValueError(f"link bytes_per_second={self.bytes_per_second}: a number above 0 is needed")

    def seconds(self, num_bytes: int) -> float:
        """Of one message; none is sent where there is nothing to send."""
        return self.latency + num_bytes / self.bytes_per_second if num_bytes else 0.0


@dataclass(frozen=True)
class MessageSizes:
    """Bytes that a token's messages have.

    Attributes:
        hidden: from a stage to the next one.
        anchors: from each stage to the drafter, first to last.
    """

    hidden: int
    anchors: tuple[int, ...]

    @staticmethod
    def of(num_bytes: int, count: int) -> int:
        """Bytes of a message of so many tokens; `num_bytes` is that of one, or 0 where nothing is sent."""
        return num_bytes + (count - 1) * max(0, num_bytes - Message.HEADER_BYTES)


class VirtualClock(CycleTimer):
    """Times of the parts of cycles, and how long the cycles would have taken with a device per rank.

    Args:
        num_stages: `n`.
        drafts_first: whether drafts are made before the stages' forwards (pre-step).
        sizes: of the messages.
        link: between ranks.
        now: a clock in seconds, as for `CycleTimer`.

    Attributes:
        law_bytes: of the message that a draft and its law, or a tree's laws of one node, travel in; 0 where the record
            is all that is needed.
    """

    def __init__(
        self,
        num_stages: int,
        drafts_first: bool,
        sizes: MessageSizes,
        link: Link,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(now)
        self.law_bytes = 0
        self.num_stages = num_stages
        self.drafts_first = drafts_first
        self.sizes = sizes
        self.link = link
        self.seconds = 0.0
        """Of all cycles so far, on the virtual clock."""

    @contextmanager
    def cycle(self, plan: CyclePlan) -> Iterator[None]:
        with super().cycle(plan):
            yield
        times = self.cycles[-1]
        counts = {number: plan.count_at(number) for number in range(1, self.num_stages + 1)}
        times.seconds = self.cycle_seconds(times, counts, plan.num_leaves)
        self.seconds += times.seconds

    def cycle_seconds(self, times: CycleTimes, counts: Mapping[int, int] | None = None, num_leaves: int = 1) -> float:
        """From the exchange of records to the next one: all ranks begin together and end with the last of them.

        Stages run at once, each on what came in the cycle before. Hidden states and anchors travel when a stage has
        ended; the verifier judges in its own time meanwhile. Pre-step, the drafter begins with the cycle; post-step,
        when the last anchors have come. A draft's law is there before the cycle ends, and with one stage, before the
        verifier judges.

        Args:
            times: of the parts.
            counts: tokens that each stage ran, by its number; one each unless given.
            num_leaves: nodes of the newest level.
        """
        spans, link, last = times.spans, self.link, self.num_stages
        names = {number: stage_span(number) for number in range(1, last + 1)}
        ended = {number: spans[name] for number, name in names.items() if name in spans}
        of, count = self.sizes.of, {number: (counts or {}).get(number, 1) for number in ended}
        sent = max(
            (
                seconds + link.seconds(of(self.sizes.hidden, count[number]))
                for number, seconds in ended.items()
                if number < last
            ),
            default=0.0,
        )
        anchored = max(
            (
                seconds + link.seconds(of(num_bytes, count[number]))
                for number, seconds in ended.items()
                if (num_bytes := self.sizes.anchors[number - 1])
            ),
            default=0.0,
        )
        drafted = spans[PDM] if self.drafts_first else anchored + spans[PDM]
        drafted += link.seconds(of(self.law_bytes, num_leaves))
        judging = ended.get(last, 0.0)
        if last == 1:
            judging = max(judging, drafted)
        judged = judging + spans.get(VERIFY, 0.0)
        return max(sent, anchored, drafted, judged) + link.record


class VirtualRuntime(LocalRuntime):
    """A local runtime whose pipelined decodes are measured by a virtual clock; plain decoding by the wall clock."""

    def use_link(self, link: Link) -> None:
        """Begins a clock at zero."""
        layout, states = self.session.layout, self.session.states
        state_bytes = states.shape[-1] * states.element_size()
        counts = [len(stage.taps) for stage in self.stages]
        sizes = MessageSizes(
            hidden=Message.HEADER_BYTES + state_bytes,
            anchors=tuple(Message.HEADER_BYTES + count * state_bytes if count else 0 for count in counts),
        )
        now = partial(device_seconds, self.device)
        self.timer = self.virtual = VirtualClock(layout.num_stages, layout.drafts_first, sizes, link, now)
        self.num_devices = layout.num_stages + 1

    def decode(
        self,
        method: Method,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopCondition,
        stats: DecodeStats,
        scores: TokenScores | None = None,
    ) -> Generator[int]:
        """Decodes as `LocalRuntime` does, with the messages of these parameters on the clock."""
        self.virtual.law_bytes = self._law_bytes(method, params)
        return super().decode(method, prompt, params, stop, stats, scores)

    def _law_bytes(self, method: Method, params: SamplingParams) -> int:
        """Of the message that a draft's law travels in; 0 if none is sent."""
        config = self.session.drafter.config
        if method == "tree":
            levels = level_laws(params, config.draft_vocab_size, self.device)
            return 0 if levels is None else levels.of(1).data.numel()
        laws = law_slots(Request(0, method, (), params), config.num_stages, config.draft_vocab_size, self.device)
        return 0 if laws is None else laws.at(0).data.numel()

    def start_timing(self) -> CycleTimer:
        """The clock, whose cycles so far are forgotten."""
        self.virtual.cycles.clear()
        return self.virtual

    def clock(self) -> float:
        """Seconds of all cycles so far, as if every rank had a device of its own."""
        return self.virtual.seconds
