"""The queue before one decoder, and the loop that answers one request after the other. Knows no HTTP.

The loop runs in the thread that calls `run`, which alone touches the decoder; all else may be called from any thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

from spd_lightning.inference.answer import Run
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.refusal import Refusal, failed, queue_full, shutting_down
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.token_scores import TokenScore, TokenScores

CHECK_SECONDS = 1.0
"""Between two looks at an idle decoder."""


@dataclass(frozen=True)
class Piece:
    """More of an answer.

    Attributes:
        text: behind what came before.
        scores: of the tokens that spell it, where they were asked for.
    """

    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class End:
    """An answer is complete.

    Attributes:
        reason: `eos`, `length` or `stop`.
        num_tokens: of the answer, an end-of-sequence token among them.
        stats: counts of the decode phase; none for plain decoding.
    """

    reason: str
    num_tokens: int
    stats: DecodeStats | None


Event = Piece | End | Refusal
"""What an answer comes in: pieces, and then an end or the reason why there is none."""


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        prompt: token ids.
        params: with a seed, if they sample.
        emit: takes the events in the decoder's thread.
        num_top: likeliest tokens to report for each token; none where no scores are wanted.
        state: where it is.
    """

    prompt: Sequence[int]
    params: SamplingParams
    emit: Callable[[Event], None]
    num_top: int | None = None
    state: Literal["waiting", "running", "over"] = "waiting"
    is_cancelled: bool = False
    asked: float = field(default_factory=time.monotonic)


class Engine:
    """Answers jobs in the order in which they come.

    Args:
        start: begins an answer; `PipelineDecoder.start` or `start_autoregressive`.
        num_tokens: `len(tokenizer)`.
        max_queue: jobs that may wait while another one is answered.
        metrics: are told of all that happens.
        check: is called now and then while there is nothing to answer, and raises if the decoder is lost.
    """

    def __init__(
        self,
        start: Callable[..., Run],
        num_tokens: int,
        max_queue: int,
        metrics: ServeMetrics,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.start = start
        self.num_tokens = num_tokens
        self.max_queue = max_queue
        self.metrics = metrics
        self.check = check
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._open: set[Job] = set()
        self._stop_at: float | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether jobs are taken."""
        return self._stop_at is None and not self._is_closed

    def submit(self, job: Job) -> None:
        """Takes a job in.

        Raises:
            Refusal: if too many wait, or the engine stops.
        """
        with self._lock:
            if not self.is_open:
                raise shutting_down()
            if len(self._open) > self.max_queue:
                raise queue_full(self.max_queue)
            self._open.add(job)
            self._inbox.put(job)
            self._count()

    def cancel(self, job: Job) -> None:
        """Nobody listens to this job any more. A running one ends with the next committed token."""
        with self._lock:
            job.is_cancelled = True
            if job.state == "waiting":
                self._forget(job)

    def stop(self, grace: float) -> None:
        """Takes no more jobs, refuses those that wait, and lets the running one go on for so many seconds.

        A signal handler may call this in the midst of anything: it takes no lock.
        """
        self._stop_at = time.monotonic() + grace
        self._inbox.put(None)

    def run(self) -> None:
        """Answers until `stop`. If the decoder fails, all jobs are refused, and its error is raised."""
        try:
            while (job := self._next()) is not None:
                if self._begins(job):
                    self._answer(job)
        finally:
            with self._lock:
                self._is_closed = True
                left = list(self._open)
            for job in left:
                self._finish(job, shutting_down())

    def _next(self) -> Job | None:
        while True:
            try:
                return self._inbox.get(timeout=CHECK_SECONDS)
            except Empty:
                self.check()

    def _begins(self, job: Job) -> bool:
        """Whether the job is to be answered now."""
        with self._lock:
            if job.state != "waiting" or self._stop_at is not None:
                return False
            job.state = "running"
            self._count()
        self.metrics.queue_seconds.observe(time.monotonic() - job.asked)
        return True

    def _answer(self, job: Job) -> None:
        scores = None if job.num_top is None else TokenScores(self.num_tokens, job.num_top)
        run, last = None, Refusal(499, "the client has gone", "server_error", code="cancelled")
        try:
            run = self.start(job.prompt, job.params, scores)
            last = self._decode(job, run, scores)
        except ValueError as error:  # such as logits that are no numbers
            last = failed(str(error))
        except BaseException as error:
            last = failed(str(error) or type(error).__name__)
            raise
        finally:
            if run is not None:
                self.metrics.count_answer(run, job.asked)
            self._finish(job, last)

    def _decode(self, job: Job, run: Run, scores: TokenScores | None) -> Event:
        """Hands out the pieces of an answer; what comes last is returned."""
        text, num_shown, num_scored = run.stop.text, 0, 0
        for _ in run.tokens():
            if run.stop.end is None and (ended := self._ended(job)) is not None:
                run.close()
                return ended
            if len(text.text) > num_shown:
                new = self._scores(run, scores, num_scored)
                job.emit(Piece(text.text[num_shown:], new))
                num_shown, num_scored = len(text.text), num_scored + len(new)
        result = run.result()
        if rest := self._scores(run, scores, num_scored):
            job.emit(Piece("", rest))
        return End(result.finish_reason, len(result.token_ids), result.stats)

    def _ended(self, job: Job) -> Refusal | None:
        """Why a running job is given up."""
        if job.is_cancelled:
            return Refusal(499, "the client has gone", "server_error", code="cancelled")
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return shutting_down()
        return None

    def _scores(self, run: Run, scores: TokenScores | None, num_before: int) -> tuple[TokenScore, ...]:
        """The scores, behind those that were shown, of the tokens that spell what may be shown."""
        if scores is None:
            return ()
        end = run.stop.end
        if end is None:
            num_shown = run.stop.text.count_kept()
        else:
            num_shown = end.num_kept - (end.reason == "eos")
        first = len(run.prompt)
        return tuple(scores.by_position[first + index] for index in range(num_before, num_shown))

    def _finish(self, job: Job, last: Event) -> None:
        with self._lock:
            self._forget(job)
        self.metrics.count_outcome(last)
        job.emit(last)

    def _forget(self, job: Job) -> None:
        job.state = "over"
        self._open.discard(job)
        self._count()

    def _count(self) -> None:
        states: list[Any] = [job.state for job in self._open]
        self.metrics.running.set(states.count("running"))
        self.metrics.waiting.set(states.count("waiting"))
