"""Which methods an evaluation compares, and how each begins an answer. Knows no questions and no files of results."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from spd_lightning.inference.evaluation.baseline import generate_starter
from spd_lightning.inference.evaluation.compiled import compiled_starter
from spd_lightning.inference.evaluation.runner import (
    BASELINES,
    DRAFTED,
    METHODS,
    WHOLE_TARGET_METHODS,
    Method,
)
from spd_lightning.inference.evaluation.sample import TREE
from spd_lightning.inference.runtime.interface import OneProcess
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.modules.checkpoint import read_drafter_config
from spd_lightning.modules.target import FrozenTarget, TargetDtype

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder

TREE_WIDTH = 4
"""Of `spd_tree`, unless it is given."""
CHAIN = "spd"
"""The method whose drafters `spd_tree` is for: the rivals among the pipelines decode as they are defined."""


def drafter_labels(folders: Sequence[str]) -> list[str]:
    """A drafter's name in tables: its folder's, or of a folder `drafter` the run's around it."""
    paths = [Path(folder).resolve() for folder in folders]
    return [path.parent.name if path.name == "drafter" else path.name for path in paths]


def drafter_methods(folders: Sequence[str], target: str | None, runtime: str) -> dict[str, str]:
    """The method of each drafter folder, as its configuration names it.

    Args:
        folders: of the drafters.
        target: that the command names, or none: then the drafters' own.
        runtime: of the decoders.

    Raises:
        ValueError: if the folders cannot be read, or their drafters cannot be evaluated together.
    """
    records = {folder: read_drafter_config(Path(folder)) for folder in folders}
    targets = sorted({str(record["target"]["name"]) for record, _ in records.values()})
    if target is None and len(targets) > 1:
        raise ValueError(
            f"the drafters are for different targets, {' and '.join(targets)}: evaluate them one by one, or name one "
            "target with --target"
        )
    counts = {getattr(config, "num_stages", 1) for _, config in records.values()}
    if runtime == "distributed" and len(counts) > 1:
        raise ValueError(
            f"drafters of {sorted(counts)} stages need other numbers of processes: evaluate them one by one"
        )
    return {folder: config.method for folder, (_, config) in records.items()}


def chosen_methods(
    asked: Sequence[str] | None, drafters: Mapping[str, str], runtime: str, check_lossless: bool
) -> list[str]:
    """The methods to compare: those asked for, or `ar` and those of the drafters.

    Args:
        asked: names, or none.
        drafters: the method of each folder.
        runtime: of the decoders.
        check_lossless: whether answers must be compared with plain decoding's.

    Raises:
        ValueError: if a name is unknown, a drafter is of none of them or one of them has no drafter, or a baseline
            does not work with the runtime.
    """
    if asked is None:
        asked = [method for method in METHODS if method == "ar" or method in drafters.values()]
    if unknown := [method for method in asked if method not in METHODS]:
        raise ValueError(f"methods {unknown}: known are {', '.join(METHODS)}")
    drafted = [method for method in asked if method in DRAFTED]
    possible = {*drafters.values(), *(TREE for method in drafters.values() if method == CHAIN)}
    if without := sorted(set(drafted) - possible):
        raise ValueError(f"--methods {', '.join(without)}: none of the drafters is of this method")
    for folder, method in drafters.items():
        if drafted and method not in drafted and not (method == CHAIN and TREE in drafted):
            raise ValueError(
                f"the drafter {folder} is of method {method!r}: add it to --methods, or leave one of them out"
            )
    if check_lossless and not (drafted and "ar" in asked):
        raise ValueError("check_lossless compares a drafter's answers with those of ar: --methods needs both")
    if runtime != "local" and "eagle3" in drafted:
        raise ValueError(f"eagle3 decodes on one device: leave it out, or use --runtime local, not {runtime}")
    if runtime == "distributed" and (whole := sorted(WHOLE_TARGET_METHODS & set(asked))):
        raise ValueError(f"{whole} need the whole target in one process: leave them out, or use --runtime local")
    return list(asked)


def tree_shape_of(
    method: str, methods: Sequence[str], tree_width: int | None, refill_width: int | None
) -> TreeShape | None:
    """The shape of the trees that a drafter decodes with, beside chains; none where no trees are asked for.

    Args:
        method: the drafter's.
        methods: to compare.
        tree_width: `TREE_WIDTH` when absent.
        refill_width: the same while the pipeline refills; `tree_width` when absent.

    Raises:
        ValueError: if widths are given and no trees asked for, or the other way round.
    """
    if TREE not in methods:
        if tree_width is not None or refill_width is not None:
            raise ValueError(f"tree_width and refill_width are of {TREE}: add it to --methods, or leave them out")
        return None
    shape = TreeShape.build(TREE_WIDTH if tree_width is None else tree_width, refill_width)
    if shape is None:
        raise ValueError(f"tree_width={tree_width} makes chains, which is what spd does: give {TREE} at least 2")
    return shape if method == CHAIN else None


def make_methods(
    names: Sequence[str], decoder: "PipelineDecoder", label: str, runtime: str, dtype: TargetDtype
) -> list[Method]:
    """The ways to answer, plain decoding first: others are compared with it.

    Args:
        names: of the methods; those of other drafters than the decoder's are left out.
        decoder: of one drafter.
        label: the drafter's.
        runtime: the decoder's.
        dtype: of the target.
    """
    clock = "virtual" if runtime == "virtual" else "wall"
    devices = decoder.runtime.num_devices

    @cache
    def whole() -> FrozenTarget:
        assert isinstance(decoder.runtime, OneProcess)
        return FrozenTarget.from_pretrained(decoder.target_name, dtype, decoder.runtime.device)

    start_compiled, compile_target = compiled_starter(decoder, whole)
    methods = {
        "ar": Method("ar", None, decoder.start_autoregressive, devices if clock == "wall" else 1, clock),
        "compiled": Method("compiled", None, start_compiled, 1, clock, compile_target),
        "generate": Method("generate", None, generate_starter(decoder, whole), 1, clock, whole),
    }
    assert tuple(methods) == BASELINES
    own = decoder.drafter.module.config.method
    methods[own] = Method(own, label, decoder.start_chain, devices, clock)
    if decoder.shape is not None:
        methods[TREE] = Method(TREE, label, decoder.start, devices, clock)
    return [methods[name] for name in METHODS if name in names and name in methods]
