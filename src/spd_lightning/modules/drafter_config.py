"""What fixes a drafter's shape and arithmetic (design §3). Plain values; knows no tensors."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spd_lightning.modules.features import FeatureLayout, RowMode, Schedule

FeatureNorm = Literal["none", "rms"]
Method = Literal["spd", "spd_post", "ppsd"]


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
        head_dim: width of a head; rotary covers all of it.
        rope_theta: rotary base.
        rms_norm_eps: epsilon of every norm.
        feature_norm: `rms` normalises each anchor state, with a learned gain per anchor, before they are joined.
        draft_vocab_size: rows of the draft head.
        schedule: `pre_step` or `post_step`; folders that do not say are `pre_step`.
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
        return asdict(self) | {"stage_layers": list(self.stage_layers), "anchors": list(self.anchors)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        restored: dict[str, Any] = values | {key: tuple(values[key]) for key in ("stage_layers", "anchors")}
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
