"""Parameters and memory of target and drafter, counted from their configurations. Builds no model."""

from dataclasses import dataclass
from typing import Any

from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target_files import read_model_config

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "fp32": 4}
_FAMILIES = ("llama", "qwen3", "qwen3_5_text")


@dataclass(frozen=True)
class TargetSize:
    """A target as far as memory goes.

    Attributes:
        num_parameters: of the text model, a tied head counted once.
        dtype: of the checkpoint.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    dtype: str

    def bytes_per_parameter(self, dtype: str = "auto") -> int:
        """Bytes of a weight that is loaded as `dtype`; `auto` is the checkpoint's."""
        name = self.dtype if dtype == "auto" else dtype
        if name not in _BYTES:
            raise ValueError(f"target_dtype={name!r}: must be auto or one of {', '.join(_BYTES)}")
        return _BYTES[name]


def read_target_size(name_or_path: str) -> TargetSize:
    """The size of a target, from its configuration alone.

    Raises:
        ValueError: if it cannot be read, or its family is not supported.
    """
    config = read_model_config(name_or_path)
    if config["model_type"] not in _FAMILIES:
        raise ValueError(
            f"target {name_or_path!r} is of type {config['model_type']!r}; supported are {', '.join(_FAMILIES)}"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    layers = sum(
        (_linear_attention(config) if kind == "linear_attention" else _full_attention(config, head_dim))
        + 3 * hidden * config["intermediate_size"]
        + 2 * hidden
        for kind in layer_types
    )
    return TargetSize(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        num_parameters=embeddings + layers + hidden,
        dtype=config["dtype"],
    )


def _full_attention(config: dict[str, Any], head_dim: int) -> int:
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    query_width = heads * head_dim
    # Qwen3.5's queries come with a gate; Llama has no norm of queries and keys.
    gate = query_width if config["model_type"] == "qwen3_5_text" else 0
    norms = 0 if config["model_type"] == "llama" else 2 * head_dim
    return hidden * (2 * query_width + gate + 2 * kv_heads * head_dim) + norms


def _linear_attention(config: dict[str, Any]) -> int:
    """A Gated DeltaNet layer: projections, convolution, decay, norm."""
    hidden, value_heads = config["hidden_size"], config["linear_num_value_heads"]
    key_width = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_width = value_heads * config["linear_value_head_dim"]
    convolved = 2 * key_width + value_width
    return (
        hidden * (convolved + value_width + 2 * value_heads)
        + convolved * config["linear_conv_kernel_dim"]
        + 2 * value_heads
        + config["linear_value_head_dim"]
        + value_width * hidden
    )


@dataclass(frozen=True)
class DrafterSize:
    """A drafter as far as memory goes (design §3)."""

    hidden_size: int
    intermediate_size: int
    query_width: int
    kv_width: int
    num_layers: int
    num_parameters: int

    @classmethod
    def of(
        cls,
        target: TargetSize,
        layout: FeatureLayout,
        num_spec_layers: int,
        draft_vocab_size: int,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        feature_norm: str = "rms",
    ) -> "DrafterSize":
        """The drafter for a target and a layout; the target's sizes where nothing is given."""
        hidden = target.hidden_size
        width = head_dim or target.head_dim
        query_width = (num_heads or target.num_heads) * width
        kv_width = (num_kv_heads or target.num_kv_heads) * width
        inner = intermediate_size or target.intermediate_size
        used = layout.used_anchor_indices
        projections = sum((index + 1) * hidden * hidden for index in used)
        gains = (used[-1] + 1) * hidden if feature_norm == "rms" else 0
        layer = 2 * hidden * (query_width + kv_width) + 3 * hidden * inner + 2 * hidden + 2 * width
        head = draft_vocab_size * hidden + hidden
        return cls(
            hidden_size=hidden,
            intermediate_size=inner,
            query_width=query_width,
            kv_width=kv_width,
            num_layers=num_spec_layers,
            num_parameters=projections + gains + num_spec_layers * layer + head,
        )

    def activation_bytes(self, num_positions: int, num_rows: int) -> int:
        """What a forward under bf16-mixed keeps for the backward pass, roughly; attention scores are left out.

        Args:
            num_positions: tokens of a batch, padding included.
            num_rows: row types.
        """
        per_row = 24 * self.hidden_size + 12 * (self.query_width + self.kv_width) + 10 * self.intermediate_size
        return num_positions * num_rows * (self.num_layers * per_row + 4 * self.hidden_size)
