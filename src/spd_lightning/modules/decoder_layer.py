"""The drafter's decoder layer (design §3): RMSNorm, grouped-query attention with q/k-norm and full rotary, SwiGLU.

Works on rows of hidden states and leaves attention to a callable, so training (structural mask) and decoding (a
cache) share every weight and every line. Knows no features, no fill levels and no cycles.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from spd_lightning.modules.drafter_config import DrafterConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) -> output, each `batch heads rows seq head_dim`; key and value may have fewer heads."""


def rotary_tables(
    position_ids: Int[Tensor, "batch seq"], head_dim: int, theta: float
) -> tuple[Float[Tensor, "batch seq head_dim"], Float[Tensor, "batch seq head_dim"]]:
    """Cosines and sines of the rotary angles, in float64."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float64) / head_dim
    angles = position_ids[..., None] * theta**-exponents  # batch seq head_dim/2
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "batch heads rows seq head_dim"], rotary: tuple[Tensor, Tensor]
) -> Float[Tensor, "batch heads rows seq head_dim"]:
    """Rotary embedding on the full head, in float32 at least; the tables are `batch seq head_dim`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[:, None, None].to(dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMS norm in the precision of its gain, so that autocast never rounds a residual stream."""

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return super().forward(x.to(self.weight.dtype))


class DrafterAttention(nn.Module):
    """Grouped-query attention with q/k-norm and full rotary; standard attention whatever the target uses."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def split_heads(self, x: Float[Tensor, "batch rows seq width"]) -> Float[Tensor, "batch rows seq heads head_dim"]:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        hidden: Float[Tensor, "batch rows seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        num_query_rows: int,
    ) -> Float[Tensor, "batch query_rows seq dim"]:
        query = self.q_norm(self.split_heads(self.q_proj(hidden[:, :num_query_rows])))
        key = self.k_norm(self.split_heads(self.k_proj(hidden)))
        value = self.split_heads(self.v_proj(hidden))
        query, key, value = (x.movedim(3, 1) for x in (query, key, value))  # batch heads rows seq head_dim
        # The norms widen under autocast; attention computes in the dtype of the projections.
        query, key = (rotate(x, rotary).to(value.dtype) for x in (query, key))
        out = attend(query, key, value)
        return self.o_proj(out.movedim(1, 3).flatten(-2))


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
        self.attention = DrafterAttention(config)
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
