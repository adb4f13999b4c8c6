"""Fully sharded data parallelism (FSDP2) of the drafter. Knows no losses and no data."""

import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from spd_lightning.modules.drafter import DraftModule


def shard_drafter(drafter: DraftModule, mesh: DeviceMesh) -> None:
    """Shards the drafter in place, layer by layer; the target is not touched and stays whole on every rank."""
    for layer in cast(Any, drafter).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(drafter, mesh=mesh)


METADATA_FILE = "meta.pt"
"""Where Lightning's sharded checkpoints keep all that is not a tensor of the model or an optimizer."""


def check_sharded(folder: Path) -> None:
    """Raises `ValueError` if the folder is no checkpoint of a sharded run."""
    if not (folder / METADATA_FILE).is_file():
        raise ValueError(f"{folder}: no sharded checkpoint here ({METADATA_FILE} is missing)")


def consolidate(folder: Path) -> dict[str, Any]:
    """The contents of a sharded checkpoint folder as one dict on the CPU.

    Raises:
        ValueError: if the folder is no such checkpoint.
    """
    check_sharded(folder)
    metadata = folder / METADATA_FILE
    with tempfile.TemporaryDirectory() as scratch:
        merged = Path(scratch) / "merged.pt"
        dcp_to_torch_save(folder, merged)
        return torch.load(merged, weights_only=True) | torch.load(metadata, map_location="cpu", weights_only=True)
