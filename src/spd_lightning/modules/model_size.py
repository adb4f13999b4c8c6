"""Weights of target and drafter, counted from their configurations. Builds no model; importing it is cheap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.partition import balanced_stage_layers
from spd_lightning.modules.target_files import read_model_config

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2, "fp32": 4}
_FAMILIES = ("llama", "qwen3", "qwen3_5_text")
LAYER_TYPES = ("full_attention", "linear_attention")
TARGET_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
"""Sizes of a drafter that are the target's unless given."""


@dataclass(frozen=True)
class LinearAttentionSize:
    """What is particular to the Gated DeltaNet layers of a target."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def num_states(self) -> int:
        """Entries of the recurrent matrices."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim


@dataclass(frozen=True)
class TargetSize:
    """A target as far as memory goes.

    Attributes:
        model_type: Transformers' name of the text model.
        layer_types: `full_attention` or `linear_attention`, layer by layer.
        vocab_size: rows of the embedding and of the head, the padding beyond the tokenizer's included.
        is_tied: whether the head is the embedding.
        linear: of the Gated DeltaNet layers, where there are any.
        dtype: of the checkpoint.
    """

    model_type: str
    layer_types: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    linear: LinearAttentionSize | None
    dtype: str

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_parameters(self) -> int:
        """Of the text model, a tied head counted once."""
        embeddings = self.head_parameters * (1 if self.is_tied else 2)
        return embeddings + sum(map(self.layer_parameters, self.layer_types)) + self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of the LM head, or of the embedding: they have one shape. The final norm is not among them."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, layer_type: str) -> int:
        """All weights of one decoder layer."""
        if layer_type == "full_attention":
            # Llama has no norm of queries and keys.
            extra = 0 if self.model_type == "llama" else 2 * self.head_dim
        else:
            # The convolution, the decay's two vectors and the norm of the output.
            linear = self._linear
            extra = linear.num_channels * linear.conv_kernel + 2 * linear.num_value_heads + linear.value_head_dim
        return self.matrix_parameters(layer_type) + extra + 2 * self.hidden_size

    def matrix_parameters(self, layer_type: str) -> int:
        """The weights of one decoder layer's linear maps: each is one multiplication and one addition a token."""
        hidden, query_width = self.hidden_size, self.num_heads * self.head_dim
        if layer_type == "full_attention":
            # Qwen3.5's queries come with a gate.
            gate = query_width if self.model_type == "qwen3_5_text" else 0
            mixer = hidden * (2 * query_width + gate + 2 * self.num_kv_heads * self.head_dim)
        else:
            linear = self._linear
            mixer = hidden * (linear.num_channels + 2 * linear.value_width + 2 * linear.num_value_heads)
        return mixer + 3 * hidden * self.intermediate_size

    def bytes_per_parameter(self, dtype: str = "auto") -> int:
        """Bytes of a weight that is loaded as `dtype`; `auto` is the checkpoint's."""
        name = self.dtype if dtype == "auto" else dtype
        if name not in _BYTES:
            raise ValueError(f"target_dtype={name!r}: must be auto or one of {', '.join(_BYTES)}")
        return _BYTES[name]

    @property
    def _linear(self) -> LinearAttentionSize:
        assert self.linear is not None, "only targets with such layers are asked for their sizes"
        return self.linear


