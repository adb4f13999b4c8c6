"""A target's small files: where its folder is, its configurations. Knows no model classes; importing it is cheap."""

import hashlib
import json
from pathlib import Path
from typing import Any

from spd_lightning.cache import default_cache_dir
from spd_lightning.modules.hub import offline_when_unreachable

FINGERPRINTED = 2**20
"""Bytes at either end of a file of weights."""
TINY_PREFIX = "tiny-random-"
TINY_FAMILIES = ("qwen3_5", "qwen3", "llama")
"""`tiny-random-qwen3_5` and so on: targets of noise that are made on the spot, for debugging."""


def locate_target(name_or_path: str | Path) -> str:
    """The folder of a tiny random target, made if it is not there yet; every other name as it is.

    Raises:
        ValueError: for a tiny random target of an unknown family.
    """
    name = str(name_or_path)
    if not name.startswith(TINY_PREFIX) or Path(name).exists():
        return name
    family = name.removeprefix(TINY_PREFIX)
    if family not in TINY_FAMILIES:
        known = ", ".join(TINY_PREFIX + known for known in TINY_FAMILIES)
        raise ValueError(f"target {name!r}: there is no such tiny random target; there are {known}")
    folder = default_cache_dir() / "targets" / name
    if not folder.is_dir():
        from spd_lightning.modules.tiny_target import save_tiny_target

        save_tiny_target(folder, family)
    return str(folder)


def target_fingerprint(name_or_path: str | Path) -> str | None:
    """A digest by which weights of a local folder are told from others of the same name; none for a hub id.

    Of each file of weights the size and both ends: a trained or pruned target differs there, and gigabytes are not read.
    """
    folder = Path(locate_target(name_or_path)).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for start in (0, max(0, size - FINGERPRINTED)):
                file.seek(start)
                digest.update(file.read(FINGERPRINTED))
    return digest.hexdigest()


def read_generation_config(name_or_path: str | Path) -> dict[str, Any]:
    """What `generation_config.json` of a folder or hub id says; without one, the EOS ids of `config.json`.

    Raises:
        ValueError: if the file is there and is no JSON object.
    """
    generation = read_target_json(name_or_path, "generation_config.json")
    if generation is not None:
        return generation
    config = read_target_json(name_or_path, "config.json") or {}
    eos = config.get("eos_token_id")
    if eos is None and isinstance(config.get("text_config"), dict):
        eos = config["text_config"].get("eos_token_id")
    return {} if eos is None else {"eos_token_id": eos}


def read_model_config(name_or_path: str | Path) -> dict[str, Any]:
    """The configuration of the text model with its family's defaults filled in, and `dtype` as a name.

    Raises:
        ValueError: one line that says what was looked for, where, and how to point to a local folder.
    """
    from transformers import AutoConfig

    try:
        with offline_when_unreachable():
            config = AutoConfig.from_pretrained(locate_target(name_or_path))
    except (OSError, ValueError, KeyError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"configuration of {str(name_or_path)!r}: not found in a local folder or on the hub ({first_line}); "
            "give a local folder that holds config.json"
        ) from error
    text = config.get_text_config()
    dtype = text.dtype or config.dtype
    # A vision wrapper states tying for both.
    tied = bool(config.tie_word_embeddings or text.tie_word_embeddings)
    return text.to_dict() | {"dtype": str(dtype or "float32").removeprefix("torch."), "tie_word_embeddings": tied}


def read_target_json(name_or_path: str | Path, name: str) -> dict[str, Any] | None:
    """One JSON file of a folder or hub id; none if it has no such file.

    Raises:
        ValueError: if the file is no JSON object.
    """
    location = locate_target(name_or_path)
    folder = Path(location).expanduser()
    if folder.is_dir():
        path = folder / name
        if not path.is_file():
            return None
    else:
        from transformers.utils.hub import cached_file

        with offline_when_unreachable():
            found = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
        if found is None:
            return None
        path = Path(found)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, an object is needed")
    return content
