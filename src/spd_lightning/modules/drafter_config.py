"""What fixes a drafter's shape and arithmetic (design §3). Plain values; knows no tensors."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spd_lightning.modules.features import FeatureLayout, RowMode, Schedule

FeatureNorm = Literal["none", "rms"]
Method = Literal["spd", "spd_post", "ppsd"]
TUPLES = ("stage_layers", "anchors", "kept_projections")
"""Of the configuration; JSON has lists in their place."""


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary positions (`rope_type: llama3`), by Transformers' names.

    Args:
        factor: by which slow turns are slowed down.
        low_freq_factor: turns of less than so many rounds within the original length are slow.
        high_freq_factor: turns of more than so many are fast, and stay as they are; between, they are blended.
        original_max_position_embeddings: the original length.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                f"rope_scaling={asdict(self)}: factors must be positive, and the low one below the high one"
            )


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that fixes a drafter's shape and arithmetic; travels in the drafter folder.

    Args:
        num_stages: pipeline stages `n` of the target.
        stage_layers: target layers per stage.
        anchors: target layers whose raw output is read.
        rows: row types, `exact` or `shared`.
        num_spec_layers: decoder layers `L_s`.
        hidden_size: width, the target's.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        rope_theta: rotary base.
        rms_norm_eps: epsilon of every norm.
        feature_norm: `rms` normalises each anchor state, with a learned gain per anchor, before they are joined.
        draft_vocab_size: rows of the draft head.
        schedule: `pre_step` or `post_step`; folders that do not say are `pre_step`.
        gated_attention: whether each head's output passes a gate of its own, as in Qwen3.5's full-attention layers.
        partial_rotary_factor: share of a head, from its first dimension on, that rotary positions turn.
        rope_scaling: of drafters that came with a target whose own positions are scaled.
        kept_projections: indices of anchors that no depth reaches, but whose projection came with a published file:
            kept as it is, never used and never trained.
    """

    num_stages: int
    stage_layers: tuple[int, ...]
    anchors: tuple[int, ...]
    rows: RowMode
    num_spec_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    feature_norm: FeatureNorm
    draft_vocab_size: int
    schedule: Schedule = "pre_step"
    gated_attention: bool = False
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeScaling | None = None
    kept_projections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_layer_sizes(self)
        if self.num_stages != len(self.stage_layers):
            raise ValueError(f"num_stages={self.num_stages}, but stage_layers={list(self.stage_layers)}")
        if self.num_spec_layers < 1:
            raise ValueError(f"num_spec_layers={self.num_spec_layers}: the drafter needs at least one layer")
        if self.feature_norm not in ("none", "rms"):
            raise ValueError(f"feature_norm={self.feature_norm!r}: must be 'none' or 'rms'")
        if self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size}: the draft head needs at least one row")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dims < 2 or self.rotary_dims % 2:
            raise ValueError(
                f"partial_rotary_factor={self.partial_rotary_factor}: of head_dim={self.head_dim} it leaves "
                f"{self.rotary_dims} dimensions to turn, which must be an even number above 0, and all of them at most"
            )
        unreached = sorted(set(range(len(self.anchors))) - set(self.layout.used_anchor_indices))
        if strange := sorted(set(self.kept_projections) - set(unreached)):
            raise ValueError(
                f"kept_projections={list(self.kept_projections)}: {strange} are used, or no anchors; only those of "
                f"anchors that no depth reaches are kept aside ({unreached})"
            )

    @property
    def rotary_dims(self) -> int:
        """Dimensions of a head that rotary positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layout(self) -> FeatureLayout:
        return FeatureLayout(tuple(self.stage_layers), tuple(self.anchors), self.rows, self.schedule)

    @property
    def num_layers(self) -> int:
        """`L`, of the target."""
        return self.layout.num_layers

    @property
    def method(self) -> Method:
        """Its name in evaluations: `ppsd` reads first-stage states only (design §7)."""
        layout = self.layout
        if layout.drafts_first:
            return "spd"
        return "ppsd" if layout.anchors == layout.stage_ends[1:2] else "spd_post"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` takes back."""
        return asdict(self) | {name: list(getattr(self, name)) for name in TUPLES}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        restored: dict[str, Any] = {name: tuple(value) if name in TUPLES else value for name, value in values.items()}
        if scaling := restored.get("rope_scaling"):
            restored["rope_scaling"] = RopeScaling(**scaling)
        return cls(**restored)


def check_layer_sizes(config: Any, *more: str) -> None:
    """Raises `ValueError` for sizes that no decoder layer with rotary positions and grouped queries has.

    Args:
        config: of any drafter; all have these sizes by the same names.
        more: further counts of it, of which there must be one at least.
    """
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", *more):
        if not (type(size := getattr(config, name)) is int and size >= 1):
            raise ValueError(f"{name}={size!r}: must be a positive integer")
    if not 0 < config.rope_theta < float("inf"):
        raise ValueError(f"rope_theta={config.rope_theta}: must be positive")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"num_heads={config.num_heads} must be a multiple of num_kv_heads={config.num_kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even: rotary positions turn pairs")
