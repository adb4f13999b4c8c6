"""What fixes an EAGLE-3 drafter's shape and arithmetic (design §7). Plain values; knows no tensors."""

from dataclasses import asdict, dataclass
from typing import Any

from spd_lightning.modules.drafter_config import check_layer_sizes
from spd_lightning.modules.features import FeatureLayout

MIN_TARGET_LAYERS = 7
"""Of fewer, low, middle and high states would not be three."""


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that fixes an EAGLE-3 drafter's shape and arithmetic; travels in the drafter folder.

    Args:
        num_layers: target layers `L`; the drafter reads the raw streams `H^2`, `H^{L//2}` and `H^{L-3}`.
        hidden_size: width, the target's.
        intermediate_size: width of the gated MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head; rotary covers all of it.
        rope_theta: rotary base.
        rms_norm_eps: epsilon of every norm.
        draft_vocab_size: rows of the draft head.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    draft_vocab_size: int

    def __post_init__(self) -> None:
        check_layer_sizes(self, "num_layers", "draft_vocab_size")
        if self.num_layers < MIN_TARGET_LAYERS:
            raise ValueError(
                f"num_layers={self.num_layers}: EAGLE-3 reads the states of layers 2, L//2 and L-3, so the target needs "
                f"at least {MIN_TARGET_LAYERS} layers"
            )

    @property
    def method(self) -> str:
        """Its name in evaluations and drafter folders."""
        return "eagle3"

    @property
    def anchors(self) -> tuple[int, int, int]:
        """Target layers whose raw output is fused: low, middle, high."""
        return 2, self.num_layers // 2, self.num_layers - 3

    @property
    def rotary_dims(self) -> int:
        """Dimensions of a head that rotary positions turn: all."""
        return self.head_dim

    @property
    def num_spec_layers(self) -> int:
        """`L_s`."""
        return 1

    @property
    def layer_parameters(self) -> int:
        """The weights of the decoder layer's linear maps."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * (query + 2 * kv) + query)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Of the whole drafter: fusing, the layer with its three norms, the output norm and the draft head."""
        maps = len(self.anchors) * self.hidden_size**2 + self.layer_parameters
        return maps + 4 * self.hidden_size + self.draft_vocab_size * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` takes back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Eagle3Config":
        return cls(**values)


def whole_target_layout(num_layers: int) -> FeatureLayout:
    """The layout of a target that is not cut: one stage, of which only the embedding is named.

    Batches come in some layout, and stages are loaded by one; EAGLE-3 reads neither row types nor fill levels.
    """
    return FeatureLayout.build(num_layers, 1, anchors=(0,), rows="shared")
