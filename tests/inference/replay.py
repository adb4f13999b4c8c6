"""One draft by the decoding drafter, of recorded target states."""

from collections.abc import Mapping

from torch import Tensor, nn

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.modules.drafter import PipelineDraftModule


def replayed_logits(
    drafter: PipelineDraftModule,
    embedding: nn.Embedding,
    ids: Tensor,
    by_anchor: Mapping[int, Tensor],
    newest: int,
    fill: int,
) -> Tensor:
    """Draft logits behind position `newest` when `fill` tokens are in flight, and all before them is the prompt.

    The session is shown no state that its token would not have at that depth.
    """
    layout, start = drafter.layout, newest - fill + 1
    session = DraftSession(drafter, embedding, 64)
    session.prefill(ids[:, :start], {anchor: states[:, :start] for anchor, states in by_anchor.items()})
    for position in range(start, newest + 1):
        end = layout.stage_ends[newest - position + layout.first_depth]
        session.receive(
            position, {a: states[:, position : position + 1] for a, states in by_anchor.items() if a <= end}
        )
    plan = CyclePlan(cycle=0, epoch=0, fill=fill, newest=newest, num_stages=layout.num_stages)
    return session.draft_logits(plan, int(ids[0, newest]))
