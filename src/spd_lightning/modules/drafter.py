"""The Pipeline Draft Module (design §3): feature projections, a few decoder layers, a norm and a draft head.

Knows no target model, no fill levels and no cycles.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from spd_lightning.modules.attention.backends import fast_attention
from spd_lightning.modules.attention.dense import StructuralAttention
from spd_lightning.modules.attention.flex import flex_attention
from spd_lightning.modules.decoder_layer import Attend, DrafterLayer, RMSNorm, rotary_tables
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.packed_rows import PackedRows

INIT_STD = 0.02
KEPT_PREFIX = "kept_projection_"


class FeatureProjections(nn.Module):
    """`g^k = W_{agg(k)} [H^{b_0}; ...; H^{b_agg(k)}]` (design §2), with the optional feature norm of §3.

    There is one projection per anchor count that some depth reaches, and one gain per anchor that some projection
    reads: every parameter has a gradient in every batch. Projections that a published file has beyond these are
    buffers: they travel with the drafter, and nothing reads or trains them.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        used = config.layout.used_anchor_indices
        self.num_anchors = used[-1] + 1
        self.projections = nn.ModuleDict(
            {str(i): nn.Linear((i + 1) * config.hidden_size, config.hidden_size, bias=False) for i in used}
        )
        self.norms = nn.ModuleList(
            RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if config.feature_norm == "rms" else nn.Identity()
            for _ in range(self.num_anchors)
        )
        for i in config.kept_projections:
            shape = (config.hidden_size, (i + 1) * config.hidden_size)
            self.register_buffer(f"{KEPT_PREFIX}{i}", torch.zeros(shape))

    def join(self, states: Sequence[Float[Tensor, "*batch dim"]]) -> Float[Tensor, "*batch joined"]:
        """The states of the first anchors side by side, normalised where the drafter says so."""
        dtype = next(self.projections.parameters()).dtype
        return torch.cat([norm(state.to(dtype)) for norm, state in zip(self.norms, states, strict=False)], dim=-1)

    def project(self, joined: Float[Tensor, "*batch joined"], anchor_index: int) -> Float[Tensor, "*batch dim"]:
        """The feature of a token whose deepest anchor is `anchor_index`."""
        projection = self.projections[str(anchor_index)]
        return projection(joined[..., : projection.in_features])


class DraftModule(nn.Module):
    """What every drafter ends with, and how it begins; subclasses make these parts, and `layers`.

    Attributes:
        draft_token_ids: target ids of the draft vocabulary, ascending.
        norm: of the output.
        lm_head: makes draft logits of the normed output.
    """

    draft_token_ids: Tensor
    norm: RMSNorm
    lm_head: nn.Linear

    @torch.no_grad()
    def initialize(
        self,
        draft_token_ids: Int[Tensor, " draft_vocab"],
        norm_gain: Float[Tensor, " dim"],
        head_rows: Float[Tensor, "draft_vocab dim"],
        generator: torch.Generator | None = None,
    ) -> None:
        """Linear maps normal(0.02), gains one, the output norm and head rows from the target (design §3).

        Args:
            draft_token_ids: target ids of the draft vocabulary, ascending.
            norm_gain: the target's final norm as the factor that is applied (`1 + w` for Qwen3.5).
            head_rows: rows of the target's LM head at those ids.
            generator: source of the random weights.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, INIT_STD, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
        self.draft_token_ids.copy_(draft_token_ids)
        self.norm.weight.copy_(norm_gain)
        self.lm_head.weight.copy_(head_rows)


class PipelineDraftModule(DraftModule):
    """Proposes the next token from the target's own states at whatever depth each token has reached."""

    def __init__(self, config: DrafterConfig, attention: StructuralAttention = fast_attention) -> None:
        super().__init__()
        self.config = config
        self.layout = config.layout
        self.structural_attention = attention
        self.features = FeatureProjections(config)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_spec_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_token_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    def replicate(self, states: Sequence[Float[Tensor, "batch seq dim"]]) -> Float[Tensor, "batch rows seq dim"]:
        """One row of features per row type, of all positions (design §4, replication)."""
        joined = self.features.join(states)
        by_anchor = {i: self.features.project(joined, i) for i in self.layout.used_anchor_indices}
        rows = [by_anchor[self.layout.deepest_anchor(depth)] for depth in self.layout.row_depths]
        return torch.stack(rows, dim=1).to(joined.dtype)  # autocast projects in 16 bits; the residual stream is wider

    def run_layers(
        self,
        hidden: Float[Tensor, "batch rows seq dim"],
        position_ids: Int[Tensor, "batch seq"],
        attends: Sequence[Attend],
        num_query_rows: int,
    ) -> Float[Tensor, "batch query_rows seq dim"]:
        """All layers and the output norm; only the last layer drops the rows that are not asked for.

        Args:
            hidden: feature rows.
            position_ids: rotary positions, shared by the row types.
            attends: one attention callable per layer.
            num_query_rows: row types, counted from the first, whose output is wanted.
        """
        config = self.config
        rotary = rotary_tables(position_ids, config.rotary_dims, config.rope_theta, config.rope_scaling)
        for layer, attend in zip(self.layers, attends, strict=True):
            is_last = layer is self.layers[-1]
            hidden = layer(hidden, rotary, attend, num_query_rows if is_last else hidden.shape[1])
        return self.norm(hidden)

    def forward(
        self,
        states: Sequence[Float[Tensor, "batch seq dim"]],
        position_ids: Int[Tensor, "batch seq"],
        visible_row: Int[Tensor, "batch rows distances"],
    ) -> Float[Tensor, "batch seq dim"]:
        """Training: the normed output of the newest row at every position; `lm_head` makes draft logits of it.

        Args:
            states: raw target states at `anchors[:features.num_anchors]`.
            position_ids: token positions, the same in every sequence.
            visible_row: the structural mask (see `ReplicatedBatch`).
        """
        hidden, packed = self.replicate(states), PackedRows(visible_row)
        # FlexAttention is compiled for each number of rows.
        is_whole = packed.is_whole or self.structural_attention is flex_attention

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if is_whole:
                return self.structural_attention(query, key, value, visible_row)
            return packed.attend(self.structural_attention, query, key, value)

        attends = [attend] * len(self.layers)
        if is_whole:
            return self.run_layers(hidden, position_ids, attends, num_query_rows=1)[:, 0]
        return packed.newest(self.run_layers(packed.pack(hidden), position_ids[:1], attends, packed.num_sequences))
