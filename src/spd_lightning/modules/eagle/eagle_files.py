"""The published EAGLE-3 format (design §10): `model.safetensors` and `config.json` of a folder, in and out.

Knows tensors and plain values; knows no target model and no tokenizer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spd_lightning.modules.checkpoint import save_weights
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.hub import CONFIG_FILE

WEIGHTS_FILE = "model.safetensors"
OFFSETS, MEMBERS, EMBEDDING = "d2t", "t2d", "embed_tokens.weight"
"""Target id minus draft id of each draft id; whether each target id has a draft id; an embedding of its own."""
ARCHITECTURE = "LlamaForCausalLMEagle3"
DEFAULT_THETA = 10000.0
"""Rotary base of published configurations that state none, as in Transformers."""


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter in the published format.

    Attributes:
        state: the weights by the names of `Eagle3Drafter`, head rows in ascending order of target ids.
        token_ids: target ids of the draft vocabulary, ascending.
        config: what the folder says of the drafter's shape.
        embedding: its own copy of the target's embedding, where it has one.
    """

    state: dict[str, Tensor]
    token_ids: tuple[int, ...]
    config: Eagle3Config
    embedding: Tensor | None


def read_published(folder: Path, num_layers: int, num_tokens: int) -> PublishedDrafter:
    """Reads a folder.

    Args:
        folder: of the drafter.
        num_layers: `L`, of the target, of which the format says nothing.
        num_tokens: `len(tokenizer)` of the target: without `d2t` all tokens are in the draft vocabulary.

    Raises:
        ValueError: if a file is missing, or has something that this release cannot do.
    """
    given, tensors = _read_config(folder), _read_weights(folder)
    embedding, offsets = tensors.pop(EMBEDDING, None), tensors.pop(OFFSETS, None)
    tensors.pop(MEMBERS, None)
    for name in ("fc.weight", "lm_head.weight"):
        if name not in tensors:
            raise ValueError(f"{folder / WEIGHTS_FILE}: {name} is missing, so this is no EAGLE-3 drafter")
    rows, hidden = tensors["lm_head.weight"].shape
    if tensors["fc.weight"].shape != (hidden, 3 * hidden):
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: fc.weight is {list(tensors['fc.weight'].shape)}, but fusing three states of "
            f"width {hidden} takes {[hidden, 3 * hidden]}"
        )
    token_ids = torch.arange(rows) if offsets is None else torch.arange(rows) + offsets.long()
    if offsets is None:
        token_ids = token_ids[:num_tokens]
    token_ids, order = token_ids.sort()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    ids = token_ids.tolist()
    if len(set(ids)) < len(ids) or ids[0] < 0 or ids[-1] >= num_tokens:
        raise ValueError(
            f"{folder / WEIGHTS_FILE}: {OFFSETS} gives target ids from {ids[0]} to {ids[-1]}, {len(set(ids))} different "
            f"ones for {len(ids)} draft ids; the target has {num_tokens} tokens: is it the right one?"
        )
    config = _drafter_config(folder, given, num_layers, hidden, len(ids))
    state = {name: value.float() for name, value in tensors.items()} | {"draft_token_ids": token_ids}
    with torch.device("meta"):
        module = Eagle3Drafter(config)
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{folder / WEIGHTS_FILE} is not what {CONFIG_FILE} says, or has parts that this release does not know: "
            f"{' '.join(str(error).split())}"
        ) from error
    return PublishedDrafter(state, tuple(ids), config, embedding)


def write_published(
    folder: Path, state: Mapping[str, Tensor], config: Eagle3Config, target: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Writes a folder; each file appears whole or not at all.

    Args:
        folder: made if it is not there.
        state: the weights by the names of `Eagle3Drafter`.
        config: the drafter's.
        target: the target's sizes, of a drafter record.
        dtype: of the weights.
    """
    token_ids = state["draft_token_ids"].long()
    tensors = {name: value.to(dtype) for name, value in state.items() if name != "draft_token_ids"}
    tensors[OFFSETS] = token_ids - torch.arange(len(token_ids))
    tensors[MEMBERS] = torch.zeros(target["vocab_size"], dtype=torch.bool)
    tensors[MEMBERS][token_ids] = True
    record = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    save_weights(folder / WEIGHTS_FILE, tensors, record, metadata={"format": "pt"})


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: no EAGLE-3 drafter here ({CONFIG_FILE} is missing)")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: an object is needed")
    return content


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: {WEIGHTS_FILE} is missing; other formats (pytorch_model.bin) are not read")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from error


def _drafter_config(folder: Path, given: Mapping[str, Any], num_layers: int, hidden: int, rows: int) -> Eagle3Config:
    """The configuration; `ValueError` for what would be computed in another way than it was trained."""
    path = folder / CONFIG_FILE
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    unknown = {
        "rope_scaling": kind != "default" and kind,
        "hidden_act": given.get("hidden_act", "silu") != "silu" and given["hidden_act"],
        "num_hidden_layers": given.get("num_hidden_layers", 1) != 1 and given["num_hidden_layers"],
        "attention_bias": given.get("attention_bias", False),
        "mlp_bias": given.get("mlp_bias", False),
    }
    if found := {name: value for name, value in unknown.items() if value}:
        raise ValueError(f"{path}: {found} is not supported: one layer, plain rotary, SiLU and no biases are")
    try:
        heads = given["num_attention_heads"]
        return Eagle3Config(
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=given["intermediate_size"],
            num_heads=heads,
            num_kv_heads=given.get("num_key_value_heads", heads),
            head_dim=given.get("head_dim") or hidden // heads,
            rope_theta=float(given.get("rope_theta") or rope.get("rope_theta") or DEFAULT_THETA),
            rms_norm_eps=given["rms_norm_eps"],
            draft_vocab_size=rows,
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
