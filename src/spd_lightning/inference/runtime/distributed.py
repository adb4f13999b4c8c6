"""The only file that knows `torch.distributed`: how ranks meet, send, exchange records, and are started.

Point-to-point messages travel by the device's backend (gloo on CPUs, NCCL on GPUs); the control record travels over
gloo in both cases, since it decides what the host does next. Knows no stages and no drafter.
"""

import itertools
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from spd_lightning.inference.runtime.environment import RankEnvironment, rank_name
from spd_lightning.inference.runtime.liveness import Liveness, RankFailure, Store, first_line
from spd_lightning.inference.runtime.wire import CycleRecord, record_fields
from spd_lightning.inference.timing import COMMUNICATION, NO_TIMER, SYNCHRONISATION, Timer

JOINS = itertools.count()
LEAD_FILE = "SPD_LEAD_FILE"
"""Variable that names the file in which the lead says which process it is."""
ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that end a launcher and with it all ranks."""


@dataclass(frozen=True)
class Operation:
    """One point-to-point transfer.

    Attributes:
        kind: its direction.
        data: the bytes, at an address that stays theirs until the transfer has been waited for.
        peer: rank at the other end.
    """

    kind: Literal["send", "receive"]
    data: Tensor
    peer: int


class Posted:
    """Transfers under way. Keeps their buffers until they are waited for."""

    def __init__(self, operations: Sequence[Operation], works: Sequence[Any], transport: "Transport") -> None:
        self._operations = tuple(operations)
        self._works = list(works)
        self._transport = transport

    def wait(self) -> None:
        """Returns when all are done; at once the second time.

        Raises:
            RankFailure: if a peer is gone or too late.
        """
        if self._works:
            with self._transport.spending(COMMUNICATION):
                for work in self._works:
                    work.wait()
                if self._transport.device.type == "cuda":  # there a wait only orders streams
                    torch.cuda.current_stream(self._transport.device).synchronize()
            self._works.clear()


class Transport:
    """What the ranks of one decoder do with each other; see `join`.

    Args:
        rank: of this process.
        world_size: number of ranks.
        device: where messages lie.
        liveness: finds out who is to blame when a transfer fails.
        max_width: candidates of a tree's level that a record has room for; the same on every rank.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, liveness: Liveness, max_width: int = 0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.liveness = liveness
        self.timer: Timer = NO_TIMER
        self.max_width = max_width
        self.expect_scores(None)

    def expect_scores(self, num_top: int | None) -> None:
        """Sizes the records for scores with so many likely tokens, or for none; every rank does so between two records."""
        size = record_fields(self.max_width, num_top)
        self._mine, self._all = (torch.zeros(*shape, size, dtype=torch.int64) for shape in ((), (self.world_size,)))

    def post(self, operations: Sequence[Operation]) -> Posted:
        """Begins transfers that do not wait for each other; both ends must post them in one order."""
        if not operations:
            return Posted((), (), self)
        calls = {"send": dist.isend, "receive": dist.irecv}
        with self.spending(COMMUNICATION):
            works = dist.batch_isend_irecv([dist.P2POp(calls[op.kind], op.data, op.peer) for op in operations])
        return Posted(operations, works, self)

    def exchange(self, record: CycleRecord) -> list[CycleRecord]:
        """All ranks' records, by rank. Every rank calls this in every cycle: it is what keeps them in step.

        Raises:
            RankFailure: if a rank is gone or too late.
        """
        record.write(self._mine)
        with self.spending(SYNCHRONISATION):
            dist.all_gather(list(self._all.unbind()), self._mine)
        return [CycleRecord.read(row) for row in self._all.tolist()]

    @contextmanager
    def spending(self, span: str) -> Iterator[None]:
        """While other ranks may be waited for: the time goes to this span, and a failure names who is to blame."""
        with self.timer.span(span), self.liveness.waiting(self.liveness.activity):
            yield


def join(
    environment: RankEnvironment, num_stages: int, device: torch.device, timeout: float, max_width: int = 0
) -> tuple[Store, Transport]:
    """Meets the other ranks.

    Args:
        environment: which rank this is, of how many.
        num_stages: `n`; names the ranks in messages.
        device: of this rank's tensors.
        timeout: seconds after which a rank that does not answer is given up.
        max_width: nodes of a tree's level at most; 0 where no trees are decoded.

    Raises:
        RankFailure: if the others cannot be reached in that time.
    """
    rank, world_size, limit = environment.rank, environment.world_size, timedelta(seconds=timeout)
    try:
        found, _, _ = next(iter(rendezvous(environment.init_method, rank, world_size, timeout=limit)))
        number = next(JOINS)  # a store may outlive a decoder; every rank has joined as often
        store = PrefixStore(f"spd/{number}", found)
        names = [rank_name(number, num_stages) for number in range(world_size)]
        liveness = Liveness(store, rank, names, timeout, min(1.0, timeout / 20), environment.store_host)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"group/{number}", found),
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,  # makes NCCL connect all ranks now, in one order
        )
    except (RuntimeError, ValueError) as error:
        raise RankFailure(
            f"{rank_name(rank, num_stages)} did not meet the other {world_size - 1} ranks within {timeout:g} s: "
            f"{first_line(error)}",
            None,
        ) from error
    return store, Transport(rank, world_size, device, liveness, max_width)


def leave() -> None:
    """Ends this rank's part of the process group, once all are done with it."""
    dist.destroy_process_group()


def launch(
    num_ranks: int, module: str, args: Sequence[str], forwarded: Sequence[signal.Signals] = (signal.SIGINT,)
) -> int:
    """Runs `python -m module args` as so many ranks on this machine, by torch's own launcher.

    Ranks that do not fail by themselves are ended when one does. Ctrl-C reaches this process only, since the launcher
    puts each rank into a session of its own; it is handed to the lead as soon as there is one (`present_lead`), as are
    the other `forwarded` signals. Those that are not end all ranks.

    Returns:
        The exit code: 0, that of the first rank that failed, or 128 and the number of the signal that ended this process.

    Raises:
        RankFailure: if a rank was ended by a signal.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle=",".join(name for name in ENDING if signal.Signals[name] not in forwarded),
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        lead = Path(folder) / "lead"
        os.environ[LEAD_FILE] = str(lead)

        def forward(number: int, *_: object) -> None:
            if not lead.exists():
                raise KeyboardInterrupt
            os.kill(int(lead.read_text()), number)

        for number in forwarded:
            signal.signal(number, forward)
        return _run_launcher(config, module, args)


def present_lead() -> None:
    """On the lead: tells the process that launched it where to send Ctrl-C, if one did."""
    if path := os.environ.get(LEAD_FILE):
        scratch = Path(path).with_suffix(".part")
        scratch.write_text(str(os.getpid()))
        scratch.rename(path)


def _run_launcher(config: Any, module: str, args: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = rank_name(rank, config.nproc_per_node - 1)
            raise RankFailure(f"{name} was ended by {failure.signal_name()}", rank) from None
        return failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0
