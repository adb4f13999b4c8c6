"""What one rank of a decoder does, loaded: a stage from its own weight files, or the drafter; for chains and for trees."""

from dataclasses import dataclass

import torch

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.distributed import Transport
from spd_lightning.inference.runtime.draft_rank import DraftRank
from spd_lightning.inference.runtime.stage_rank import StageRank
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import load_embedding
from spd_lightning.inference.tree.draft_rank import TreeDraftRank
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.schedule import TreeShape
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.stage_rank import TreeStageRank
from spd_lightning.inference.tree.verify import make_tree_verifier
from spd_lightning.inference.verify import make_verifier
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.target import TargetDtype


@dataclass(frozen=True)
class Roles:
    """A rank's two roles, on the same weights and buffers; a request takes one of them.

    Attributes:
        chain: for chains and plain decoding.
        tree: for trees; none where they are not asked for.
    """

    chain: StageRank | DraftRank
    tree: TreeStageRank | TreeDraftRank | None


def load_roles(
    transport: Transport,
    drafter: PipelineDraftModule,
    target: str,
    num_tokens: int,
    capacity: int,
    dtype: TargetDtype,
    device: torch.device,
    shape: TreeShape | None,
) -> Roles:
    """The roles of the transport's rank; arguments as for `DistributedRuntime.load`."""
    num_stages, vocab_size = drafter.config.num_stages, drafter.config.draft_vocab_size
    if transport.rank == num_stages:
        embedding = load_embedding(target, dtype, device)
        drafter.to(device=device, dtype=embedding.weight.dtype)
        session = DraftSession(drafter, embedding, capacity)
        trees = None if shape is None else TreeDraftRank(transport, TreeDraftSession(session, shape.refill_width))
        return Roles(DraftRank(transport, session), trees)
    token_ids = drafter.draft_token_ids.to(device)
    stage = Stage.load(target, drafter.layout, transport.rank + 1, capacity, dtype, device)
    chain = StageRank(
        transport,
        stage,
        num_stages,
        lambda params: make_verifier(params, num_tokens, token_ids),
        vocab_size,
        num_tokens,
    )
    if shape is None:
        return Roles(chain, None)
    tree = TreeStage(stage, num_stages, shape.refill_width)
    return Roles(
        chain,
        TreeStageRank(
            transport,
            tree,
            num_stages,
            lambda params: make_tree_verifier(params, num_tokens, token_ids),
            vocab_size,
            num_tokens,
        ),
    )
