"""Published PDM checkpoints (design §10): a `torch.save` file of version 11 or 12, into a drafter of ours.

Knows tensors and plain values; knows no tokenizer, and of the target only what is handed in.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spd_lightning.errors import shortened
from spd_lightning.modules.drafter import KEPT_PREFIX, PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig, RopeScaling
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.published_config import PublishedConfig, holds_values, plain_config, provenance, read_config
from spd_lightning.modules.target import GAIN_OFFSETS, TargetShape

GATED_FAMILY = "qwen3_5"
"""Whose drafters have the target's own full-attention layers; all others have Qwen3's."""
LAYER_PARTS = {
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.o_proj": "attention.o_proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
}
"""Parts of a decoder layer by their Transformers name, and ours."""
NUMBERED = re.compile(r"(aggr_projs|spec_layers)\.([0-9]{1,9})\.")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FAULT_LENGTH = 400
"""Characters of a line about a fault; of a longer one the middle is left out."""


class PublishedFileError(ValueError):
    """What a published file lacks or contradicts.

    Attributes:
        faults: one line each, cut to `FAULT_LENGTH`.
    """

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(shortened(" ".join(fault.split()), FAULT_LENGTH) for fault in faults)
        super().__init__("; ".join(self.faults))


@dataclass(frozen=True)
class ImportedDrafter:
    """A drafter out of a published file.

    Attributes:
        state: the weights by the names of `PipelineDraftModule`; gains as they are applied.
        config: the drafter's.
        provenance: what the file says of where it comes from, and under `ignored` what the format does not define.
    """

    state: dict[str, Tensor]
    config: DrafterConfig
    provenance: dict[str, Any]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Target ids of the draft vocabulary, ascending."""
        return tuple(self.state["draft_token_ids"].tolist())


def import_drafter(
    content: Mapping[Any, Any],
    shape: TargetShape,
    model_config: Mapping[str, Any],
    num_tokens: int,
    norm_gain: Float[Tensor, " dim"],
) -> ImportedDrafter:
    """The drafter of a loaded file.

    Args:
        content: of the file.
        shape: of the target.
        model_config: of the target's text model; its rotary settings are the drafter's.
        num_tokens: `len(tokenizer)` of the target.
        norm_gain: the factor of the target's final norm, which the drafter's output passes as well.

    Raises:
        PublishedFileError: with a line for each fault.
    """
    faults = [f"{name} is missing, a mapping is needed" for name in ("state_dict", "config") if name not in content]
    faults += [
        f"{name} is a {type(content[name]).__name__}, a mapping is needed"
        for name in ("state_dict", "config")
        if name in content and not isinstance(content[name], Mapping)
    ]
    if faults:
        raise PublishedFileError(faults)
    given, tensors = plain_config(content["config"], faults), content["state_dict"]
    if faults:
        raise PublishedFileError(faults)
    published = read_config(given, shape, min(num_tokens, shape.vocab_size), faults)
    rotary = _rotary(model_config, faults)
    if not _is_of_width(tensors, published.hidden_size, other_than=shape.hidden_size):
        faults += tensor_faults(tensors, published, shape)
    if faults:
        raise PublishedFileError(faults)
    assert published.stage_layers and published.anchors and published.num_spec_layers and published.token_ids
    layout = FeatureLayout(published.stage_layers, published.anchors, "shared")
    config = DrafterConfig(
        num_stages=layout.num_stages,
        stage_layers=layout.stage_layers,
        anchors=layout.anchors,
        rows="shared",
        num_spec_layers=published.num_spec_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        **rotary,
        rms_norm_eps=shape.rms_norm_eps,
        feature_norm="none",
        draft_vocab_size=len(published.token_ids),
        gated_attention=shape.family == GATED_FAMILY,
        kept_projections=tuple(i for i in range(len(layout.anchors)) if i not in layout.used_anchor_indices),
    )
    state = _our_state(tensors, config, GAIN_OFFSETS[shape.family])
    state |= {"norm.weight": norm_gain, "draft_token_ids": torch.tensor(published.token_ids)}
    state["lm_head.weight"] = state["lm_head.weight"][: len(published.token_ids)]  # padding rows, without a list of ids
    with torch.device("meta"):
        PipelineDraftModule(config).load_state_dict(state, assign=True)
    told = provenance(given)
    if "ignored" in told:
        ignored = f"keys of config that are ignored: {', '.join(map(str, told['ignored']))}"
        warnings.warn(shortened(ignored, FAULT_LENGTH), stacklevel=2)
    return ImportedDrafter(state, config, told)


