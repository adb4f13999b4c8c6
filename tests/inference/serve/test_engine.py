"""The queue before a decoder: order, bounds, cancellation, the end, and a decoder that fails."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spd_lightning.inference.answer import Run
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.serve import engine as engine_module
from spd_lightning.inference.serve.engine import End, Engine, Job, Piece
from spd_lightning.inference.serve.metrics import ServeMetrics
from spd_lightning.inference.serve.refusal import Refusal
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.modules.tiny_target import byte_tokenizer

TOKENIZER = byte_tokenizer()


class Script:
    """Decodes a job's prompt as its own answer, and does what the test says before each token."""

    def __init__(self, before: Callable[[list[int], int], None] = lambda prompt, index: None) -> None:
        self.before = before
        self.begun: list[list[int]] = []
        self.closed: list[list[int]] = []

    def start(self, prompt: list[int], params: SamplingParams, scores: Any) -> Run:
        self.begun.append(prompt)
        stop = StopCondition([258], params.max_new_tokens, params.stop, TOKENIZER)
        return Run(prompt, self._committed(prompt, stop), stop, DecodeStats(2, 3, 6))

    def _committed(self, prompt: list[int], stop: StopCondition) -> Iterator[int]:
        try:
            for index, token in enumerate(prompt):
                self.before(prompt, index)
                stop.push(token)
                yield token
                if stop.end is not None:
                    return
        except GeneratorExit:
            self.closed.append(prompt)
            raise


class Asked:
    """A job and what came of it."""

    def __init__(self, text: str, max_new_tokens: int = 99, **params: Any) -> None:
        self.events: list[Any] = []
        ids = TOKENIZER(text)["input_ids"] + [258]
        self.job = Job(ids, SamplingParams(max_new_tokens, **params), self.events.append)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Piece))

    @property
    def outcome(self) -> str | None:
        last = self.events[-1]
        return last.reason if isinstance(last, End) else last.code if isinstance(last, Refusal) else None


def engine_of(script: Script, max_queue: int = 8) -> Engine:
    return Engine(script.start, 259, max_queue, ServeMetrics())


def run_with(engine: Engine, *asked: Asked) -> None:
    """Answers these jobs and ends."""
    for one in asked:
        engine.submit(one.job)
    thread = threading.Thread(target=engine.run)
    thread.start()
    while engine._open:
        thread.join(0.005)
    engine.stop(0.0)
    thread.join(10)
    assert not thread.is_alive()


def waiting(engine: Engine) -> float | None:
    return engine.metrics.registry.get_sample_value("spd_queue_waiting")


def test_jobs_are_answered_one_after_the_other_in_their_order() -> None:
    script, asked = Script(), [Asked(f"answer {number}") for number in range(5)]
    engine = engine_of(script)
    run_with(engine, *asked)
    assert [one.text for one in asked] == [f"answer {number}" for number in range(5)]
    assert script.begun == [one.job.prompt for one in asked]
    assert [one.outcome for one in asked] == ["eos"] * 5 and not script.closed
    assert asked[0].events[-1] == End("eos", 9, DecodeStats(2, 3, 6))


@pytest.mark.parametrize(
    ("text", "params", "shown", "outcome", "num_tokens"),
    [
        ("some text", {"max_new_tokens": 4}, "some", "length", 4),
        ("xaéy", {"stop": ("éy",)}, "xa", "stop", 2),
        ("a€", {"max_new_tokens": 3}, "a\ufffd", "length", 3),
        ("", {}, "", "eos", 1),
    ],
)
def test_pieces_are_the_text_and_nothing_of_a_stop_string(
    text: str, params: dict[str, Any], shown: str, outcome: str, num_tokens: int
) -> None:
    asked = Asked(text, **params)
    run_with(engine_of(Script()), asked)
    assert (asked.text, asked.outcome, asked.events[-1].num_tokens) == (shown, outcome, num_tokens)
    assert all(event.text for event in asked.events[:-1])


