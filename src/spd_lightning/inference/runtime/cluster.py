"""A decoder spread over ranks: this process's rank, loaded, and the requests that the lead announces to the others.

Knows which weights a rank needs; knows neither text nor how messages travel.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from spd_lightning.inference.autoregressive import decode_plainly
from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.runtime.distributed import Transport, join, leave
from spd_lightning.inference.runtime.draft_rank import DraftRank
from spd_lightning.inference.runtime.environment import check_world_size, rank_environment
from spd_lightning.inference.runtime.interface import Method, Runtime
from spd_lightning.inference.runtime.liveness import RankFailure, Store, first_line
from spd_lightning.inference.runtime.rank import Abandoned
from spd_lightning.inference.runtime.roles import load_roles
from spd_lightning.inference.runtime.stage_rank import StageRank
from spd_lightning.inference.runtime.wire import Request
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import PipelineSchedule
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.timing import CycleTimer, CycleTimes, device_seconds
from spd_lightning.inference.token_scores import TokenScores
from spd_lightning.inference.tree.draft_rank import TreeDraftRank
from spd_lightning.inference.tree.schedule import TreeShape, schedule_maker
from spd_lightning.inference.tree.stage_rank import TreeStageRank
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.target import TargetDtype

NO_MORE = "no more requests"
FAREWELL_SECONDS = 5.0


class DistributedRuntime(Runtime):
    """One rank of `n + 1`, all of which hold such an object; the lead (rank 0) decodes, the others `follow`.

    Args:
        rank: what this process does.
        transport: to the other ranks.
        store: shared by all ranks: requests and signs of life.
        tree_rank: what it does for trees; none where it decodes without them.
        shape: of the trees.
    """

    def __init__(
        self,
        rank: StageRank | DraftRank,
        transport: Transport,
        store: Store,
        tree_rank: TreeStageRank | TreeDraftRank | None = None,
        shape: TreeShape | None = None,
    ) -> None:
        self.rank = rank
        self.tree_rank = tree_rank
        self.shape = shape
        self.transport = transport
        self.store = store
        self.liveness = transport.liveness
        self.is_lead = rank.is_lead
        self.num_stages = rank.num_stages
        self.others = [number for number in range(transport.world_size) if number != transport.rank]
        self.num_devices = transport.world_size
        self.num_requests = 0
        self.is_open = True

    @classmethod
    def load(
        cls,
        drafter: PipelineDraftModule,
        target: str,
        num_tokens: int,
        capacity: int,
        dtype: TargetDtype = "auto",
        device: str = "cpu",
        timeout: float = 120.0,
        shape: TreeShape | None = None,
    ) -> "DistributedRuntime":
        """Meets the other ranks and loads this rank's part: a stage from its own weight files, or the drafter.

        Args:
            drafter: the drafter.
            target: folder or hub id.
            num_tokens: `len(tokenizer)`.
            capacity: positions that the caches hold.
            dtype: of target and drafter; `auto` keeps the target checkpoint's.
            device: `cpu`, or `cuda` for the GPU of this rank's number on its node.
            timeout: seconds after which a rank that does not answer is given up.
            shape: of trees, or none.

        Raises:
            ValueError: if this process is no rank, there are not `n + 1` ranks, or the target cannot be loaded.
            RankFailure: if another rank fails.
        """
        num_stages = drafter.config.num_stages
        environment = rank_environment()
        if environment is None:
            raise ValueError(
                f"runtime='distributed' needs {num_stages + 1} processes: start this program with `torchrun "
                f"--nproc_per_node {num_stages + 1}` or under srun, or use `spd-infer --runtime distributed`"
            )
        check_world_size(environment.world_size, num_stages)
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", gpu_of(environment.local_rank, torch.cuda.device_count()))
            torch.cuda.set_device(place)
        max_width = 0 if shape is None else shape.refill_width
        store, transport = join(environment, num_stages, place, timeout, max_width)
        with reporting(transport):
            roles = load_roles(transport, drafter, target, num_tokens, capacity, dtype, place, shape)
            runtime = cls(roles.chain, transport, store, roles.tree, shape)
            runtime.meet("loaded")
        return runtime

    def start_timing(self) -> CycleTimer:
        """A timer of all this rank's cycles from now on."""
        self.transport.timer = timer = CycleTimer(lambda: device_seconds(self.transport.device))
        return timer

    def times_of_ranks(self, mine: CycleTimer) -> list[Sequence[CycleTimes]]:
        """On the lead: closes, and returns every rank's times of the lead's cycles; the others were timed as well."""
        self.close()
        others = [json.loads(self.store.get(f"times/{rank}")) for rank in self.others]
        return [mine.cycles, *([CycleTimes(**times) for times in rank[-len(mine.cycles) :]] for rank in others)]

    def meet(self, what: str) -> None:
        """Returns when all ranks have come here.

        Raises:
            RankFailure: if one fails before.
        """
        self.store.set(f"{what}/{self.transport.rank}", "")
        for rank in self.others:
            self.liveness.wait_for(f"{what}/{rank}", self.others)

    def check(self) -> None:
        """On the lead, between requests: raises `RankFailure` if another rank is lost."""
        self.liveness.check(self.others)

    def decode(
        self,
        method: Method,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopCondition,
        stats: DecodeStats,
        scores: TokenScores | None = None,
    ) -> Generator[int]:
        """On the lead: decodes with all ranks. Scores come from the last stage's rank with its verdicts."""
        num_top = None if scores is None else scores.num_top
        request = self._announce(Request(self.num_requests + 1, method, tuple(prompt), params, num_top))
        yield from self._take_part(request, stop, stats, scores)

    def follow(self, make_stop: Callable[[SamplingParams], StopCondition]) -> None:
        """On all other ranks: does their part of every request until the lead closes.

        Raises:
            RankFailure: if another rank fails.
        """
        while self.is_open:
            self.liveness.activity = "waiting for a request"
            key = f"request/{self.num_requests + 1}"
            data = self.liveness.wait_for(key, self.others)
            if data == NO_MORE.encode():
                self._part()
                return
            request = Request.from_json(data)
            self.num_requests = request.number
            try:
                for _ in self._take_part(request, make_stop(request.params), DecodeStats(self.num_stages)):
                    pass
            except Abandoned:
                pass

    def close(self) -> None:
        """On the lead: lets the other ranks end, and ends this one."""
        if not self.is_open:
            return
        self.store.set(f"request/{self.num_requests + 1}", NO_MORE)
        deadline = time.monotonic() + FAREWELL_SECONDS
        # This process may be the store's host.
        while time.monotonic() < deadline and not self.store.check([f"parted/{rank}" for rank in self.others]):
            time.sleep(0.01)
        self._part()

    def _part(self) -> None:
        self.is_open = False
        timer = self.transport.timer
        if isinstance(timer, CycleTimer):
            self.store.set(f"times/{self.transport.rank}", json.dumps([asdict(times) for times in timer.cycles]))
        self.store.set(f"parted/{self.transport.rank}", "")
        self.liveness.stop()
        leave()

    def _announce(self, request: Request) -> Request:
        if not self.is_lead:
            raise RuntimeError("only the lead, rank 0, takes requests: call follow() on all other ranks")
        if not self.is_open:
            raise RuntimeError("this decoder has been closed, or a rank has failed: make a new one")
        self.num_requests = request.number
        if request.number > 1:  # every rank has ended it, so it has been read
            self.store.delete_key(f"request/{request.number - 1}")
        self.store.set(f"request/{request.number}", request.to_json())
        return request

    def _take_part(
        self, request: Request, stop: StopCondition, stats: DecodeStats, scores: TokenScores | None = None
    ) -> Generator[int]:
        with reporting(self.transport):
            try:
                role, make_schedule = self.rank, PipelineSchedule
                if self.tree_rank is not None and self.shape is not None:
                    # Two roles with buffers of their own: what the last request has sent must be through.
                    self.rank.settle()
                    self.tree_rank.settle()
                    if request.method == "tree":
                        role, make_schedule = self.tree_rank, schedule_maker(self.shape)
                role.begin(request)
                role.scores = scores
                if request.method == "plain":
                    yield from decode_plainly(role, request.prompt, stop)
                else:
                    yield from decode(role, self.num_stages, request.prompt, stop, stats, make_schedule)
            except (Abandoned, GeneratorExit):
                raise
            except BaseException:
                self.is_open = False
                raise


def gpu_of(local_rank: int, num_gpus: int) -> int:
    """The number of a rank's GPU; 0 where each process is shown its own only, as `srun --gpus-per-task 1` does.

    Raises:
        ValueError: if there are fewer GPUs than ranks on this node.
    """
    if (num_gpus > 1 and local_rank >= num_gpus) or num_gpus == 0:
        raise ValueError(
            f"this process is number {local_rank} on its node, which has {num_gpus} GPUs: start fewer processes there, "
            "or use device='cpu'"
        )
    return local_rank if num_gpus > 1 else 0


@contextmanager
def reporting(transport: Transport) -> Iterator[None]:
    """Whatever goes wrong in this rank is told to the others."""
    try:
        yield
    except (RankFailure, Abandoned, GeneratorExit):
        raise
    except BaseException as error:
        transport.liveness.report(first_line(error) or type(error).__name__)
        raise
