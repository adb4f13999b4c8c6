"""Training that begins with an existing drafter: which of its weights have a place in another one, and which do not.

Knows tensors and configurations; knows no files, no target and no trainer.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor

from spd_lightning.modules.drafter import KEPT_PREFIX, DraftModule, PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.target import TargetShape

ARITHMETIC = (
    "gated_attention", "rope_theta", "rope_scaling", "partial_rotary_factor", "rms_norm_eps", "feature_norm", "schedule"
)  # fmt: skip
"""Settings with which the same weights compute something else."""
HEADS = ("num_heads", "num_kv_heads", "head_dim")
"""Settings by which attention's projections are cut into heads; their shapes may be equal all the same."""
STRUCTURAL = ("num_stages", "stage_layers", "anchors", "rows")
"""Settings that decide which states the drafter is shown, and at which depth."""


def check_source(source: DrafterConfig | Eagle3Config, is_eagle: bool, target: TargetShape) -> None:
    """Raises `ValueError` for a drafter that a run cannot begin with, because method or target are others."""
    if isinstance(source, Eagle3Config) != is_eagle:
        wanted = "an EAGLE-3 drafter" if is_eagle else "a Pipeline Draft Module"
        raise ValueError(f"model.init_from: the drafter is of method {source.method!r}, but this run trains {wanted}")
    for name in ("num_layers", "hidden_size"):
        if getattr(source, name) != getattr(target, name):
            raise ValueError(
                f"model.init_from: the drafter is for a target with {name}={getattr(source, name)}, but this run's has "
                f"{getattr(target, name)}"
            )


def changed_settings(
    old: DrafterConfig | Eagle3Config, new: DrafterConfig | Eagle3Config, names: tuple[str, ...]
) -> list[str]:
    """A line for each of these settings that differs."""
    known = {field.name for field in fields(new)}
    return [
        f"{name} is {_shown(getattr(new, name))}, the drafter was trained with {_shown(getattr(old, name))}"
        for name in names
        if name in known and getattr(old, name) != getattr(new, name)
    ]


def kept_projections(source: DrafterConfig, new: DrafterConfig) -> tuple[int, ...]:
    """Projections that `source` keeps unused and that a drafter of the same first anchors and norms keeps as well."""
    if source.feature_norm != new.feature_norm:
        return ()
    unused = set(range(len(new.anchors))) - set(new.layout.used_anchor_indices)
    return tuple(i for i in source.kept_projections if i in unused and source.anchors[: i + 1] == new.anchors[: i + 1])


@torch.no_grad()
def carry_over(source: DraftModule, module: DraftModule) -> list[str]:
    """Gives an initialised drafter the weights of another one, as far as they have a place in it.

    The same drafter comes out bit for bit. Of more layers the first ones are taken. A head row is that of the same
    token. A projection for a new set of anchors is that of the deepest anchor that the source had by then, with the
    columns of anchors that it did not have zero: it begins with what the source would have seen. One that the source
    keeps unused has never been trained, so it begins none.

    Args:
        source: of the same method and for a target of the same width.
        module: gets the weights; what has none keeps what it has.

    Returns:
        A line for everything that was not carried over.
    """
    old, new, told = source.state_dict(), module.state_dict(), []
    if isinstance(source, PipelineDraftModule) and isinstance(module, PipelineDraftModule):
        told += _carry_features(source, module)
        told += _carry_layers(source, module)
    else:
        told += _carry_block(old, new, source, module)
    new["norm.weight"].copy_(old["norm.weight"])
    told += _carry_head(source, module)
    return told


def _carry_head(source: DraftModule, module: DraftModule) -> list[str]:
    """Head rows of the tokens that both have."""
    row_of = {token_id: row for row, token_id in enumerate(source.draft_token_ids.tolist())}
    ids = module.draft_token_ids.tolist()
    both = [(row, row_of[token_id]) for row, token_id in enumerate(ids) if token_id in row_of]
    if both:
        rows, old_rows = torch.tensor(both).T
        module.lm_head.weight[rows] = source.lm_head.weight[old_rows].to(module.lm_head.weight.dtype)
    told = []
    if fresh := len(ids) - len(both):
        told.append(f"lm_head: {fresh:,} of {len(ids):,} draft tokens are new; their rows are the target's")
    if dropped := len(row_of) - len(both):
        told.append(f"lm_head: {dropped:,} of the drafter's {len(row_of):,} draft tokens are left out")
    return told


