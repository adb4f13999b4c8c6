"""Who is alive: every rank's heartbeat in a shared store, and which rank is to blame when something breaks.

Knows a key-value store and threads; knows no process groups, and nothing of what the ranks do.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

CULPRIT, FAILED = "culprit", "failed: "
HANGS_AFTER = 1.5
"""Time-outs after which a wait will never end by itself: a transport that raises does so after one."""


@runtime_checkable
class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def delete_key(self, key: str, /) -> bool: ...


class RankFailure(RuntimeError):
    """Another rank is dead, stuck or has failed, so this one ends as well.

    Attributes:
        rank: the one to blame; none if it could not be found out.
        is_told: whether that rank has told of its failure itself.
    """

    def __init__(self, message: str, rank: int | None, is_told: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.is_told = is_told


class Liveness:
    """The heartbeat of this rank and a view of the others'.

    A beat says how often the rank has beaten, what it is doing, and whether it waits for others meanwhile. So a dead
    rank is one that beats no more, and a stuck one is the one that does not wait while all others do.

    Args:
        store: shared by all ranks. Its own connection, since a store's calls exclude each other.
        rank: of this process.
        names: what to call each rank.
        timeout: seconds after which a silent rank is dead.
        interval: seconds between two beats.
        store_host: the rank that holds the store, if one does.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        names: Sequence[str],
        timeout: float,
        interval: float,
        store_host: int | None = None,
    ) -> None:
        self.store = store
        self.rank = rank
        self.names = names
        self.timeout = timeout
        self.interval = interval
        self.store_host = store_host
        self.activity = "starting"
        self.is_waiting = False
        self._waiting_since = math.inf
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._watch)]
        for thread in self._threads:
            thread.start()

    def _beat(self) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", json.dumps([count, self.activity, self.is_waiting]))
            except RuntimeError:  # the store's host is gone; whoever waits for it next says so
                return
            self._ended.wait(self.interval)

    def _watch(self) -> None:
        """Ends the process if it waits in a call that neither ends nor can be interrupted."""
        while not self._ended.wait(self.interval):
            if time.monotonic() - self._waiting_since > HANGS_AFTER * self.timeout:
                print(f"{self.names[self.rank]}: {self._diagnosis()}", file=sys.stderr, flush=True)
                os._exit(1)

    def _diagnosis(self) -> RankFailure:
        """Who is to blame for a wait without end; the store's host, if the store does not answer either."""
        found: list[RankFailure] = []
        error = RuntimeError(f"{self.activity}: no end after {self.timeout:g} s")
        thread = threading.Thread(target=lambda: found.append(self.failure(error)), daemon=True)
        thread.start()
        thread.join(self.timeout + 10 * self.interval)
        return found[0] if found else self._lost_store(RuntimeError("it does not answer"))

    def stop(self) -> None:
        """Beats no more."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=2 * self.interval)

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """While others are waited for.

        Raises:
            RankFailure: in the place of what the transport raises: it names the rank to blame.
        """
        self.activity, self.is_waiting, self._waiting_since = activity, True, time.monotonic()
        try:
            yield
        except RankFailure:
            raise
        except RuntimeError as error:
            raise self.failure(error) from error
        finally:
            self.is_waiting, self._waiting_since = False, math.inf

    def wait_for(self, key: str, others: Sequence[int], poll: float = 0.002) -> bytes:
        """The value of a key that some rank will set, while all `others` live.

        Raises:
            RankFailure: if one of them dies, or fails, before.
        """
        self.is_waiting, began = True, time.monotonic()
        looked = began
        try:
            while True:
                now = self._waiting_since = time.monotonic()  # for the store's answer, not for the key
                if self._has(key):
                    return self.store.get(key)
                if now - looked >= self.interval:
                    looked = now
                    self._look(others)
                self._waiting_since = math.inf
                time.sleep(poll if now - began < 1 else max(poll, 0.02))
        except RuntimeError as error:
            if isinstance(error, RankFailure):
                raise
            raise self._lost_store(error) from error
        finally:
            self.is_waiting, self._waiting_since = False, math.inf

    def check(self, others: Sequence[int]) -> None:
        """A look at the others while nothing is waited for.

        Raises:
            RankFailure: if one of them has died or failed.
        """
        try:
            self._look(others)
        except RankFailure:
            raise
        except RuntimeError as error:
            raise self._lost_store(error) from error

    def _look(self, others: Sequence[int]) -> None:
        self._raise_known_culprit()
        if dead := self._silent(others, self.timeout):
            raise self._blame(dead[0], self._silence(dead[0]))

    def report(self, message: str) -> None:
        """Says that this rank fails by itself, so that the others can tell why."""
        try:
            if not self.store.check([CULPRIT]):
                self.store.set(CULPRIT, json.dumps([self.rank, FAILED + message]))
        except RuntimeError:
            pass  # the store's host is gone as well

    def failure(self, error: RuntimeError) -> RankFailure:
        """Finds out who is to blame for an error of the transport, within a few beats."""
        others = [rank for rank in range(len(self.names)) if rank != self.rank]
        silence = min(5 * self.interval, self.timeout)
        try:
            self._silent(others, silence)  # a first look; those who beat from now on are alive
            deadline = time.monotonic() + silence + self.interval
            while time.monotonic() < deadline:
                self._raise_known_culprit()
                if dead := self._silent(others, silence):
                    return self._blame(dead[0], self._silence(dead[0]))
                time.sleep(self.interval / 4)
            busy = [rank for rank in others if not self._last_beat(rank)[2]]
            if len(busy) == 1:
                activity = self._last_beat(busy[0])[1]
                return self._blame(busy[0], f"is stuck ({activity}) while all others wait for it")
        except RankFailure as known:
            return known
        except RuntimeError as lost:
            return self._lost_store(lost)
        return RankFailure(f"a rank does not answer, and it is not clear which one: {first_line(error)}", None)

    def _has(self, key: str) -> bool:
        return self.store.check([key])

    def _raise_known_culprit(self) -> None:
        if self._has(CULPRIT):
            rank, what = json.loads(self.store.get(CULPRIT))
            if rank != self.rank:
                raise RankFailure(f"{self.names[rank]} {what}", rank, what.startswith(FAILED))

    def _blame(self, rank: int, what: str) -> RankFailure:
        if not self._has(CULPRIT):
            self.store.set(CULPRIT, json.dumps([rank, what]))
        return RankFailure(f"{self.names[rank]} {what}", rank)

    def _lost_store(self, error: RuntimeError) -> RankFailure:
        what = f"the store of the ranks cannot be reached any more ({first_line(error)})"
        if self.store_host in (None, self.rank):
            return RankFailure(what, None)
        return RankFailure(f"{self.names[self.store_host]} is dead or unreachable: {what}", self.store_host)

    def _silence(self, rank: int) -> str:
        beat = self._last_beat(rank)
        return f"is dead or unreachable: its heartbeat has stopped (last seen {beat[1]})"

    def _last_beat(self, rank: int) -> list[Any]:
        return json.loads(self._beats[rank][0])

    def _silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Those of the ranks whose beat has not changed for so long."""
        now = time.monotonic()
        for rank in ranks:
            key = f"beat/{rank}"
            beat = self.store.get(key) if self._has(key) else b'[0, "before its first heartbeat", false]'
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)
        return [rank for rank in ranks if now - self._beats[rank][1] >= seconds]


def first_line(error: BaseException) -> str:
    """An error's message without what follows its first line."""
    return str(error).strip().split("\n")[0]
