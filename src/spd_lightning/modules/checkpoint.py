"""Drafter folders: `drafter.safetensors` and `config.json`, all that decoding needs beside the target.

Knows file formats; knows neither the trainer nor the processes that use a drafter.
"""

import json
import os
import pickle
import platform
import shlex
import struct
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.hub import CONFIG_FILE, WEIGHTS_FILE, locate_drafter
from spd_lightning.modules.target import TargetShape

FORMAT, FORMAT_VERSION = "spd-lightning-drafter", 1
STATE_PREFIX = "drafter."
EAGLE3 = "eagle3"
"""The `method` of a record whose drafter is EAGLE-3's; all others are Pipeline Draft Modules."""
KIND = ("format", "architectures")
"""Keys by which the configurations of models and drafters are told apart."""
UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What reading raises when a file of `torch.save` is damaged or malformed; a pickle can go wrong in all these ways."""
RECORDED_PACKAGES = ("spd-lightning", "torch", "transformers", "lightning", "datasets")


@dataclass(frozen=True)
class Drafter:
    """A drafter read from its folder: the module and the record beside it."""

    module: PipelineDraftModule | Eagle3Drafter
    record: dict[str, Any]


def conventions(config: DrafterConfig | Eagle3Config) -> dict[str, Any]:
    """How the weights are meant: what a reader must do with them."""
    own = {"method": EAGLE3} if isinstance(config, Eagle3Config) else {"method": "spd", "schedule": config.schedule}
    scaling = getattr(config, "rope_scaling", None)
    return own | {
        "norm_convention": "weight",  # gains are stored as they are applied, never as the `w` of `1 + w`
        "rotary": {"theta": config.rope_theta, "dims": config.rotary_dims, "layout": "half_split"}
        | ({} if scaling is None else {"scaling": {"type": "llama3", **asdict(scaling)}}),
    }


def drafter_record(
    config: DrafterConfig | Eagle3Config,
    target_name: str,
    target: TargetShape,
    tokenizer: Mapping[str, Any],
    draft_vocab: DraftVocab,
    metrics: Mapping[str, float],
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON that stands beside a drafter's weights.

    Args:
        config: shape and layout of the drafter.
        target_name: folder or hub id that it was trained for.
        target: the target's sizes, family and revision.
        tokenizer: name, number of tokens, hash, template hash and EOS ids of the target's tokenizer.
        draft_vocab: the draft vocabulary, which travels with the drafter.
        metrics: the last logged figures.
        provenance: what else is known of where the drafter comes from; JSON-ready.
    """
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "drafter": config.to_dict(),
        **conventions(config),
        "target": {"name": target_name} | asdict(target),
        "tokenizer": dict(tokenizer),
        "draft_vocab": draft_vocab.to_json() | {"tokenizer_hash": tokenizer["hash"]},
        "provenance": {
            "command": shlex.join(sys.argv),
            "python": platform.python_version(),
            "versions": {package: version(package) for package in RECORDED_PACKAGES},
            "metrics": dict(metrics),
            **(provenance or {}),
        },
    }


