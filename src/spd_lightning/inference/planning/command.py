"""`spd-infer plan`: its arguments, and what becomes of them. Knows files and defaults; the planning is `Planner`'s."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import ArgumentParser, Namespace

if TYPE_CHECKING:
    from spd_lightning.inference.planning.plan import DrafterOptions
    from spd_lightning.inference.planning.report import PlanReport
    from spd_lightning.modules.drafter_config import DrafterConfig
    from spd_lightning.modules.model_size import TargetSize

BANDWIDTH = 4000.0
"""GB/s of the published machine, an H20."""
STAGE_COUNTS = (2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages that are considered when no number of devices is given."""
SPEC_LAYERS = range(1, 9)
DRAFT_VOCAB_SIZE = 50_000
"""Of the published drafters; a target with fewer tokens has all of them in it."""


def add_plan_arguments(parser: ArgumentParser) -> None:
    """What `plan` can be told."""
    add = parser.add_argument
    add("--target", type=str | None, default=None, help="folder or hub id; only config.json is read")
    add("--drafter", type=str | None, default=None, help="drafter folder: its sizes, anchors and schedule are used")
    add(
        "--measure",
        type=bool,
        nargs="?",
        const=True,
        default=False,
        help="time layers, head and drafters of these sizes on this machine, instead of estimating from bytes",
    )
    add("--devices", type=int | None, default=None, help="devices at most: one for each stage, one for the drafter")
    add("--p", type=float, default=0.8, help="acceptance that is assumed")
    add("--bandwidth", type=float | None, default=None, help="of a device's memory in GB/s; absent: 4000 (an H20)")
    add("--overhead_ms", type=float, default=0.1, help="of a cycle, beside its pieces: launches, scheduling, verdict")
    add("--link_ms", type=float, default=0.0, help="for one message between two ranks")
    add("--length", type=int, default=1024, help="tokens of context at which the times are meant")
    add("--max_length", type=int, default=4096, help="prompt and answer together at most; caches are made for it")
    add(
        "--anchors",
        type=list[int] | Literal["auto", "quarters"] | None,
        default=None,
        help="layers that the drafter reads: a list, every stage boundary (auto) or every quarter; the drafter's own, "
        "else quarters, when absent",
    )
    add(
        "--schedule",
        type=Literal["pre_step", "post_step"] | None,
        default=None,
        help="absent: the drafter's, or pre_step",
    )
    add("--draft_vocab_size", type=int | None, default=None, help="absent: the drafter's, or 50000")
    add("--dtype", type=Literal["auto", "float32", "bfloat16"], default="auto", help="auto keeps the checkpoint's")
    add("--device", type=str, default="auto", help="for --measure; auto takes a GPU if there is one")
    add("--json", type=bool, nargs="?", const=True, default=False, help="print one JSON object instead of the table")


def run_plan(given: Namespace) -> None:
    """Prints the plans for a target.

    Raises:
        ValueError: if target or drafter cannot be read, do not belong together, or a number makes no sense.
    """
    report = make_report(given)
    print(json.dumps(report.to_json(), ensure_ascii=False) if given.json else report.text())


def make_report(given: Namespace) -> "PlanReport":
    """The plans for what is given; errors as `run_plan`."""
    from spd_lightning.inference.planning.costs import TargetCosts
    from spd_lightning.inference.planning.plan import Assumptions, EstimatedTimes, Planner
    from spd_lightning.inference.planning.report import PlanReport
    from spd_lightning.modules.model_size import read_target_size
    from spd_lightning.modules.partition import even_stage_layers

    for name in ("length", "max_length"):
        if given[name] < 1:
            raise ValueError(f"{name}={given[name]}: at least one token is needed")
    if given.measure and given.bandwidth is not None:
        raise ValueError(f"bandwidth={given.bandwidth:g} is for estimates: leave it or --measure out")
    drafter, name = read_drafter(given)
    size = read_target_size(name)
    if drafter is not None:
        check_fit(given.drafter, drafter, name, size)
    target = TargetCosts(size, given.dtype, given.length)
    counts = stage_counts(given.devices, size.num_layers)
    options = drafter_options(given, drafter, size)
    assumed = Assumptions(given.p, given.overhead_ms, given.link_ms, given.max_length)
    options.costs(target, even_stage_layers(size.num_layers, 2), 1)  # bad anchors are refused before anything is timed
    if given.measure:
        from spd_lightning.inference.planning.measurement import MeasuredTimes

        times = MeasuredTimes(name, target, given.device)
    else:
        times = EstimatedTimes(target, BANDWIDTH if given.bandwidth is None else given.bandwidth)
    planner = Planner(target, times, options, assumed)
    own = None
    if drafter is not None:
        own = planner.plan("drafter's", tuple(drafter.stage_layers), drafter.num_spec_layers)
    return PlanReport(name, planner, planner.plans(counts, SPEC_LAYERS), own)


