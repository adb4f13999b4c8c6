"""The EAGLE-3 drafter while decoding: its cache, and a chain of drafts at a time. Knows no verdicts."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from spd_lightning.inference.caches import KeyValueBuffer
from spd_lightning.inference.verify import DraftProposal, Proposer
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter


class ChainSession:
    """Drafts of one sequence, chain by chain.

    Its cache holds the entries of what is verified, made of the target's own states; a chain's further entries, made
    of the drafter's outputs, lie behind them while it is drafted. So each step sees what the training-time test shows
    it (`unrolled_attention`).

    Args:
        drafter: the EAGLE-3 drafter.
        embedding: the target's.
        capacity: positions that the cache holds.
    """

    def __init__(self, drafter: Eagle3Drafter, embedding: nn.Embedding, capacity: int) -> None:
        self.drafter = drafter
        self.embedding = embedding
        config, weight = drafter.config, drafter.lm_head.weight
        self.buffer = KeyValueBuffer(capacity, config.num_kv_heads, config.head_dim, weight.dtype, weight.device)
        self.device = weight.device
        self.received: list[Tensor] = []
        """The states of positions that are not in the cache yet, as the target gave them."""

    def clear(self) -> None:
        """Readies the session for another sequence."""
        self.buffer.length = 0
        self.received.clear()

    def receive(self, anchors: Mapping[int, Float[Tensor, "1 seq dim"]]) -> None:
        """Takes the target's states of the verified positions that follow those that it has."""
        self.received.append(torch.cat([anchors[anchor] for anchor in self.drafter.config.anchors], dim=-1))

    @torch.no_grad()
    def draft(self, tokens: Sequence[int], length: int, proposer: Proposer) -> list[DraftProposal]:
        """A chain of `length` drafts behind `tokens`.

        Args:
            tokens: all committed ones; of all but the last one the target's states have been received.
            length: `k`.
            proposer: makes a token of draft logits.
        """
        known, newest = self.buffer.length, len(tokens) - 1
        states = torch.cat(self.received, dim=1)
        self.received.clear()
        assert known + states.shape[1] == newest, f"{newest} positions are verified, not {known} and {states.shape[1]}"
        fused = self.drafter.fuse(list(states.chunk(len(self.drafter.config.anchors), dim=-1)))
        hidden = self._run(torch.tensor([list(tokens[known + 1 :])], device=self.device), fused)[:, -1:]
        proposals = [self._propose(hidden, proposer, newest + 1)]
        while len(proposals) < length:
            token = torch.tensor([[proposals[-1].token]], device=self.device)
            hidden = self._run(token, hidden)
            proposals.append(self._propose(hidden, proposer, newest + 1 + len(proposals)))
        self.buffer.rollback(newest)
        return proposals

    def _propose(self, hidden: Float[Tensor, "1 1 dim"], proposer: Proposer, position: int) -> DraftProposal:
        return proposer.propose(self.drafter.lm_head(self.drafter.norm(hidden))[0, 0], position)

    def _run(self, tokens: Int[Tensor, "1 seq"], hidden: Float[Tensor, "1 seq dim"]) -> Float[Tensor, "1 seq dim"]:
        """The layer on what follows the cached entries; `tokens` are those behind the positions."""
        start, count = self.buffer.length, tokens.shape[1]
        positions = torch.arange(start, start + count, device=self.device)[None]
        return self.drafter.run_layer(self.embedding(tokens), hidden, positions, self._attend)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        count = key.shape[2]
        keys, values = self.buffer.append(key, value)
        mask = None
        if count > 1:
            total = keys.shape[2]
            mask = torch.ones(count, total, dtype=torch.bool, device=key.device).tril(total - count)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
