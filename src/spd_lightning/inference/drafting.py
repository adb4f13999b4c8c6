"""The drafter while decoding: its cache of depth-`n` rows and the states of the tokens in flight (design §5, step 1).

It reads what it has received; whether a cycle's own stage forwards are among that is the layout's schedule. Knows no
transport.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from spd_lightning.inference.caches import KeyValueBuffer
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.modules.decoder_layer import Attend
from spd_lightning.modules.drafter import PipelineDraftModule


class DraftSession:
    """Draft logits of one sequence, cycle by cycle.

    The rows of the tokens in flight are recomputed every cycle, since each token is one stage deeper, on top of a cache
    of the rows of what has left the pipeline. In the order of positions each row sees all before it and itself: that
    is the structural mask of training (`visible_depth`), met by construction.

    Args:
        drafter: the Pipeline Draft Module.
        embedding: the target's, for the state `H^0` of the newest token.
        capacity: positions that the caches hold.
    """

    def __init__(self, drafter: PipelineDraftModule, embedding: nn.Embedding, capacity: int) -> None:
        self.drafter = drafter
        self.embedding = embedding
        config, weight = drafter.config, drafter.lm_head.weight
        self.layout = drafter.layout
        self.num_stages = config.num_stages
        self.anchors = drafter.layout.anchors[: drafter.features.num_anchors]
        self.buffers = [
            KeyValueBuffer(
                capacity + config.num_stages, config.num_kv_heads, config.head_dim, weight.dtype, weight.device
            )
            for _ in drafter.layers
        ]
        # States of the tokens in flight and, pre-step, of the one that has just left: slot `position mod (n + 1)`.
        shape = (len(self.anchors), config.num_stages + 1, config.hidden_size)
        self.states = torch.zeros(shape, dtype=embedding.weight.dtype, device=weight.device)
        self.length = 0
        self.visible: Tensor | None = None

    def clear(self) -> None:
        """Readies the session for another sequence."""
        self.length = 0
        for buffer in self.buffers:
            buffer.length = 0

    @torch.no_grad()
    def prefill(self, tokens: Tensor, anchors: Mapping[int, Float[Tensor, "1 seq dim"]]) -> None:
        """Takes the prompt in: all of its rows have depth `n`.

        Args:
            tokens: ids of the prompt, `1 seq`.
            anchors: states of all prompt positions at every anchor but 0.
        """
        states = [anchors[anchor] if anchor else self.embedding(tokens) for anchor in self.anchors]
        self.run_chain(self.features(states, self.num_stages), keep=tokens.shape[1])

    @torch.no_grad()
    def receive(self, position: int, anchors: Mapping[int, Float[Tensor, "1 1 dim"]]) -> None:
        """Keeps the states that a stage's forward of one token gave."""
        for index, anchor in enumerate(self.anchors):
            if anchor in anchors:
                self.states[index, position % (self.num_stages + 1)] = anchors[anchor][0, 0]

    @torch.no_grad()
    def draft_logits(self, plan: CyclePlan, newest_token: int) -> Float[Tensor, " draft_vocab"]:
        """Logits over the draft vocabulary for the position after the newest token.

        Pre-step, nothing of this cycle has been received yet; post-step, all of it has (`layout.drafts_first`).

        Args:
            plan: this cycle.
            newest_token: id of the newest token in flight.
        """
        token = torch.tensor([[newest_token]], device=self.states.device)
        self.receive(plan.newest, {0: self.embedding(token)})
        oldest = plan.newest - plan.fill + 1
        assert oldest - self.length <= 1, f"{oldest} tokens have left, but only {self.length} were taken in"
        positions = range(self.length, plan.newest + 1)
        depths = [self.layout.depth_when_drafting(plan.newest - position, plan.fill) for position in positions]
        rows = [self._row(position, depth) for position, depth in zip(positions, depths, strict=True)]
        hidden = self.run_chain(torch.cat(rows, dim=2), keep=depths.count(self.num_stages))
        return self.drafter.lm_head(hidden[0, 0, -1])

    def _row(self, position: int, depth: int) -> Float[Tensor, "1 1 1 dim"]:
        """The feature of one token in flight, or of one that has just left."""
        states = self.states[:, position % (self.num_stages + 1)]
        return self.features([state[None, None] for state in states], depth)

    def features(self, states: list[Tensor], depth: int) -> Float[Tensor, "1 1 seq dim"]:
        """`g^depth` of tokens, from as many anchor states as that depth has passed."""
        features, deepest = self.drafter.features, self.drafter.layout.deepest_anchor(depth)
        return features.project(features.join(states[: deepest + 1]), deepest)[:, None]

    def run_chain(self, rows: Float[Tensor, "1 1 seq dim"], keep: int) -> Float[Tensor, "1 1 seq dim"]:
        """`run` of rows that follow the cached ones and one another; made on the device, so that the host need not wait."""
        count, total = rows.shape[2], self.length + rows.shape[2]
        visible = None  # a single row sees all
        if count > 1:
            visible = torch.ones(count, total, dtype=torch.bool, device=rows.device).tril(self.length)
        return self.run(rows, torch.arange(self.length, total, device=rows.device), visible, keep)

    def run(
        self,
        rows: Float[Tensor, "1 1 seq dim"],
        positions: Int64[Tensor, " seq"],
        visible: Bool[Tensor, "seq keys"] | None,
        keep: int,
    ) -> Float[Tensor, "1 1 seq dim"]:
        """The drafter's layers on rows that follow the cached ones.

        Args:
            rows: features.
            positions: of the rows.
            visible: which cached and new rows each row sees; None: all.
            keep: so many of them, the first ones, stay in the cache.
        """
        self.visible = visible
        hidden = self.drafter.run_layers(rows, positions[None], [self._attend(buffer) for buffer in self.buffers], 1)
        self.length += keep
        for buffer in self.buffers:
            buffer.rollback(self.length)
        return hidden

    def _attend(self, buffer: KeyValueBuffer) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = buffer.append(key[:, :, 0], value[:, :, 0])
            mask = self.visible
            out = F.scaled_dot_product_attention(query[:, :, 0], keys, values, attn_mask=mask, enable_gqa=True)
            return out[:, :, None]

        return attend