def _our_state(tensors: Mapping[str, Tensor], config: DrafterConfig, gain_offset: float) -> dict[str, Tensor]:
    """Copies by our names, in float32 at least; gains in float64 where float32 would round `1 + w`."""
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        if kind == "aggr_projs":
            kept = int(index) in config.kept_projections
            ours = f"features.{KEPT_PREFIX}{index}" if kept else f"features.projections.{index}.weight"
        elif kind == "spec_layers":
            ours = f"layers.{index}.{LAYER_PARTS[part.removesuffix('.weight')]}.weight"
        else:
            ours = name
        if name.endswith("norm.weight") and gain_offset:
            state[ours] = value.double() + gain_offset
        else:
            state[ours] = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    return state


def layer_shapes(shape: TargetShape, is_gated: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of a published decoder layer's tensors, by name within the layer."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes = {
        "self_attn.q_proj": (2 * query if is_gated else query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"{name}.weight": size for name, size in shapes.items()}


def tensor_faults(tensors: Mapping[Any, Any], config: PublishedConfig, shape: TargetShape) -> Iterator[str]:
    """A line for each tensor that is missing, unknown, of another shape or type, or not finite.

    Projections or layers that are missing or left over as a whole are one line; so are layers of another family.
    """
    sizes = {
        "aggr_projs": None if config.anchors is None else len(config.anchors),
        "spec_layers": config.num_spec_layers,
    }
    said = {"aggr_projs": "config.aggr_feature_bound has {} anchors", "spec_layers": "config.num_spec_layers={}"}
    is_gated = shape.family == GATED_FAMILY
    if other_family := _other_family(tensors, shape, is_gated):
        yield other_family
    per_layer = layer_shapes(shape, is_gated != bool(other_family))
    expected: dict[str, tuple[int, ...] | None] = {"lm_head.weight": None}
    if config.num_rows is not None:
        expected["lm_head.weight"] = (config.num_rows, shape.hidden_size)
    for kind, size in sizes.items():
        found = {int(match[2]) for name in tensors if (match := NUMBERED.match(str(name))) and match[1] == kind}
        if size is not None and (len(found) != size or max(found) >= size):
            yield f"state_dict has {kind} {sorted(found)}, but {said[kind].format(size)}"
        for index in found if size is None else [index for index in found if index < size]:
            parts = {"weight": (shape.hidden_size, (index + 1) * shape.hidden_size)}
            parts = per_layer if kind == "spec_layers" else parts
            expected |= {f"{kind}.{index}.{part}": part_shape for part, part_shape in parts.items()}
    told = {kind: range(size) for kind, size in sizes.items() if size is not None}
    for name, value in tensors.items():
        match = NUMBERED.match(str(name))
        if name not in expected:
            if not (match and match[1] in told and int(match[2]) not in told[match[1]]):
                yield f"state_dict has {name!r}, which such a drafter does not"
        elif not isinstance(value, Tensor):
            yield f"{name} is a {type(value).__name__}, a tensor is needed"
        elif value.dtype not in DTYPES:
            yield f"{name} is of {value.dtype}, numbers of {', '.join(map(str, DTYPES))} are needed"
        elif not holds_values(value):
            yield f"{name} is a {value.layout} tensor on {value.device}, not all of whose values are in the file"
        elif expected[name] is not None and tuple(value.shape) != expected[name]:
            yield f"{name} is {list(value.shape)}, {list(expected[name] or ())} is needed"
        elif not bool((finite := value.float().isfinite()).all()):
            yield f"{name} has {int((~finite).sum())} values that are not finite in float32"
    yield from (f"{name} is missing" for name in expected if name not in tensors)


def _is_of_width(tensors: Mapping[Any, Any], width: int | None, other_than: int) -> bool:
    """Whether the drafter is one of another target, of the width that it states: then no shape would fit."""
    head: Any = tensors.get("lm_head.weight")
    return width != other_than and holds_values(head) and head.shape[1:] == (width,)


def _other_family(tensors: Mapping[Any, Any], shape: TargetShape, is_gated: bool) -> str | None:
    """A line if all layers are those of another family's drafter: with gates in place of without, or the reverse."""
    queries = [value for name, value in tensors.items() if str(name).endswith(".self_attn.q_proj.weight")]
    foreign = layer_shapes(shape, not is_gated)["self_attn.q_proj.weight"]
    if not queries or any(not holds_values(value) or tuple(value.shape) != foreign for value in queries):
        return None
    kinds = ("plain ones, of drafters for Qwen3 and Llama", "gated ones, of drafters for Qwen3.5")
    return (
        f"the layers are {kinds[not is_gated]} (q_proj is {list(foreign)}), but the target is of family {shape.family}"
    )


def _rotary(model_config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """The target's rotary settings, as the drafter's own."""
    rope = model_config["rope_parameters"]
    kind, scaling = rope.get("rope_type", "default"), None
    if kind == "llama3":
        scaling = RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})
    elif kind != "default":
        faults.append(f"the target's rotary positions are scaled ({kind}); default and llama3 are supported")
    return {
        "rope_scaling": scaling,
        "rope_theta": float(rope["rope_theta"]),
        "partial_rotary_factor": float(rope.get("partial_rotary_factor", 1.0)),
    }
