"""A tiny target and a drafter for it, as folders that commands take."""

from pathlib import Path
from typing import Any

import torch

from spd_lightning.modules.checkpoint import drafter_record, save_drafter
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import read_target_shape
from spd_lightning.modules.tiny_target import save_tiny_target
from spd_lightning.modules.tokenizer import load_tokenizer, tokenizer_record
from tests.modules.conftest import make_drafter


def save_folders(
    root: Path, family: str = "qwen3_5", num_stages: int = 4, name: str = "drafter", **layout: Any
) -> tuple[str, str]:
    """Writes both below `root` and returns the drafter's folder and the target's; `layout` as for `FeatureLayout`."""
    target = (
        str(save_tiny_target(root / "target", family, 8)) if not (root / "target").exists() else str(root / "target")
    )
    drafter = make_drafter(FeatureLayout.build(8, num_stages, **layout), torch.float32)
    record = drafter_record(
        drafter.config,
        target_name=target,
        target=read_target_shape(target),
        tokenizer=tokenizer_record(load_tokenizer(target), [258]),
        draft_vocab=DraftVocab(tuple(drafter.draft_token_ids.tolist())),
        metrics={},
    )
    save_drafter(root / name, drafter.state_dict(), record)
    return str(root / name), target