def test_as_many_wait_as_may_and_one_more_is_refused() -> None:
    engine = engine_of(Script(), max_queue=2)
    asked = [Asked(str(number)) for number in range(4)]
    for one in asked[:3]:
        engine.submit(one.job)
    with pytest.raises(Refusal) as refused:
        engine.submit(asked[3].job)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert waiting(engine) == 3
    engine.cancel(asked[1].job)  # one who has gone makes room
    run_with(engine, asked[3])
    assert [one.text for one in asked] == ["0", "", "2", "3"] and not asked[1].events
    assert waiting(engine) == 0


def test_a_cancelled_job_ends_with_the_next_token_and_the_next_one_is_clean() -> None:
    def cancel(prompt: list[int], index: int) -> None:
        if prompt == first.job.prompt and index == 3:
            engine.cancel(first.job)

    first, second = Asked("long answer"), Asked("second")
    script = Script(cancel)
    engine = engine_of(script)
    run_with(engine, first, second)
    assert (first.text, first.outcome) == ("lon", "cancelled") and script.closed == [first.job.prompt]
    assert (second.text, second.outcome) == ("second", "eos")


@pytest.mark.parametrize(("grace", "text", "outcome"), [(60.0, "in flight", "eos"), (0.0, "in", "shutting_down")])
def test_at_the_end_the_running_job_has_its_grace_and_the_waiting_ones_none(
    grace: float, text: str, outcome: str
) -> None:
    running, queued, late = Asked("in flight"), Asked("queued"), Asked("late")

    def stop(prompt: list[int], index: int) -> None:
        if index == 2:
            engine.stop(grace)

    engine = engine_of(Script(stop))
    for one in (running, queued):
        engine.submit(one.job)
    engine.run()
    assert (running.text, running.outcome) == (text, outcome)
    assert (queued.text, queued.outcome) == ("", "shutting_down")
    with pytest.raises(Refusal, match="shutting down") as refused:
        engine.submit(late.job)
    assert refused.value.status == 503 and not engine.is_open


def test_an_error_of_the_decoder_is_told_to_all_and_raised() -> None:
    def fail(prompt: list[int], index: int) -> None:
        raise RuntimeError("rank 2 is dead")

    asked = [Asked("one"), Asked("two")]
    engine = engine_of(Script(fail))
    for one in asked:
        engine.submit(one.job)
    with pytest.raises(RuntimeError, match="rank 2 is dead"):
        engine.run()
    assert [one.outcome for one in asked] == ["decoder_failed", "shutting_down"]
    assert "rank 2 is dead" in str(asked[0].events[0]) and not engine.is_open


def test_an_idle_engine_ends_when_its_decoder_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "CHECK_SECONDS", 0.01)
    looks = []

    def check() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise RuntimeError("rank 2 is dead")

    engine = Engine(Script().start, 259, 8, ServeMetrics(), check)
    with pytest.raises(RuntimeError, match="rank 2 is dead"):
        engine.run()
    assert looks == [0, 1, 2] and not engine.is_open


def test_a_value_that_cannot_be_decoded_ends_one_answer_only() -> None:
    def fail(prompt: list[int], index: int) -> None:
        if prompt == first.job.prompt and index == 1:
            raise ValueError("the largest logit is nan")

    first, second = Asked("one"), Asked("two")
    run_with(engine_of(Script(fail)), first, second)
    assert (first.text, first.outcome, first.events[-1].status) == ("o", "decoder_failed", 500)
    assert (second.text, second.outcome) == ("two", "eos")


def test_metrics_pool_the_counts_of_all_answers() -> None:
    engine = engine_of(Script())
    run_with(engine, Asked("one"), Asked("three"))
    values = {
        name: engine.metrics.registry.get_sample_value(f"spd_{name}") for name in ("cycles_total", "tokens_per_cycle")
    }
    assert values == {"cycles_total": 12, "tokens_per_cycle": 0.5}
    assert engine.metrics.registry.get_sample_value("spd_completion_tokens_total") == 10
    assert engine.metrics.registry.get_sample_value("spd_answers_total", {"outcome": "eos"}) == 2
