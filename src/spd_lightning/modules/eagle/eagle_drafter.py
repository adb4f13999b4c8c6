"""The EAGLE-3 drafter (design §7): fused target states, one decoder layer, a norm and a draft head.

Its parts have the names of published checkpoints (design §10). Knows no target model, no verification and no trainer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from spd_lightning.modules.decoder_layer import Attend, DrafterMLP, RMSNorm, rotary_tables, rotate
from spd_lightning.modules.drafter import DraftModule
from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.eagle.unrolled_attention import unrolled_attention


class EagleAttention(nn.Module):
    """Grouped-query attention of inputs of twice the width, with full rotary and without q/k-norm."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim, width = config.head_dim, 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self, joined: Float[Tensor, "batch seq joined"], rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Float[Tensor, "batch seq dim"]:
        projections = (self.q_proj(joined), self.k_proj(joined), self.v_proj(joined))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projections)
        # `rotate` is for rows of hidden states; here there is one row.
        query, key = (rotate(x[:, :, None], rotary)[:, :, 0].to(value.dtype) for x in (query, key))
        return self.o_proj(attend(query, key, value).transpose(1, 2).flatten(-2))


class EagleLayer(nn.Module):
    """The decoder layer: it reads the token behind a state beside the state, which is the residual stream."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DrafterMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        embedding: Float[Tensor, "batch seq dim"],
        hidden: Float[Tensor, "batch seq dim"],
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Float[Tensor, "batch seq dim"]:
        joined = torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)
        hidden = hidden + self.self_attn(joined, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(DraftModule):
    """Proposes token after token from the target's states, going on from its own output where those end."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.anchors) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_token_ids", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @property
    def layers(self) -> list[EagleLayer]:
        """The decoder layers, of which there is one."""
        return [self.midlayer]

    def fuse(self, states: Sequence[Float[Tensor, "batch seq dim"]]) -> Float[Tensor, "batch seq dim"]:
        """One state of each position's low, middle and high ones."""
        dtype = self.fc.weight.dtype
        joined = torch.cat([state.to(dtype) for state in states], dim=-1)
        return self.fc(joined).to(dtype)  # autocast projects in 16 bits; the residual stream is wider

    def run_layer(
        self,
        embedding: Float[Tensor, "batch seq dim"],
        hidden: Float[Tensor, "batch seq dim"],
        position_ids: Int[Tensor, "batch seq"],
        attend: Attend,
    ) -> Float[Tensor, "batch seq dim"]:
        """The layer's raw output: the next step's state, and with `norm` and `lm_head` the draft logits.

        Args:
            embedding: the target's, of the token behind each position.
            hidden: the fused state of each position, or the raw output of the step before.
            position_ids: rotary positions.
            attend: attention of what comes with what is remembered.
        """
        rotary = rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta)
        return self.midlayer(embedding, hidden, rotary, attend)

    def forward(
        self,
        states: Sequence[Float[Tensor, "batch seq dim"]],
        embeddings: Float[Tensor, "batch seq dim"],
        position_ids: Int[Tensor, "batch seq"],
        num_steps: int,
    ) -> list[Float[Tensor, "batch _ dim"]]:
        """The training-time test: the drafter unrolled on its own outputs, all chains at once.

        Step `s` of the chain with base `t` reads token `t+1+s` and the step before it, stands at position `t+s` and
        predicts token `t+2+s`. So step `s` has the bases `0 .. seq-2-s`; no step is made that has none.

        Args:
            states: raw target states at `config.anchors`.
            embeddings: the target's embeddings of the tokens at all positions.
            position_ids: token positions.
            num_steps: steps of each chain.

        Returns:
            The normed outputs of each step; `lm_head` makes draft logits of them.
        """
        seq = embeddings.shape[1]
        hidden, outputs = self.fuse(states), []
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys.append(key)
            values.append(value)
            return unrolled_attention(query, keys, values)

        for step in range(min(num_steps, seq - 1)):
            bases = seq - 1 - step
            hidden = self.run_layer(
                embeddings[:, step + 1 :], hidden[:, :bases], position_ids[:, :bases] + step, attend
            )
            outputs.append(self.norm(hidden))
        return outputs
