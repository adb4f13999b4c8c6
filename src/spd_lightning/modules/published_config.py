"""The `config` of a published PDM checkpoint (design §10), checked against its target. Makes lists of its tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spd_lightning.modules.partition import check_stage_layers, even_stage_layers
from spd_lightning.modules.target import TargetShape

VERSIONS = (11, 12)
INFORMATIVE = ("version", "base_model_path", "trained_with_use_deepest")
"""Keys that say where a drafter comes from and change nothing of what it computes."""
DEFINED = (
    *INFORMATIVE, "hidden_size", "vocab_size", "num_stages", "stage_layers", "num_spec_layers", "aggr_feature_bound",
    "num_aggr_types", "draft_vocab_size", "draft_token_ids",
)  # fmt: skip
IMPLIED = {"schedule": "pre_step", "rows": "shared", "feature_norm": "none"}
"""What every drafter of the format is, though no key of it says so."""


@dataclass(frozen=True)
class PublishedConfig:
    """What the configuration says; none where it lacks or contradicts something.

    Attributes:
        hidden_size: width of the target, as stated.
        stage_layers: target layers per stage; even ones where the file does not say.
        anchors: target layers whose raw output is read.
        num_spec_layers: decoder layers.
        num_rows: rows of the draft head.
        token_ids: target ids of the draft vocabulary, ascending. Without a list in the file, all of the target's
            tokens: the rows beyond are padding.
    """

    hidden_size: int | None
    stage_layers: tuple[int, ...] | None
    anchors: tuple[int, ...] | None
    num_spec_layers: int | None
    num_rows: int | None
    token_ids: tuple[int, ...] | None


def holds_values(value: Any) -> bool:
    """Whether it is a tensor all of whose values were saved: none of meta or sparse ones, or one repeated at will."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and value.numel() <= value.untyped_storage().nbytes()
    )


