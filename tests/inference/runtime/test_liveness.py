"""Whoever is to blame is named: the dead, the stuck and the failed rank, whatever a store of living ranks shows."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from spd_lightning.inference.runtime.liveness import CULPRIT, Liveness, RankFailure, first_line

NAMES = ["rank 0 (stage 1)", "rank 1 (stage 2)", "rank 2 (drafter)"]
INTERVAL, TIMEOUT = 0.02, 0.2
PATIENCE = 30.0
"""Seconds after which something has not happened; nothing waits so long unless it fails."""

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class FakeStore:
    """A store in this process, and other ranks in it that beat whenever somebody looks.

    So no load of the machine makes one of them seem dead.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.living: dict[int, tuple[str, bool]] = {}
        self.lock = threading.RLock()
        self.num_looks = 0
        self.period = 0.0  # seconds between two beats of the living; 0: a beat a look
        self.is_lost = False

    def live(self, rank: int, activity: str = "cycle 7", is_waiting: bool = True) -> None:
        self.living[rank] = (activity, is_waiting)

    def die(self, rank: int, activity: str = "cycle 7", is_waiting: bool = True) -> None:
        self.living.pop(rank, None)
        self.values[f"beat/{rank}"] = json.dumps([41, activity, is_waiting]).encode()

    def set(self, key: str, value: str, /) -> None:
        with self.reached():
            self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        with self.reached():
            if (rank := self._living(key)) is not None:
                count = int(time.monotonic() / self.period) if self.period else self.num_looks
                return json.dumps([count, *self.living[rank]]).encode()
            return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        with self.reached():
            return all(key in self.values or self._living(key) is not None for key in keys)

    def delete_key(self, key: str, /) -> bool:
        with self.reached():
            return self.values.pop(key, None) is not None

    def reached(self) -> threading.RLock:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes at Utils.hpp:784")
        self.num_looks += 1
        return self.lock

    def _living(self, key: str) -> int | None:
        return next((rank for rank in self.living if key == f"beat/{rank}"), None)


@pytest.fixture
def store() -> FakeStore:
    store = FakeStore()
    for rank in range(3):
        store.live(rank)
    return store


Start = Callable[..., Liveness]


@pytest.fixture
def start(store: FakeStore) -> Iterator[Start]:
    started: list[Liveness] = []

    def start(rank: int = 0, timeout: float = TIMEOUT, interval: float = INTERVAL) -> Liveness:
        store.living.pop(rank, None)
        started.append(Liveness(store, rank, NAMES, timeout, interval))
        return started[-1]

    yield start
    for liveness in started:
        liveness.stop()


def lose(liveness: Liveness, error: Exception | None = None) -> RankFailure:
    """What a rank raises whose transfer fails."""
    with pytest.raises(RankFailure) as raised, liveness.waiting("the exchange of cycle 8"):
        raise error or RuntimeError("Connection closed by peer\nException raised from writeBytes")
    return raised.value


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_beat_says_its_number_what_the_rank_does_and_whether_it_waits(store: FakeStore, start: Start) -> None:
    liveness = start(0)

    def beat() -> list:
        return json.loads(store.values.get("beat/0", b"[0, null, null]"))

    eventually(lambda: beat()[0] > 3)
    assert beat()[1:] == ["starting", False]
    with liveness.waiting("cycle 5"):
        eventually(lambda: beat()[1:] == ["cycle 5", True])
    eventually(lambda: beat()[1:] == ["cycle 5", False])
    liveness.stop()
    ended = beat()
    time.sleep(5 * INTERVAL)
    assert beat() == ended


@pytest.mark.parametrize("dead", [1, 2])
@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_rank_that_beats_no_more_is_dead(store: FakeStore, start: Start, dead: int, is_waiting: bool) -> None:
    store.die(dead, "cycle 7", is_waiting)
    failure = lose(start())
    assert failure.rank == dead
    assert str(failure) == f"{NAMES[dead]} is dead or unreachable: its heartbeat has stopped (last seen cycle 7)"
    assert isinstance(failure.__cause__, RuntimeError), "what the transport said is kept"


def test_a_rank_that_never_beat_is_dead(store: FakeStore, start: Start) -> None:
    del store.living[2]
    failure = lose(start())
    assert failure.rank == 2
    assert "before its first heartbeat" in str(failure)


def test_a_rank_that_was_seen_long_ago_and_beats_on_is_alive(store: FakeStore, start: Start) -> None:
    """Between two looks of this rank minutes may pass; only beats that stop count."""
    liveness = start()
    for _ in range(2):
        assert lose(liveness).rank is None
        time.sleep(6 * INTERVAL)
    store.die(1)
    assert lose(liveness).rank == 1


def test_a_rank_whose_beats_come_late_is_alive(store: FakeStore, start: Start) -> None:
    store.period = 3 * INTERVAL
    assert lose(start()).rank is None


