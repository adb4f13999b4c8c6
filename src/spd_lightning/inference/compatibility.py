"""What a drafter can be decoded with: its own target, schedule and method only. Raises errors; loads nothing."""

from typing import Any, Literal

from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.modules.checkpoint import Drafter
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.features import Schedule
from spd_lightning.modules.target import read_target_shape

RuntimeName = Literal["local", "distributed", "virtual"]


def check_method(
    drafter: Drafter, runtime: RuntimeName, draft_length: int | None, shape: TreeShape | None = None
) -> None:
    """Raises `ValueError` for a runtime or an option that the drafter's method does not have."""
    if shape is not None:
        check_trees(drafter.module.config, shape)
    is_eagle = isinstance(drafter.module, Eagle3Drafter)
    if is_eagle and runtime != "local":
        raise ValueError(
            f"runtime={runtime!r}: an EAGLE-3 drafter decodes on one device, without stages: use --runtime local"
        )
    if draft_length is not None and not is_eagle:
        raise ValueError(f"draft_length={draft_length} is for EAGLE-3 drafters, and this is none: leave it out")


def check_trees(config: DrafterConfig | Eagle3Config, shape: TreeShape) -> None:
    """Raises `ValueError` if a drafter cannot draft trees."""
    if isinstance(config, Eagle3Config):
        raise ValueError(f"tree_width={shape.width}: an EAGLE-3 drafter drafts chains only: leave it out")
    if config.num_stages == 1:
        raise ValueError(
            f"trees {shape.width} wide: the drafter has one stage, and with one stage nothing is in flight behind the "
            "newest token, so a tree cannot help: decode without trees"
        )


def check_schedule(drafter: Drafter, schedule: Schedule | None) -> None:
    """Raises `ValueError` for another schedule than the one that the drafter was trained for."""
    if isinstance(drafter.module, Eagle3Drafter):
        if schedule is not None:
            raise ValueError(f"schedule={schedule!r}, but the drafter is EAGLE-3's, which has none: leave it out")
        return
    own = drafter.module.layout.schedule
    if schedule not in (None, own):
        raise ValueError(f"schedule={schedule!r}, but the drafter was trained for {own!r}: leave it out")


def check_target(drafter: Drafter, name: str | None = None) -> str:
    """Refuses a target that the drafter was not trained for; another quantisation or dtype of it is fine.

    Args:
        drafter: with its record.
        name: folder or hub id; the drafter's own target when absent.

    Returns:
        The target's name.

    Raises:
        ValueError: naming what differs.
    """
    trained: dict[str, Any] = drafter.record["target"]
    name = str(trained["name"]) if name is None else name
    shape = read_target_shape(name)
    wrong = [
        f"{key} {getattr(shape, key)!r} instead of {trained[key]!r}"
        for key in ("family", "num_layers", "hidden_size", "vocab_size")
        if getattr(shape, key) != trained[key]
    ]
    if wrong:
        raise ValueError(
            f"target {name!r} is not the one that the drafter was trained for ({trained['name']!r}): {', '.join(wrong)}"
        )
    return name