def read_target_size(name_or_path: str) -> TargetSize:
    """The size of a target, from its configuration alone.

    Raises:
        ValueError: if it cannot be read, or its family or a type of its layers is not supported.
    """
    config = read_model_config(name_or_path)
    if config["model_type"] not in _FAMILIES:
        raise ValueError(
            f"target {name_or_path!r} is of type {config['model_type']!r}; supported are {', '.join(_FAMILIES)}"
        )
    layer_types = tuple(config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"])
    if strange := sorted(set(layer_types) - set(LAYER_TYPES)):
        raise ValueError(
            f"target {name_or_path!r} has layers of type {', '.join(strange)}; supported are {', '.join(LAYER_TYPES)}"
        )
    return TargetSize(
        model_type=config["model_type"],
        layer_types=layer_types,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocab_size=config["vocab_size"],
        is_tied=config["tie_word_embeddings"],
        linear=_linear_attention(config) if "linear_attention" in layer_types else None,
        dtype=config["dtype"],
    )


def resolve_stage_layers(
    name_or_path: str, num_stages: int, stage_layers: Sequence[int] | str | None
) -> Sequence[int] | None:
    """Layers per stage of a target: `balanced` becomes numbers, anything else is as given.

    Balanced by weights, the head's included: a forward of one token takes as long as it takes to read them. `spd-infer
    plan --measure` balances by measured times; what it proposes can be given as a list.

    Raises:
        ValueError: if the target cannot be read, a stage would be empty, or another word is given.
    """
    if not isinstance(stage_layers, str):
        return stage_layers
    if stage_layers != "balanced":
        raise ValueError(
            f"stage_layers={stage_layers!r}: give a list of layers, 'balanced', or nothing for even stages"
        )
    size = read_target_size(name_or_path)
    weights = [size.layer_parameters(layer_type) for layer_type in size.layer_types]
    return balanced_stage_layers(weights, num_stages, size.head_parameters)


def _linear_attention(config: dict[str, Any]) -> LinearAttentionSize:
    return LinearAttentionSize(
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
    )


@dataclass(frozen=True)
class DrafterSize:
    """A drafter as far as memory goes (design §3).

    Attributes:
        gate_width: outputs of the queries' projection that are gates; 0 without gated attention.
        projection_inputs: states that each feature projection reads, one entry a projection.
        num_gains: anchors with a learned norm gain; 0 without the feature norm.
        draft_vocab_size: rows of the draft head.
    """

    hidden_size: int
    intermediate_size: int
    query_width: int
    kv_width: int
    head_dim: int
    num_layers: int
    projection_inputs: tuple[int, ...]
    num_gains: int
    draft_vocab_size: int
    gate_width: int = 0

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
        gated_attention: bool = False,
    ) -> "DrafterSize":
        """The drafter for a target and a layout; the target's sizes where nothing is given."""
        width = head_dim or target.head_dim
        used, query_width = layout.used_anchor_indices, (num_heads or target.num_heads) * width
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=intermediate_size or target.intermediate_size,
            query_width=query_width,
            kv_width=(num_kv_heads or target.num_kv_heads) * width,
            head_dim=width,
            num_layers=num_spec_layers,
            projection_inputs=tuple(index + 1 for index in used),
            num_gains=used[-1] + 1 if feature_norm == "rms" else 0,
            draft_vocab_size=draft_vocab_size,
            gate_width=query_width if gated_attention else 0,
        )

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        projections = sum(map(self.projection_parameters, self.projection_inputs)) + self.num_gains * hidden
        return projections + self.num_layers * self.layer_parameters + self.head_parameters + hidden

    def projection_parameters(self, num_inputs: int) -> int:
        """Of the feature projection that reads so many states."""
        return num_inputs * self.hidden_size**2

    @property
    def matrix_parameters(self) -> int:
        """The weights of one decoder layer's linear maps."""
        attention = self.hidden_size * (2 * self.query_width + self.gate_width + 2 * self.kv_width)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """All weights of one decoder layer."""
        return self.matrix_parameters + 2 * self.hidden_size + 2 * self.head_dim

    @property
    def head_parameters(self) -> int:
        """Of the draft head; the output norm is not among them."""
        return self.draft_vocab_size * self.hidden_size

    def activation_bytes(self, num_positions: int, num_rows: int) -> int:
        """What a forward under bf16-mixed keeps for the backward pass, roughly; attention scores are left out.

        Args:
            num_positions: tokens of a batch, padding included.
            num_rows: row types.
        """
        attention = 12 * (self.query_width + self.kv_width) + 6 * self.gate_width
        per_row = 24 * self.hidden_size + attention + 10 * self.intermediate_size
        return num_positions * num_rows * (self.num_layers * per_row + 4 * self.hidden_size)
