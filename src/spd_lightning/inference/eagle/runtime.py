"""Target and EAGLE-3 drafter on one device, with the interface of the other runtimes."""

from collections.abc import Generator, Sequence

from spd_lightning.inference.eagle.block_stage import BlockStage
from spd_lightning.inference.eagle.chain_session import ChainSession
from spd_lightning.inference.eagle.rounds import decode_in_rounds
from spd_lightning.inference.runtime.interface import Method, OneProcess
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.token_scores import TokenScores, scored
from spd_lightning.inference.verify import make_proposer, make_verifier
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.target import TargetDtype

DRAFT_LENGTH = 7
"""`k` unless it is given."""


class EagleRuntime(OneProcess):
    """The whole target and the drafter of a decoder in this process.

    Args:
        stage: the target; takes blocks of `draft_length + 1` tokens.
        session: the drafter.
        num_tokens: `len(tokenizer)`.
        draft_length: `k`: drafts of a round.
    """

    def __init__(self, stage: BlockStage, session: ChainSession, num_tokens: int, draft_length: int) -> None:
        super().__init__([stage], num_tokens, session.device)
        self.stage = stage
        self.session = session
        self.draft_length = draft_length
        self.draft_token_ids = session.drafter.draft_token_ids

    @classmethod
    def load(
        cls,
        drafter: Eagle3Drafter,
        target: str,
        num_tokens: int,
        max_length: int,
        draft_length: int | None = None,
        dtype: TargetDtype = "auto",
        device: str = "cpu",
    ) -> "EagleRuntime":
        """Loads a target, and readies the drafter.

        Args:
            drafter: the drafter.
            target: folder or hub id.
            num_tokens: `len(tokenizer)`.
            max_length: longest sequence, prompt and answer together.
            draft_length: `k`; `DRAFT_LENGTH` when absent.
            dtype: of target and drafter; `auto` keeps the target checkpoint's.
            device: where everything runs.

        Raises:
            ValueError: if the target cannot be loaded, or the drafts are none.
        """
        k = DRAFT_LENGTH if draft_length is None else draft_length
        if k < 1:
            raise ValueError(f"draft_length={k}: at least one draft a round is needed")
        config, capacity = drafter.config, max_length + k  # the last round's drafts lie beyond the answer
        stage = BlockStage.whole(target, config.num_layers, config.anchors, capacity, k + 1, dtype, device)
        embedding = stage.modules.embedding
        assert embedding is not None
        drafter.to(device=device, dtype=embedding.weight.dtype)
        return cls(stage, ChainSession(drafter, embedding, capacity), num_tokens, k)

    def decode(
        self,
        method: Method,
        prompt: Sequence[int],
        params: SamplingParams,
        stop: StopCondition,
        stats: DecodeStats,
        scores: TokenScores | None = None,
    ) -> Generator[int]:
        """Decodes in rounds for `pipelined`, see `decode_in_rounds`; it has no trees."""
        if method == "plain":
            return self._plain(prompt, params, stop, scores)
        assert method == "pipelined"
        verifier = scored(make_verifier(params, self.num_tokens, self.draft_token_ids), scores)
        proposer = make_proposer(params, self.draft_token_ids)
        return decode_in_rounds(self.stage, self.session, proposer, verifier, self.draft_length, prompt, stop, stats)
