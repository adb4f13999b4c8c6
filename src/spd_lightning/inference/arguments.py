"""What every command that decodes is told, and where it then runs: here, or in ranks that it starts or is one of."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder
    from spd_lightning.inference.runtime.environment import RankEnvironment
    from spd_lightning.inference.tree.schedule import TreeShape

CLI_MODULE = "spd_lightning.inference.cli"
SECONDS_FOR_OTHERS = 5.0
"""How long a rank waits that is not to be the first to end."""


def add_decoding_arguments(parser: ArgumentParser, several_temperatures: bool = False) -> None:
    """The target, how tokens are drawn, and where the work is done."""
    add = parser.add_argument
    if several_temperatures:
        add("--temperature", type=float, nargs="+", default=[0.0], help="0 decodes greedily")
    else:
        add("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add("--top_k", type=int, default=50, help="only so many likeliest tokens can be drawn; 0 is off")
    add("--top_p", type=float, default=1.0, help="of those, the fewest whose probabilities sum to this; 1 is off")
    add("--seed", type=int | None, default=None, help="of all draws; drawn and printed when absent")
    add("--stop", type=list[str], default=[], help="strings that end the text")
    add_runtime_arguments(parser)


def add_runtime_arguments(parser: ArgumentParser) -> None:
    """The target, its drafts, and where the work is done: what holds for every answer of a decoder."""
    add = parser.add_argument
    add("--target", type=str | None, default=None, help="folder or hub id of the target; the drafter names its own")
    add("--max_new_tokens", type=int, default=512, help="tokens of an answer at most")
    add("--max_length", type=int, default=4096, help="prompt and answer together at most; caches are made for it")
    add(
        "--verify",
        type=Literal["rejection", "coupled"],
        default="rejection",
        help="sampled drafts: accept most, or give the very text of plain sampling with this seed",
    )
    add(
        "--schedule",
        type=Literal["pre_step", "post_step"] | None,
        default=None,
        help="when drafts are made; the drafter was trained for one, another is an error",
    )
    add(
        "--tree_width",
        type=int | None,
        default=None,
        help="candidates of a position in flight at most; 1, when absent, drafts chains (eval: 4, of spd_tree)",
    )
    add(
        "--refill_width",
        type=int | None,
        default=None,
        help="the same while the pipeline refills and stages idle; tree_width when absent",
    )
    add("--draft_length", type=int | None, default=None, help="EAGLE-3: drafts of a round, 7 when absent")
    add(
        "--runtime",
        type=Literal["local", "distributed", "virtual"],
        default="local",
        help="all stages in this process; or one process per stage and one that drafts, started here, or by torchrun "
        "or srun on one node or many; or in this process with a clock per rank, as if each had a device of its own",
    )
    add("--link_us", type=float, default=20.0, help="virtual runtime: latency of a message in microseconds")
    add("--link_gb_s", type=float, default=25.0, help="virtual runtime: gigabytes per second between two ranks")
    add("--record_us", type=float, default=50.0, help="virtual runtime: microseconds of the exchange after each cycle")
    add("--timeout", type=float, default=120.0, help="seconds after which a process that does not answer is given up")
    add("--dtype", type=Literal["auto", "float32", "bfloat16"], default="auto", help="auto keeps the checkpoint's")
    add("--device", type=str, default="auto", help="auto takes a GPU if there is one")


def sampling_params(given: Namespace, temperature: float | None = None) -> Any:
    """The sampling parameters that the arguments ask for, with a seed if they sample; at another temperature if given."""
    from spd_lightning.inference.sampling import SamplingParams

    params = SamplingParams(
        given.max_new_tokens,
        given.temperature if temperature is None else temperature,
        given.top_k,
        given.top_p,
        given.seed,
        given.verify,
        tuple(given.stop),
    )
    return params if params.is_greedy else params.seeded()


def tree_shape(given: Namespace) -> "TreeShape | None":
    """The shape of the trees that the arguments ask for; none for chains."""
    from spd_lightning.inference.tree.schedule import TreeShape

    return TreeShape.build(1 if given.tree_width is None else given.tree_width, given.refill_width)


def run_on_ranks(
    given: Namespace,
    args: Sequence[str],
    work: Callable[[], None],
    forwarded: Sequence[signal.Signals] = (signal.SIGINT,),
) -> None:
    """Runs `work` here; under `--runtime distributed` in every rank, which are started here unless this is one.

    Args:
        given: the arguments.
        args: the whole command line, for processes that are started.
        work: what each rank does.
        forwarded: signals that this process hands to the lead, if it starts the ranks.

    Raises:
        SystemExit: with 1, and one line of error, where a rank has failed.
    """
    if not given.timeout > 0:
        raise ValueError(f"timeout={given.timeout}: a number of seconds above 0 is needed")
    if given.runtime != "distributed":
        work()
        return

    from spd_lightning.inference.compatibility import check_method, check_schedule, check_target
    from spd_lightning.inference.runtime.distributed import launch
    from spd_lightning.inference.runtime.environment import rank_environment
    from spd_lightning.inference.runtime.liveness import RankFailure
    from spd_lightning.modules.checkpoint import load_drafter
    from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter

    environment = rank_environment()
    try:
        if environment is None:
            drafter = load_drafter(given.drafter if isinstance(given.drafter, str) else given.drafter[0])
            check_schedule(drafter, given.schedule)
            check_method(drafter, given.runtime, given.draft_length, tree_shape(given))
            check_target(drafter, given.target)
            assert not isinstance(drafter.module, Eagle3Drafter)
            if code := launch(drafter.module.config.num_stages + 1, CLI_MODULE, args, forwarded):
                raise SystemExit(code)
        else:
            run_as_rank(environment, work)
    except RankFailure as failure:
        # The lead speaks for all, if it can; a rank that failed by itself has spoken already.
        if not failure.is_told and (environment is None or environment.rank == 0 or failure.rank in (0, None)):
            print(f"spd-infer: error: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def run_as_rank(environment: "RankEnvironment", work: Callable[[], None]) -> None:
    """Runs `work` as one rank of several, of which the lead hears of Ctrl-C, and tells the others."""
    from spd_lightning.inference.runtime.distributed import present_lead
    from spd_lightning.inference.runtime.liveness import RankFailure

    if environment.rank == 0:
        present_lead()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work()
    except BaseException as error:
        # A rank that fails by itself ends first: its exit code is then the launcher's. One that holds the store ends
        # last: without it the others could not tell who is to blame.
        told_by_other = isinstance(error, RankFailure) and error.is_told
        if told_by_other or environment.store_host == environment.rank:
            time.sleep(SECONDS_FOR_OTHERS)
        raise


@contextmanager
def opened_decoder(given: Namespace, drafter: str) -> "Iterator[PipelineDecoder]":
    """The decoder that the arguments ask for; on leaving, the other ranks are let go."""
    import torch

    from spd_lightning.inference.decoder import PipelineDecoder
    from spd_lightning.inference.runtime.virtual import Link

    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with PipelineDecoder.from_pretrained(
        drafter,
        given.target,
        given.runtime,
        given.dtype,
        device,
        given.max_length,
        given.timeout,
        Link(given.link_us * 1e-6, given.link_gb_s * 1e9, given.record_us * 1e-6),
        given.schedule,
        given.draft_length,
        tree_shape(given),
    ) as decoder:
        yield decoder