@pytest.mark.parametrize("stuck", [1, 2])
def test_the_one_that_does_not_wait_while_all_others_do_is_stuck(store: FakeStore, start: Start, stuck: int) -> None:
    store.live(stuck, "the prefill of request 1", is_waiting=False)
    failure = lose(start())
    assert failure.rank == stuck
    assert str(failure) == f"{NAMES[stuck]} is stuck (the prefill of request 1) while all others wait for it"


def test_a_dead_rank_goes_before_a_busy_one(store: FakeStore, start: Start) -> None:
    store.live(1, is_waiting=False)
    store.die(2)
    assert lose(start()).rank == 2


@pytest.mark.parametrize("busy", [[], [1, 2]])
def test_when_it_is_not_clear_who_nobody_is_blamed(store: FakeStore, start: Start, busy: list[int]) -> None:
    for rank in busy:
        store.live(rank, is_waiting=False)
    failure = lose(start())
    assert failure.rank is None
    assert str(failure).endswith(": Connection closed by peer")
    assert CULPRIT not in store.values


@pytest.mark.parametrize("place", ["in a transfer", "waiting for a key"])
def test_a_rank_that_said_why_it_fails_is_quoted(store: FakeStore, start: Start, place: str) -> None:
    start(2).report("the largest logit is nan")
    store.die(1)  # of the failure, perhaps: the report came first
    liveness = start(0, timeout=PATIENCE)
    if place == "in a transfer":
        failure = lose(liveness)
    else:
        with pytest.raises(RankFailure) as raised:
            liveness.wait_for("request/1", [1, 2])
        failure = raised.value
    assert failure.rank == 2
    assert str(failure) == "rank 2 (drafter) failed: the largest logit is nan"


def test_the_first_report_stays(store: FakeStore, start: Start) -> None:
    start(2).report("the first")
    start(1).report("what came of it")
    assert str(lose(start(0))) == "rank 2 (drafter) failed: the first"


def test_all_ranks_blame_the_same_one(store: FakeStore, start: Start) -> None:
    """Even if what a later one sees for itself would point at another."""
    store.die(1)
    first = lose(start(0))
    store.live(1, is_waiting=False)
    store.die(0)
    second = lose(start(2))
    assert (first.rank, str(first)) == (second.rank, str(second)) == (1, str(first))


