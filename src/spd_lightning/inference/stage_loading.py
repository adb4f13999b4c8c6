"""One stage of a target, read from only the weight files that hold it. Knows no ranks, no caches and no drafter."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

from spd_lightning.modules.target import (
    GAIN_OFFSETS,
    TargetDtype,
    TargetShape,
    expect_reference_code,
    explained_loading,
    target_shape,
)
from spd_lightning.modules.target_files import locate_target

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WRAPPED_BODY = "model.language_model."
"""Before the names of the text model in checkpoints that have a vision part beside it; without one, `model.`"""

LAYER_TYPES = frozenset({"full_attention", "linear_attention"})
OBSOLETE = "rotary_emb.inv_freq"
"""A buffer that old Llama checkpoints have in every layer; it is computed, never read."""


@dataclass(frozen=True)
class StageModules:
    """The modules of a stage, in `eval()` and without gradients.

    Attributes:
        layers: Transformers' decoder layers, numbered from 0 within the stage.
        embedding: of the tokens; where asked for.
        norm: the final one; where the head was asked for.
        head: from normed states to logits; where asked for. Tied: its weight is the embedding's.
        rotary: `rotary(hidden, position_ids)` gives the layers' `position_embeddings`.
        config: the text configuration as the stage's own: `num_hidden_layers` and `layer_types` are the stage's.
        layer_types: `full_attention` or `linear_attention`, one per layer of the stage.
        vocab_size: rows of the embedding and the head, the padding beyond the tokenizer's included.
    """

    layers: nn.ModuleList
    embedding: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None
    rotary: nn.Module
    config: Any
    layer_types: tuple[str, ...]
    vocab_size: int


def load_stage(
    name_or_path: str,
    first_layer: int,
    last_layer: int,
    with_embedding: bool,
    with_head: bool,
    dtype: TargetDtype = "auto",
    device: torch.device | str = "cpu",
) -> StageModules:
    """Layers `first_layer + 1 .. last_layer` of a target, counted from 1 (`e_{j-1}`, `e_j` of stage `j`).

    Every weight has the bits that `AutoModelForCausalLM` gives it under the same `dtype`.

    Args:
        name_or_path: a Transformers folder or hub id; of a hub id only the files needed are downloaded.
        first_layer: layers before the stage.
        last_layer: layers up to its end.
        with_embedding: whether the stage turns ids into states.
        with_head: whether the stage has the final norm and the head.
        dtype: of all weights; `auto` is the checkpoint's.
        device: where the weights go.

    Raises:
        ValueError: if the target has no such layers, is not supported, cannot be reached, or lacks a weight.
    """
    expect_reference_code(device)
    config, shape, files, wanted_dtype = _open_target(name_or_path, dtype)
    if not 0 <= first_layer < last_layer <= shape.num_layers:
        raise ValueError(
            f"layers {first_layer + 1} to {last_layer} of {name_or_path!r} make no stage: a stage has at least one "
            f"layer, and the target has {shape.num_layers}"
        )
    stage_config = _stage_config(config, first_layer, last_layer)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(stage_config, dtype=wanted_dtype)
    model.eval().requires_grad_(False)

    body = model.model
    prefix = files.body_prefix
    parts = {f"{prefix}layers.{first_layer + index}.": layer for index, layer in enumerate(body.layers)}
    if with_embedding or (with_head and shape.tied):
        parts[f"{prefix}embed_tokens."] = body.embed_tokens
    if with_head:
        parts[f"{prefix}norm."] = body.norm
    if with_head and not shape.tied:
        parts["lm_head."] = model.lm_head
    keys = _checked_keys(parts, files.file_of, name_or_path)
    with explained_loading(name_or_path, f"the weights of layers {first_layer + 1} to {last_layer}"):
        tensors = files.read(keys, wanted_dtype, device)
    for start, module in parts.items():
        module.load_state_dict({name: tensors[start + name] for name in module.state_dict()}, assign=True)
    if shape.tied:  # also when the file has a head of its own
        model.lm_head.weight = body.embed_tokens.weight
    return StageModules(
        layers=body.layers,
        embedding=body.embed_tokens if with_embedding else None,
        norm=body.norm if with_head else None,
        head=model.lm_head if with_head else None,
        # Its frequencies are in no file. They are computed on the CPU, so that they are the same on every device.
        rotary=type(body.rotary_emb)(config=stage_config).eval().to(device),
        config=stage_config,
        layer_types=_layer_types(stage_config),
        vocab_size=shape.vocab_size,
    )


def load_embedding(name_or_path: str, dtype: TargetDtype = "auto", device: torch.device | str = "cpu") -> nn.Embedding:
    """The embedding of a target's tokens alone, for a rank that has no stage; as `load_stage` would load it.

    Raises:
        ValueError: as `load_stage`.
    """
    _, _, files, wanted_dtype = _open_target(name_or_path, dtype)
    key = f"{files.body_prefix}embed_tokens.weight"
    if key not in files.file_of:
        raise ValueError(f"target {name_or_path!r} lacks {key}: the checkpoint is incomplete, download it again")
    with explained_loading(name_or_path, "the embedding"):
        return nn.Embedding.from_pretrained(files.read([key], wanted_dtype, device)[key])


def load_final_norm_gain(name_or_path: str) -> Tensor:
    """The factor that a target's final norm applies, whatever form its family stores it in; in float64.

    Raises:
        ValueError: as `load_stage`.
    """
    _, shape, files, wanted_dtype = _open_target(name_or_path, "auto")
    key = f"{files.body_prefix}norm.weight"
    if key not in files.file_of:
        raise ValueError(f"target {name_or_path!r} lacks {key}: the checkpoint is incomplete, download it again")
    with explained_loading(name_or_path, "the final norm"):
        return files.read([key], wanted_dtype, "cpu")[key].double() + GAIN_OFFSETS[shape.family]


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a target, of which only those asked for are opened.

    Attributes:
        location: a folder or hub id.
        revision: the commit of a hub id.
        file_of: for each tensor the name of its file.
    """

    location: str
    revision: str | None
    file_of: Mapping[str, str]

    @classmethod
    def find(cls, location: str, revision: str | None) -> "WeightFiles":
        """By the single file or, if there is none, by the index.

        Raises:
            ValueError: if there is neither.
        """
        bare = cls(location, revision, {})
        if single := bare._path(SINGLE_FILE):
            with _opened(single) as opened:
                return cls(location, revision, dict.fromkeys(opened.keys(), SINGLE_FILE))
        if index := bare._path(INDEX_FILE):
            return cls(location, revision, json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"])
        raise ValueError(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")

    @property
    def body_prefix(self) -> str:
        """What the names of the text model's weights begin with."""
        return WRAPPED_BODY if any(key.startswith(WRAPPED_BODY) for key in self.file_of) else "model."

    def stored_dtype(self) -> torch.dtype:
        """Of the first tensor of the first file: what Transformers goes by when no configuration states it."""
        with _opened(self._existing(min(self.file_of.values()))) as opened:
            return opened.get_tensor(next(iter(opened.keys()))).dtype

    def read(self, keys: Iterable[str], dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """The tensors of `keys`, cast and in memory of their own.

        Raises:
            ValueError: if a file is missing or damaged.
        """
        keys_of = defaultdict[str, list[str]](list)
        for key in keys:
            keys_of[self.file_of[key]].append(key)
        tensors: dict[str, Tensor] = {}
        for file, its_keys in keys_of.items():
            with _opened(self._existing(file)) as opened:
                for key in its_keys:
                    tensors[key] = opened.get_tensor(key).to(device, dtype, copy=True)
        return tensors

    def _existing(self, file: str) -> str:
        path = self._path(file)
        if path is None:
            raise ValueError(f"the file {file} is missing, which {INDEX_FILE} names")
        return path

    def _path(self, file: str) -> str | None:
        return cached_file(self.location, file, revision=self.revision, _raise_exceptions_for_missing_entries=False)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from error


def _open_target(name_or_path: str, dtype: TargetDtype) -> tuple[Any, TargetShape, WeightFiles, torch.dtype]:
    """A target's text configuration, its shape, its files, and the dtype that `dtype` means for it."""
    with explained_loading(name_or_path, "the configuration"):
        location = locate_target(name_or_path)
        config = AutoConfig.from_pretrained(location)
    shape, text_config = target_shape(config, name_or_path), config.get_text_config()
    if strange := sorted(set(_layer_types(text_config)) - LAYER_TYPES):
        raise ValueError(
            f"target {name_or_path!r} has layers of type {', '.join(strange)}, which are not supported; supported are "
            f"{', '.join(sorted(LAYER_TYPES))}"
        )
    with explained_loading(name_or_path, "the weights"):
        files = WeightFiles.find(location, shape.revision)
        stored = text_config.dtype or files.stored_dtype()
    wanted: torch.dtype = stored if dtype == "auto" else getattr(torch, dtype)  # pyright: ignore[reportAssignmentType]
    return text_config, shape, files, wanted


def _stage_config(config: Any, first_layer: int, last_layer: int) -> Any:
    """The text configuration, left with the stage's layers only."""
    config.num_hidden_layers = last_layer - first_layer
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[first_layer:last_layer])
    return config


def _layer_types(config: Any) -> tuple[str, ...]:
    """Llama's configuration names none: all its layers are full attention."""
    return tuple(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)


def _checked_keys(parts: Mapping[str, nn.Module], known: Iterable[str], name_or_path: str) -> list[str]:
    """The keys of all weights of the modules, each after its prefix: exactly what the checkpoint has there."""
    wanted = [start + name for start, module in parts.items() for name in module.state_dict()]
    present = {key for key in known if key.startswith(tuple(parts)) and not key.endswith(OBSOLETE)}
    if unknown := sorted(present - set(wanted)):
        raise ValueError(
            f"target {name_or_path!r} has {len(unknown)} weights that its layers do not ({', '.join(unknown[:3])}, "
            "...): quantised and adapted checkpoints are not supported, take the original"
        )
    if missing := sorted(set(wanted) - present):
        raise ValueError(
            f"target {name_or_path!r} lacks {len(missing)} weights ({', '.join(missing[:3])}, ...): the checkpoint is "
            "incomplete, download it again"
        )
    return wanted