def read_drafter(given: Namespace) -> tuple["DrafterConfig | None", str]:
    """The configuration of the drafter that is given, if one is, and the target's name.

    Raises:
        ValueError: if its folder cannot be read, or there is no target.
    """
    if given.drafter is None:
        if given.target is None:
            raise ValueError("give --target, --drafter or both: there is nothing to plan for")
        return None, given.target

    from spd_lightning.modules.checkpoint import read_drafter_config
    from spd_lightning.modules.eagle.eagle_config import Eagle3Config

    record, config = read_drafter_config(Path(given.drafter))
    if isinstance(config, Eagle3Config):
        raise ValueError(f"{given.drafter}: an EAGLE-3 drafter runs on one device, so there is no split to plan")
    return config, str(record["target"]["name"]) if given.target is None else given.target


def check_fit(folder: str, drafter: "DrafterConfig", name: str, size: "TargetSize") -> None:
    """Raises `ValueError` if the drafter is for a target of another shape."""
    has, needs = (size.num_layers, size.hidden_size), (drafter.layout.num_layers, drafter.hidden_size)
    if has != needs:
        raise ValueError(
            f"the drafter {folder} is for a target of {needs[0]} layers of width {needs[1]}, but {name!r} has "
            f"{has[0]} of width {has[1]}"
        )


def stage_counts(devices: int | None, num_layers: int) -> Sequence[int]:
    """Numbers of stages to consider.

    Raises:
        ValueError: if there are not enough devices, or layers, for two stages.
    """
    if num_layers < 2:
        raise ValueError(f"a target of {num_layers} layer cannot be cut into stages")
    if devices is None:
        return [count for count in STAGE_COUNTS if count <= num_layers]
    if devices < 3:
        raise ValueError(f"devices={devices}: two stages and a drafter need 3 at least")
    return range(2, min(devices - 1, num_layers) + 1)


def drafter_options(given: Namespace, drafter: "DrafterConfig | None", size: "TargetSize") -> "DrafterOptions":
    """What the drafters that are considered have in common: what is given, else the drafter's, else defaults.

    Raises:
        ValueError: if something is given that the drafter's folder fixes, or the draft vocabulary is too big.
    """
    from spd_lightning.inference.planning.plan import DrafterOptions

    if drafter is not None:
        fixed = [name for name in ("anchors", "schedule", "draft_vocab_size") if given[name] is not None]
        if fixed:
            raise ValueError(f"--{fixed[0]} is fixed by the drafter {given.drafter}: leave one of the two out")
        if given.devices is not None and given.devices < drafter.num_stages + 1:
            raise ValueError(
                f"devices={given.devices}: the drafter {given.drafter} is for {drafter.num_stages} stages, which need "
                f"{drafter.num_stages + 1}"
            )
        return DrafterOptions(
            tuple(drafter.anchors), drafter.schedule, drafter.draft_vocab_size, drafter.num_heads, drafter.num_kv_heads,
            drafter.head_dim, drafter.intermediate_size, drafter.feature_norm, drafter.gated_attention,
        )  # fmt: skip
    rows = given.draft_vocab_size
    if rows is None:
        rows = min(DRAFT_VOCAB_SIZE, size.vocab_size)
    if not 1 <= rows <= size.vocab_size:
        raise ValueError(f"draft_vocab_size={rows}: must be 1 to {size.vocab_size}, the rows of the target's head")
    anchors = tuple(given.anchors) if isinstance(given.anchors, list) else given.anchors or "quarters"
    return DrafterOptions(anchors, given.schedule or "pre_step", rows)
