"""What `/metrics` tells: requests, queue, tokens, cycles and acceptance. Knows no HTTP."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from spd_lightning.inference.answer import Run

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServeMetrics:
    """All series, in a registry of their own.

    Attributes:
        waiting: requests in the queue.
        running: 1 while an answer is made.
        queue_seconds: from a request to the beginning of its answer.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._responses = self._made(
            Counter, "spd_http_responses", "HTTP responses by path and status", "path", "status"
        )
        self._outcomes = self._made(
            Counter, "spd_answers", "Answers by how they ended: eos, length, stop, or why there is none", "outcome"
        )
        self.waiting = self._made(Gauge, "spd_queue_waiting", "Requests that wait for the decoder")
        self.running = self._made(Gauge, "spd_queue_running", "Requests that are being answered, 0 or 1")
        self.queue_seconds = self._seconds("spd_queue_seconds", "Seconds that a request has waited for the decoder")
        self._first = self._seconds("spd_first_token_seconds", "Seconds from a request to its first token")
        self._whole = self._seconds("spd_answer_seconds", "Seconds from a request to the end of its answer")
        self._prompt = self._made(Counter, "spd_prompt_tokens", "Tokens of prompts")
        self._tokens = self._made(Counter, "spd_completion_tokens", "Committed tokens, the prefill's among them")
        self._committed = self._made(Counter, "spd_committed_tokens", "Tokens committed after the prefill's, N")
        self._cycles = self._made(Counter, "spd_cycles", "Pipeline cycles (rounds of an EAGLE-3 drafter), K")
        self._judged = self._made(Counter, "spd_drafts_judged", "Drafts that were judged")
        self._accepted = self._made(Counter, "spd_drafts_accepted", "Drafts that were accepted")
        self._acceptance = self._made(Gauge, "spd_acceptance_ratio", "Accepted over judged drafts since the start")
        self._per_cycle = self._made(Gauge, "spd_tokens_per_cycle", "N / K since the start")
        self._totals = [0, 0, 0, 0]

    def _made(self, kind: Any, name: str, what: str, *labels: str) -> Any:
        return kind(name, what, labels, registry=self.registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(name, what, registry=self.registry, buckets=SECONDS)

    def count_response(self, path: str, status: int) -> None:
        """Of the HTTP server."""
        self._responses.labels(path, str(status)).inc()

    def count_outcome(self, last: Any) -> None:
        """How an answer ended: an `End` or a `Refusal`."""
        self._outcomes.labels(getattr(last, "reason", None) or last.code).inc()

    def count_answer(self, run: Run, asked: float) -> None:
        """The counts of an answer, complete or not; `asked` by `time.monotonic`."""
        seconds = time.monotonic() - asked
        self._whole.observe(seconds)
        self._prompt.inc(len(run.prompt))
        self._tokens.inc(len(run.token_ids))
        if run.token_ids:
            self._first.observe(seconds - run.seconds)
        if run.stats is None:
            return
        counts = (run.stats.num_committed, run.stats.num_cycles, run.stats.num_judged, run.stats.num_accepted)
        for counter, count in zip((self._committed, self._cycles, self._judged, self._accepted), counts, strict=True):
            counter.inc(count)
        self._totals = [total + count for total, count in zip(self._totals, counts, strict=True)]
        committed, cycles, judged, accepted = self._totals
        if cycles:
            self._per_cycle.set(committed / cycles)
        if judged:
            self._acceptance.set(accepted / judged)

    def page(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)