def plain_config(given: Mapping[Any, Any], faults: list[str]) -> dict[Any, Any]:
    """The configuration in values of JSON, lists in place of tensors; `faults` gets a line for each that is none."""
    plain: dict[Any, Any] = {}
    for name, value in given.items():
        plain[name] = value.tolist() if holds_values(value) and value.ndim else value
        try:
            json.dumps({name: plain[name]}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            faults.append(f"config.{name} is neither plain values nor a list or tensor of them ({error})")
    return plain


def read_config(given: Mapping[Any, Any], shape: TargetShape, num_tokens: int, faults: list[str]) -> PublishedConfig:
    """The configuration as far as it is right.

    Args:
        given: `config` of the file, in plain values.
        shape: of the target.
        num_tokens: that the target's tokenizer and head both have.
        faults: gets a line for everything that is missing or contradicts itself or the target.
    """
    if "version" not in given:
        faults.append("config.version is missing")
    elif type(given["version"]) is not int or given["version"] not in VERSIONS:
        faults.append(f"config.version={given['version']!r}: this release reads {' and '.join(map(str, VERSIONS))}")
    if not isinstance(given.get("base_model_path"), str):
        shown = repr(given["base_model_path"]) if "base_model_path" in given else "missing"
        faults.append(f"config.base_model_path is {shown}; the name of the target is needed")
    for name, implied in IMPLIED.items():
        if given.get(name, implied) != implied:
            faults.append(f"config.{name}={given[name]!r}, but drafters of this format are all {implied!r}")
    stated = {name: _integer(given, name, faults) for name in ("hidden_size", "vocab_size")}
    for name, size in stated.items():
        if size not in (None, own := getattr(shape, name)):
            faults.append(f"config.{name}={size}, but the target has {own}: is it the right one?")
    stage_layers = _stage_layers(given, shape.num_layers, faults)
    anchors = _anchors(given, shape.num_layers, faults)
    num_spec_layers, num_rows = _integer(given, "num_spec_layers", faults), _integer(given, "draft_vocab_size", faults)
    token_ids = None if num_rows is None else _token_ids(given, num_rows, shape.vocab_size, num_tokens, faults)
    return PublishedConfig(stated["hidden_size"], stage_layers, anchors, num_spec_layers, num_rows, token_ids)


def provenance(given: Mapping[Any, Any]) -> dict[str, Any]:
    """What a configuration says of where a drafter comes from; under `ignored` what the format does not define."""
    told = {name: given[name] for name in INFORMATIVE if name in given}
    ignored = {name: value for name, value in given.items() if name not in DEFINED and name not in IMPLIED}
    return told | ({"ignored": ignored} if ignored else {})


def _integer(given: Mapping[Any, Any], name: str, faults: list[str]) -> int | None:
    if name not in given:
        faults.append(f"config.{name} is missing")
    elif type(given[name]) is not int or given[name] < 1:
        faults.append(f"config.{name}={given[name]!r}: must be a positive integer")
    else:
        return given[name]
    return None


def _integers(value: Any) -> tuple[int, ...] | None:
    """The integers of a list or a tuple; none if it is something else."""
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        return None
    return tuple(value)


def _stage_layers(given: Mapping[Any, Any], num_layers: int, faults: list[str]) -> tuple[int, ...] | None:
    num_stages, stated = _integer(given, "num_stages", faults), given.get("stage_layers")
    if num_stages is None:
        return None
    try:
        split = tuple(map(int, stated.split(";"))) if isinstance(stated, str) else _integers(stated)
    except ValueError:
        split = None
    if stated is not None and not split:
        faults.append(f"config.stage_layers={stated!r}: must be a list of integers, or integers joined by ';'")
        return None
    try:
        if split is None:
            return even_stage_layers(num_layers, num_stages)
        return check_stage_layers(split, num_layers, num_stages)
    except ValueError as error:
        faults.append(f"config.{error}")
    return None


def _anchors(given: Mapping[Any, Any], num_layers: int, faults: list[str]) -> tuple[int, ...] | None:
    name = "aggr_feature_bound"
    if name not in given:
        faults.append(f"config.{name} (the anchors) is missing")
        return None
    anchors, before = _integers(given[name]), len(faults)
    if not anchors:
        faults.append(f"config.{name}={given[name]!r}: must be a list of target layers")
        return None
    shown = f"config.{name}={list(anchors)}"
    if anchors[0] != 0:
        faults.append(f"{shown}: the first anchor must be 0, the embedding")
    if not _ascends(anchors):
        faults.append(f"{shown} must ascend without repeats")
    if max(anchors) > num_layers:
        faults.append(f"{shown}: the target has {num_layers} layers, so anchors end there")
    if "num_aggr_types" in given and _integer(given, "num_aggr_types", faults) not in (None, len(anchors)):
        faults.append(f"config.num_aggr_types={given['num_aggr_types']}, but {name} has {len(anchors)} anchors")
    return anchors if len(faults) == before else None


def _token_ids(
    given: Mapping[Any, Any], num_rows: int, vocab_size: int, num_tokens: int, faults: list[str]
) -> tuple[int, ...] | None:
    name, stated = "draft_token_ids", given.get("draft_token_ids")
    if stated is None:
        if num_rows == vocab_size:
            return tuple(range(num_tokens))
        faults.append(
            f"config.{name} is missing, and the draft head has {num_rows} of the target's {vocab_size} rows: which "
            "tokens they stand for is not known"
        )
        return None
    ids, before = _integers(stated), len(faults)
    if not ids:
        faults.append(f"config.{name} must be a list of token ids, not {type(stated).__name__}")
        return None
    if len(ids) != num_rows:
        faults.append(f"config.{name} lists {len(ids)} ids, but config.draft_vocab_size={num_rows}")
    if not _ascends(ids):
        index = next(index for index in range(len(ids) - 1) if ids[index + 1] <= ids[index])
        faults.append(f"config.{name} must ascend without repeats, but {ids[index + 1]} follows {ids[index]}")
    if outside := [token_id for token_id in ids if not 0 <= token_id < num_tokens]:
        faults.append(
            f"config.{name} has {len(outside)} ids such as {outside[0]} that the target, with its {num_tokens} tokens, "
            "does not have"
        )
    return ids if len(faults) == before else None


def _ascends(values: Sequence[int]) -> bool:
    return all(earlier < later for earlier, later in zip(values, values[1:], strict=False))