def _carry_layers(source: PipelineDraftModule, module: PipelineDraftModule) -> list[str]:
    told = []
    for index, layer in enumerate(module.layers):
        if index >= len(source.layers):
            told.append(f"layers.{index}: initialised, the drafter has {len(source.layers)}")
            continue
        told += _carry_block(source.layers[index].state_dict(), layer.state_dict(), source, module, f"layers.{index}.")
    told += [f"layers.{index}: left out" for index in range(len(module.layers), len(source.layers))]
    return told


def _carry_block(
    old: dict[str, Tensor], new: dict[str, Tensor], source: DraftModule, module: DraftModule, prefix: str = ""
) -> list[str]:
    """A layer: nothing of attention with other heads, whatever fits otherwise."""
    had, has = source.config, module.config
    if other := [name for name in HEADS if getattr(had, name) != getattr(has, name)]:
        kept = {name: value for name, value in new.items() if "attention." not in name and "attn." not in name}
        return [
            f"{prefix}attention: initialised, its heads are others ({', '.join(other)})",
            *_carry_named(old, kept, prefix),
        ]
    told = []
    if isinstance(had, DrafterConfig) and isinstance(has, DrafterConfig) and had.gated_attention != has.gated_attention:
        told += _carry_queries(old, new, has, prefix)
    return told + _carry_named(old, new, prefix)


def _carry_queries(old: dict[str, Tensor], new: dict[str, Tensor], has: DrafterConfig, prefix: str) -> list[str]:
    """The queries of a gated layer for a plain one, or the reverse; takes them out of what is left to carry."""
    name = "attention.q_proj.weight"
    before, after = old.pop(name), new.pop(name)
    # Rows of a gated layer are, head by head, those of the query and those of its gate.
    before, after = (rows.unflatten(0, (has.num_heads, -1)) for rows in (before, after))
    after[:, : has.head_dim] = before[:, : has.head_dim]
    return [f"{prefix}{name}: the gates are {'initialised' if has.gated_attention else 'left out'}"]


def _carry_named(old: Mapping[str, Tensor], new: Mapping[str, Tensor], prefix: str = "") -> list[str]:
    """Tensors of one name and shape; head, its norm and its ids are others' business."""
    told = []
    for name, value in new.items():
        if name in ("draft_token_ids", "lm_head.weight", "norm.weight"):
            continue
        if old[name].shape == value.shape:
            value.copy_(old[name])
        else:
            told.append(
                f"{prefix}{name}: initialised, it is {list(value.shape)}, the drafter's {list(old[name].shape)}"
            )
    return told


def _carry_features(source: PipelineDraftModule, module: PipelineDraftModule) -> list[str]:
    had, has = source.config, module.config
    if had.feature_norm != has.feature_norm:
        return ["features: initialised, since their inputs are normalised in one drafter and not in the other"]
    told = []
    gains = dict(zip(had.anchors, source.features.norms, strict=False))
    for anchor, norm in zip(has.anchors, module.features.norms, strict=False):
        if has.feature_norm == "none":
            break
        if anchor in gains:
            cast(Tensor, norm.weight).copy_(cast(Tensor, gains[anchor].weight))
        else:
            told.append(f"the gain of layer {anchor}'s states: initialised, the drafter does not read that layer")
    old, taken = _projections(source), set()
    for index, weight in _projections(module).items():
        anchors = has.anchors[: index + 1]
        name = f"the projection of layers {list(anchors)}"
        is_kept = index in has.kept_projections
        passed = [i for i in old if had.anchors[i] <= anchors[-1] and (is_kept or i not in had.kept_projections)]
        if not passed:
            told.append(f"{name}: initialised, the drafter has none for tokens that have come so far only")
            continue
        known = had.anchors[: passed[-1] + 1]
        taken.add(passed[-1])
        blocks, own = (matrix.unflatten(1, (-1, has.hidden_size)) for matrix in (weight, old[passed[-1]]))
        for column, anchor in enumerate(anchors):
            blocks[:, column] = own[:, known.index(anchor)] if anchor in known else 0.0
        if fresh := [anchor for anchor in anchors if anchor not in known]:
            told.append(f"{name}: begins as that of {list(known)}, with zeros for the states of {fresh}")
        if lost := [anchor for anchor in known if anchor not in anchors]:
            told.append(f"{name}: that of {list(known)} without the states of {lost}")
    told += [f"the projection of layers {list(had.anchors[: i + 1])}: left out" for i in old if i not in taken]
    return told


def _projections(module: PipelineDraftModule) -> dict[int, Tensor]:
    """Weights of the projections by the index of their deepest anchor, ascending; those kept unused as well."""
    used = {int(index): cast(Tensor, projection.weight) for index, projection in module.features.projections.items()}
    kept = {index: module.features.get_buffer(f"{KEPT_PREFIX}{index}") for index in module.config.kept_projections}
    return dict(sorted((used | kept).items()))


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
