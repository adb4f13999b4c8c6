"""Ranks of a decoder as forked processes over gloo and a file store: no ports, and the modules are there already."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.cluster import DistributedRuntime
from spd_lightning.inference.runtime.distributed import Operation, Posted, Transport, join
from spd_lightning.inference.runtime.draft_rank import DraftRank
from spd_lightning.inference.runtime.environment import RankEnvironment
from spd_lightning.inference.runtime.interface import Method
from spd_lightning.inference.runtime.liveness import RankFailure
from spd_lightning.inference.runtime.stage_rank import StageRank
from spd_lightning.inference.runtime.wire import CycleRecord
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.tree.draft_rank import TreeDraftRank
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.stage_rank import TreeStageRank
from spd_lightning.inference.tree.verify import make_tree_verifier
from spd_lightning.inference.verify import make_verifier
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import CAPACITY, GREEDY, TOKENIZER, cut
from tests.modules.conftest import make_drafter

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    Attributes:
        value: what its function returned.
        error: what it raised, as text; `blamed` is the rank that it blames, if it was a `RankFailure`.
        seconds: from the start of all to its end.
        exitcode: of the process.
    """

    value: Any
    error: str | None
    blamed: int | None
    seconds: float
    exitcode: int | None


def run_ranks(
    num_ranks: int,
    body: Callable[[int, str], Any],
    folder: Path,
    limit: float = 90.0,
    doomed: int | None = None,
) -> list[Outcome]:
    """Runs `body(rank, init_method)` in a process per rank.

    Those that do not end in time are killed, and the `doomed` one as soon as all others have ended.
    """
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    store = folder / f"store-{time.monotonic_ns()}"
    children = []
    for rank in range(num_ranks):
        result = folder / f"{store.name}-{rank}"
        process = context.Process(target=_child, args=(body, rank, f"file://{store}", result, began), daemon=True)
        process.start()
        children.append((process, result))
    outcomes: list[Any] = [None] * num_ranks
    for rank in sorted(range(num_ranks), key=lambda rank: rank == doomed):
        process, result = children[rank]
        process.join(0.0 if rank == doomed else max(0.0, began + limit - time.monotonic()))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
        if result.exists():
            outcomes[rank] = Outcome(*pickle.loads(result.read_bytes()), process.exitcode)
        else:
            outcomes[rank] = Outcome(None, "no result", None, time.monotonic() - began, process.exitcode)
    return outcomes


def _child(body: Callable[[int, str], Any], rank: int, url: str, result: Path, began: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    value, error, blamed = None, None, None
    try:
        value = body(rank, url)
    except RankFailure as failure:
        error, blamed = str(failure), failure.rank
    except BaseException:
        error = traceback.format_exc()
    scratch = result.with_suffix(".part")
    scratch.write_bytes(pickle.dumps((value, error, blamed, time.monotonic() - began)))
    scratch.rename(result)
    os._exit(0 if error is None else 1)  # what a failed process group leaves behind is not waited for


class Ledger(Transport):
    """Writes down every operation, and when it was posted and waited for."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport.rank, transport.world_size, transport.device, transport.liveness)
        self.entries: list[tuple[Any, ...]] = []

    def post(self, operations: Sequence[Operation]) -> Posted:
        for op in operations:
            self.entries.append((op.kind, op.peer, tuple(op.data.shape), op.data.dtype))
        posted, ledger = super().post(operations), self
        wait = posted.wait

        def noting() -> None:
            if operations:
                ledger.entries.append(("wait", tuple(op.kind for op in operations)))
            wait()

        posted.wait = noting  # pyright: ignore[reportAttributeAccessIssue]
        return posted

    def exchange(self, record: CycleRecord) -> list[CycleRecord]:
        self.entries.append(("exchange", record.request, record.cycle))
        return super().exchange(record)


def make_runtime(
    rank: int,
    url: str,
    target: Any,
    layout: Any,
    proposer: Any = None,
    timeout: float = 30.0,
    wrap: Callable[[Transport], Transport] = lambda transport: transport,
    drafter: Any = None,
    shape: TreeShape | None = None,
) -> DistributedRuntime:
    """This rank of a decoder of a tiny target; `proposer` drafts in the place of the drafter, `shape` is of trees."""
    num_stages, width = layout.num_stages, 0 if shape is None else shape.refill_width
    store, transport = join(RankEnvironment(rank, num_stages + 1, rank, url), num_stages, CPU, timeout, width)
    transport = wrap(transport)
    drafter = drafter or make_drafter(layout, target.head_weight.dtype)
    tree_role, capacity = None, CAPACITY + num_stages * width
    if rank == num_stages:
        role = DraftRank(transport, DraftSession(drafter, target.model.model.embed_tokens, capacity))
        if shape is not None:
            tree_role = TreeDraftRank(transport, TreeDraftSession(role.session, width))
        if proposer is not None:
            begin = role.begin

            def scripted(request: Any) -> None:
                begin(request)
                role.proposer = proposer

            role.begin = scripted
    else:
        stage = cut(target, layout, capacity)[rank]
        role = StageRank(
            transport,
            stage,
            num_stages,
            lambda params: make_verifier(params, NUM_TOKENS, drafter.draft_token_ids),
            drafter.config.draft_vocab_size,
            NUM_TOKENS,
        )
        if shape is not None:
            tree_role = TreeStageRank(
                transport,
                TreeStage(stage, num_stages, width),
                num_stages,
                lambda params: make_tree_verifier(params, NUM_TOKENS, drafter.draft_token_ids),
                drafter.config.draft_vocab_size,
                NUM_TOKENS,
            )
    runtime = DistributedRuntime(role, transport, store, tree_role, shape)
    runtime.meet("loaded")
    return runtime


def stop_for(params: Any = GREEDY, eos: Sequence[int] = ()) -> StopCondition:
    return StopCondition(eos, params.max_new_tokens, params.stop, TOKENIZER)


def decoded(
    runtime: DistributedRuntime, prompt: Sequence[int], params: Any, method: Method = "pipelined"
) -> tuple[list[int], DecodeStats]:
    """On the lead: a whole decode."""
    stats = DecodeStats(runtime.num_stages)
    return list(runtime.decode(method, prompt, params, stop_for(params), stats)), stats
