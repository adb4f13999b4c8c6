"""The drafter's decoder layer (design §3): RMSNorm, grouped-query attention with q/k-norm, plain or gated, SwiGLU.

Works on rows of hidden states and leaves attention to a callable, so training (structural mask) and decoding (a
cache) share every weight and every line. Knows no features, no fill levels and no cycles.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from spd_lightning.modules.drafter_config import DrafterConfig, RopeScaling

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) -> output, each `batch heads rows seq head_dim`; key and value may have fewer heads."""


def rotary_tables(
    position_ids: Int[Tensor, "batch seq"], rotary_dims: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Float[Tensor, "batch seq rotary_dims"], Float[Tensor, "batch seq rotary_dims"]]:
    """Cosines and sines of the rotary angles, in float64; `rotary_dims` dimensions of a head turn."""
    exponents = torch.arange(0, rotary_dims, 2, device=position_ids.device, dtype=torch.float64) / rotary_dims
    frequencies = theta**-exponents
    if scaling is not None:
        rounds = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        share = ((rounds - scaling.low_freq_factor) / span).clamp(0, 1)  # of the frequency as it is
        frequencies = share * frequencies + (1 - share) * frequencies / scaling.factor
    angles = position_ids[..., None] * frequencies  # batch seq rotary_dims/2
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "batch heads rows seq head_dim"], rotary: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads rows seq head_dim"]:
    """Rotary embedding of the first dimensions of each head, as many as the tables have, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[:, None, None].to(dtype) for table in rotary)
    turning, still = x.tensor_split([cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    turned = (turning * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return torch.cat([turned, still], dim=-1) if still.shape[-1] else turned  # a whole head needs no copy


class RMSNorm(nn.RMSNorm):
    """RMS norm in the precision of its gain, so that autocast never rounds a residual stream."""

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return super().forward(x.to(self.weight.dtype))


class DrafterAttention(nn.Module):
    """Grouped-query attention with q/k-norm; standard attention whatever the target uses."""

    query_parts = 1
    """Outputs of `q_proj` for each dimension of a query."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim, query_width = config.head_dim, config.num_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.query_parts * query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def split_heads(
        self, x: Float[Tensor, "batch rows seq width"], parts: int = 1
    ) -> Float[Tensor, "batch rows seq heads part_dim"]:
        return x.unflatten(-1, (-1, parts * self.head_dim))

    def attended(
        self,
        query: Float[Tensor, "batch query_rows seq heads head_dim"],
        hidden: Float[Tensor, "batch rows seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Float[Tensor, "batch query_rows seq query_width"]:
        """What the projected queries see of all rows, heads side by side."""
        key = self.k_norm(self.split_heads(self.k_proj(hidden)))
        value = self.split_heads(self.v_proj(hidden))
        query, key, value = (x.movedim(3, 1) for x in (self.q_norm(query), key, value))  # batch heads rows seq head_dim
        # The norms widen under autocast; attention computes in the dtype of the projections.
        query, key = (rotate(x, rotary).to(value.dtype) for x in (query, key))
        return attend(query, key, value).movedim(1, 3).flatten(-2)

    def forward(
        self,
        hidden: Float[Tensor, "batch rows seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        num_query_rows: int,
    ) -> Float[Tensor, "batch query_rows seq dim"]:
        query = self.split_heads(self.q_proj(hidden[:, :num_query_rows]))
        return self.o_proj(self.attended(query, hidden, rotary, attend))


class GatedAttention(DrafterAttention):
    """The attention of Qwen3.5's full-attention layers: `q_proj` gives each head a query, then a gate of its output."""

    query_parts = 2

    def forward(
        self,
        hidden: Float[Tensor, "batch rows seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        num_query_rows: int,
    ) -> Float[Tensor, "batch query_rows seq dim"]:
        projected = self.split_heads(self.q_proj(hidden[:, :num_query_rows]), parts=2)
        query, gate = projected.chunk(2, dim=-1)
        return self.o_proj(self.attended(query, hidden, rotary, attend) * gate.flatten(-2).sigmoid())


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One pre-norm decoder layer; only the first `num_query_rows` row types come out."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = (GatedAttention if config.gated_attention else DrafterAttention)(config)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DrafterMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Float[Tensor, "batch rows seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        num_query_rows: int,
    ) -> Float[Tensor, "batch query_rows seq dim"]:
        attended = self.attention(self.input_norm(hidden), rotary, attend, num_query_rows)
        hidden = hidden[:, :num_query_rows] + attended
        return hidden + self.mlp(self.mlp_norm(hidden))