def test_ranks_that_fail_at_once_blame_the_same_one(store: FakeStore, start: Start) -> None:
    store.die(1)
    livenesses, failures = [start(0, PATIENCE, 0.3), start(2, PATIENCE, 0.3)], {}

    def run(liveness: Liveness) -> None:
        try:
            with liveness.waiting("cycle 7"):
                raise RuntimeError("Connection closed by peer")
        except RankFailure as failure:
            failures[liveness.rank] = str(failure)

    threads = [threading.Thread(target=run, args=(each,)) for each in livenesses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert set(failures) == {0, 2}
    assert all(failure.startswith("rank 1 (stage 2) is dead") for failure in failures.values())


def test_a_key_that_is_there_is_returned_at_once(store: FakeStore, start: Start) -> None:
    """Even if a rank has died, or failed, since it came: what it holds was complete."""
    liveness = start()
    store.values["request/1"] = b"decode this"
    store.die(1)
    began = time.monotonic()
    assert liveness.wait_for("request/1", [1, 2], poll=PATIENCE) == b"decode this"
    assert time.monotonic() - began < PATIENCE
    assert not liveness.is_waiting


def test_a_key_that_comes_later_is_waited_for_longer_than_the_timeout(store: FakeStore, start: Start) -> None:
    """As long as all others live: a conversation may rest."""
    liveness, seen = start(), []

    def bring() -> None:
        eventually(lambda: liveness.is_waiting)
        time.sleep(2 * TIMEOUT)
        seen.append(json.loads(store.values["beat/0"])[2])
        store.values["request/1"] = b"decode this"

    bringer = threading.Thread(target=bring)
    bringer.start()
    assert liveness.wait_for("request/1", [1, 2]) == b"decode this"
    bringer.join()
    assert seen == [True]
    assert not liveness.is_waiting


def test_waiting_for_a_key_ends_when_a_rank_dies(store: FakeStore, start: Start) -> None:
    liveness = start()
    store.die(1)
    began = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        liveness.wait_for("request/1", [1, 2])
    assert time.monotonic() - began >= TIMEOUT, "only a silence of the whole time-out is a death while nothing fails"
    assert raised.value.rank == 1
    assert not liveness.is_waiting
    assert lose(start(2)).rank == 1, "it was told to the others"


def test_waiting_for_a_key_minds_the_given_ranks_only(store: FakeStore, start: Start) -> None:
    liveness = start()
    store.die(2)
    threading.Timer(2 * TIMEOUT, store.set, ("request/1", "x")).start()
    assert liveness.wait_for("request/1", [1]) == b"x"


def test_looks_between_requests_find_who_has_died(store: FakeStore, start: Start) -> None:
    liveness = start()
    liveness.check([1, 2])
    store.die(1)
    liveness.check([1, 2])  # its last beat is new
    time.sleep(TIMEOUT)
    with pytest.raises(RankFailure, match="heartbeat has stopped") as raised:
        liveness.check([1, 2])
    assert raised.value.rank == 1


@pytest.mark.parametrize("place", ["in a transfer", "waiting for a key", "between requests"])
def test_a_store_that_is_gone_is_said_in_one_line(store: FakeStore, start: Start, place: str) -> None:
    liveness = start()
    store.is_lost = True
    liveness.report("says nothing and raises nothing")
    if place == "in a transfer":
        failure = lose(liveness)
    else:
        with pytest.raises(RankFailure) as raised:
            liveness.wait_for("request/1", [1, 2]) if place == "waiting for a key" else liveness.check([1, 2])
        failure = raised.value
    assert "Connection reset by peer" in str(failure)
    assert "\n" not in str(failure)


def test_nested_waiting_keeps_the_first_failure(store: FakeStore, start: Start) -> None:
    store.die(1)
    liveness, inner = start(), []

    def fail() -> None:
        try:
            with liveness.waiting("the law of cycle 8"):
                raise RuntimeError("Connection closed by peer")
        except RankFailure as failure:
            inner.append(failure)
            store.live(1)
            raise

    with pytest.raises(RankFailure) as outer, liveness.waiting("cycle 8"):
        fail()
    assert [outer.value] == inner
    assert not liveness.is_waiting


@pytest.mark.parametrize("error", [ValueError("a wrong value"), KeyboardInterrupt(), AssertionError("a bug")])
def test_what_is_not_the_transports_passes_through(start: Start, error: BaseException) -> None:
    liveness = start()
    with pytest.raises(type(error)) as raised, liveness.waiting("cycle 8"):
        raise error
    assert raised.value is error
    assert not liveness.is_waiting


def test_of_an_error_the_first_line_counts() -> None:
    assert first_line(RuntimeError("\n one thing\nframe #0: c10::Error")) == "one thing"
    assert first_line(RuntimeError("")) == ""


class LoggingStore(FakeStore):
    """Writes down when this rank beats, and when it looks at another."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log.open("w", buffering=1)

    def set(self, key: str, value: str, /) -> None:
        super().set(key, value)
        self.log.write(f"set {key}\n")

    def get(self, key: str, /) -> bytes:
        self.log.write(f"get {key}\n")
        return super().get(key)


def hang(store: FakeStore, errors: Path, timeout: float, waits: Sequence[float], busy: float = 0.0) -> None:
    """Waits so many seconds each, in a call that no signal of the transport ends, and works on for a while."""
    sys.stderr = errors.open("w")
    liveness = Liveness(store, 0, NAMES, timeout, interval=0.05)
    for seconds in waits:
        with liveness.waiting("the exchange of cycle 8"):
            time.sleep(seconds)
    time.sleep(busy)
    os._exit(0)


def run_hanging(store: FakeStore, errors: Path, *args: object) -> tuple[int | None, str]:
    process = multiprocessing.get_context("fork").Process(target=hang, args=(store, errors, *args))
    process.start()
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, errors.read_text()


def test_a_wait_that_never_ends_ends_the_process_and_names_the_stuck_rank(tmp_path: Path) -> None:
    store = LoggingStore(tmp_path / "log")
    store.live(1, "the prefill of request 1", is_waiting=False)
    store.live(2)
    exitcode, printed = run_hanging(store, tmp_path / "errors", 0.2, [3600])
    assert exitcode == 1
    assert printed == (
        "rank 0 (stage 1): rank 1 (stage 2) is stuck (the prefill of request 1) while all others wait for it\n"
    )
    # All who wait look for the culprit at once: one that did not beat meanwhile would seem dead to the others.
    log = (tmp_path / "log").read_text().splitlines()
    first, last = log.index("get beat/1"), len(log) - log[::-1].index("get beat/1")
    assert "set beat/0" in log[first:last]


def test_a_wait_that_never_ends_without_a_store_ends_too(tmp_path: Path) -> None:
    store = FakeStore()
    store.is_lost = True
    exitcode, printed = run_hanging(store, tmp_path / "errors", 0.2, [3600])
    assert exitcode == 1
    assert printed.startswith("rank 0 (stage 1): ") and "Connection reset by peer" in printed
    assert printed.count("\n") == 1


def test_waits_that_end_leave_the_process_alone(tmp_path: Path) -> None:
    """Together they are longer than the limit of one, and so is what the rank does afterwards."""
    store = FakeStore()
    store.live(1, is_waiting=False)
    store.live(2)
    assert run_hanging(store, tmp_path / "errors", 1.5, [0.5] * 5, 2.6) == (0, "")