def save_drafter(folder: Path, state: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Writes a drafter folder; each file appears whole or not at all, the configuration last."""
    save_weights(folder / WEIGHTS_FILE, state, record)


def save_weights(
    path: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], metadata: dict[str, str] | None = None
) -> None:
    """Writes weights and, last, the `config.json` beside them; each file appears whole or not at all.

    Args:
        path: of the weights; its folder is made if it is not there.
        state: tensors of any device.
        config: JSON-ready.
        metadata: of the weights' file.

    Raises:
        ValueError: if something else is in the folder and would be lost.
    """
    folder = path.parent
    check_replaceable(path, config)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        weights, beside = Path(scratch) / path.name, Path(scratch) / CONFIG_FILE
        try:
            save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, weights, metadata)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written ({error})") from error
        beside.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        weights.chmod(beside.stat().st_mode)  # safetensors lets nobody else read what it writes
        (folder / CONFIG_FILE).unlink(missing_ok=True)  # never an old configuration beside new weights
        os.replace(weights, path)
        os.replace(beside, folder / CONFIG_FILE)


def check_replaceable(path: Path, record: Mapping[str, Any]) -> None:
    """Raises `ValueError` if weights at `path` and a configuration would replace those of something else."""
    beside = path.with_name(CONFIG_FILE)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a file would be written there: remove it or name another folder")
    try:
        old = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else record
    except ValueError:  # not JSON, or not even text
        old = None
    if not isinstance(old, Mapping) or any(old.get(key) != record.get(key) for key in KIND):
        raise ValueError(f"{beside} is not that of such a drafter and would be lost: name another folder to write to")


def load_drafter(folder: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Drafter:
    """Reads a drafter folder, a local one or one of the hub (see `locate_drafter`).

    Raises:
        ValueError: if the folder is missing, incomplete, of another format version or contradicts itself.
    """
    folder = locate_drafter(folder)
    record, config = read_drafter_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise ValueError(f"{folder}: {WEIGHTS_FILE} is missing; export the drafter again with `spd-train export`")
    try:
        state = load_file(weights)
    except SafetensorError as error:
        raise ValueError(f"{weights}: not a readable safetensors file ({error}); export the drafter again") from error
    with torch.device("meta"):
        module = Eagle3Drafter(config) if isinstance(config, Eagle3Config) else PipelineDraftModule(config)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit {CONFIG_FILE}: {' '.join(str(error).split())}") from error
    if module.draft_token_ids.tolist() != record["draft_vocab"]["token_ids"]:
        raise ValueError(f"{folder}: the draft vocabularies of {CONFIG_FILE} and {WEIGHTS_FILE} differ")
    return Drafter(module.to(device=device, dtype=dtype).eval().requires_grad_(False), record)


def read_drafter_config(folder: str | Path) -> tuple[dict[str, Any], DrafterConfig | Eagle3Config]:
    """The record of a drafter folder, local or on the hub, and what it says of the drafter, without its weights.

    Raises:
        ValueError: if the folder is missing, of another format version, or its record is incomplete or contradictory.
    """
    folder = locate_drafter(folder)
    record = read_record(folder)
    try:
        config = (Eagle3Config if record["method"] == EAGLE3 else DrafterConfig).from_dict(record["drafter"])
        _ = record["draft_vocab"]["token_ids"], record["target"]["name"], record["provenance"]["metrics"]
        check_agreement(record, config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE}: incomplete or from another version ({error})") from error
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG_FILE}: {error}") from error
    return record, config


def check_agreement(record: Mapping[str, Any], config: DrafterConfig | Eagle3Config) -> None:
    """Raises `ValueError` where a record says something of its drafter that this release would not do."""
    target = record["target"]
    shape = {"num_layers": config.num_layers, "hidden_size": config.hidden_size}
    for name, size in shape.items():
        if target[name] != size:
            raise ValueError(f"the drafter is for a target with {name}={size}, but target.{name}={target[name]!r}")
    for name, here in conventions(config).items():
        if record[name] != here:
            raise ValueError(f"{name}={record[name]!r}, but this release reads the drafter beside it with {here!r}")


def read_record(folder: Path) -> dict[str, Any]:
    """The `config.json` of a drafter folder, format checked."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        why = f"{CONFIG_FILE} is missing" if folder.exists() else "there is no such folder"
        is_run = (folder / "drafter" / CONFIG_FILE).is_file()
        way = "did you mean its drafter/?" if is_run else "`spd-train fit` makes one"
        raise ValueError(f"{folder}: no drafter here ({why}); {way}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path}: not a drafter of this project (no format: {FORMAT!r})")
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {record.get('format_version')!r}; this release reads version {FORMAT_VERSION}"
        )
    return record


def export_checkpoint(checkpoint: Mapping[str, Any], folder: Path) -> None:
    """Writes the drafter folder of a loaded Lightning checkpoint.

    Raises:
        ValueError: if it holds no drafter.
    """
    if "drafter" not in checkpoint:
        raise ValueError("the checkpoint holds no drafter: it was not written by `spd-train fit`")
    state = {
        name.removeprefix(STATE_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(STATE_PREFIX)
    }
    save_drafter(folder, state, checkpoint["drafter"])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A Lightning checkpoint, from its file or from the folder that a sharded run writes; tensors on the CPU.

    Raises:
        ValueError: if there is none, or it cannot be read safely.
    """
    if path.is_dir():
        from spd_lightning.modules.sharding import consolidate

        return consolidate(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no checkpoint here")
    content = read_saved(path, is_mapped=True)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a checkpoint of a training run (it holds a {type(content).__name__})")
    return content


def read_saved(path: Path, is_mapped: bool = False) -> Any:
    """What `torch.save` wrote into a file, tensors on the CPU; only tensors and plain values are read.

    Args:
        path: of the file.
        is_mapped: whether tensors are read when they are used, so that those left alone, such as an optimizer's, cost
            nothing. For files of our own: the size of a tensor is not checked against what the file has of it then.

    Raises:
        ValueError: if it is damaged, no such file, or holds anything else, which could run code when it is read.
    """
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a readable checkpoint (no file of torch.save, or an incomplete one)")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                raise zipfile.BadZipFile("compressed")  # mapped, it would be read as noise
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: not a readable checkpoint (it holds more than tensors and plain values: NumPy's, or objects that "
            "could run code; or it was saved with pickle protocol 4 or 5)"
        ) from error
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a readable checkpoint (torch cannot read it: {error!r:.160})") from error


def check_resumable(path: Path) -> None:
    """Raises `ValueError` if a run cannot be resumed from this checkpoint file or folder of a sharded run."""
    if path.is_dir():
        from spd_lightning.modules.sharding import check_sharded

        check_sharded(path)
    elif not {"drafter", "loops", "state_dict", "pytorch-lightning_version"} <= read_checkpoint(path).keys():
        raise ValueError(f"{path}: this checkpoint was not written by `spd-train fit`")
