"""The loop of an EAGLE-3 decode: draft a chain, verify it by one forward, commit, take back. Knows no files."""

from collections.abc import Generator, Sequence

import torch

from spd_lightning.inference.eagle.block_stage import BlockStage
from spd_lightning.inference.eagle.chain_session import ChainSession
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.stats import DecodeStats, Judgement
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import Proposer, Verifier


def decode_in_rounds(
    stage: BlockStage,
    session: ChainSession,
    proposer: Proposer,
    verifier: Verifier,
    draft_length: int,
    prompt: Sequence[int],
    stop: StopCondition,
    stats: DecodeStats,
) -> Generator[int]:
    """Yields committed tokens, the prefill's first. What a round has drafted beyond the answer's end is dropped.

    A round runs the newest token and `k` drafts behind it as one block. Each draft is judged by the logits of the token
    before it; the first rejection ends the round with the target's own token, and without one the last logits give a
    token more: a round commits 1 to `k + 1` tokens.

    Args:
        stage: the target.
        session: the drafter.
        proposer: makes a token of draft logits.
        verifier: judges drafts by the target's logits.
        draft_length: `k`.
        prompt: token ids.
        stop: fed every committed token; the decode ends when it says so.
        stats: counts that are added to as the decode goes; a cycle is a round, a fill a draft's number in its chain.
    """
    tokens = list(prompt)
    stage.clear()
    session.clear()
    prefill = stage.run(torch.tensor([tokens], device=session.device), 0)
    session.receive(prefill.anchors)
    assert prefill.logits is not None
    tokens.append(verifier.draw(prefill.logits, len(tokens)))
    stop.push(tokens[-1])
    yield tokens[-1]
    while stop.end is None:
        start = len(tokens) - 1
        proposals = session.draft(tokens, draft_length, proposer)
        block = [tokens[-1], *(proposal.token for proposal in proposals)]
        output = stage.run_block(torch.tensor([block], device=session.device), start)
        stats.num_cycles += 1
        for index, logits in enumerate(output.logits):
            position = start + 1 + index
            if index < draft_length:
                verdict = verifier.judge(logits, proposals[index], position)
                stats.judgements.append(Judgement(position, index + 1, verdict.accepted))
            else:
                verdict = Verdict(accepted=False, token=verifier.draw(logits, position))
            tokens.append(verdict.token)
            stats.num_committed += 1
            stop.push(verdict.token)
            yield verdict.token
            if stop.end is not None or not verdict.accepted:
                break
        # All but the newest token have been run and were right.
        kept = len(tokens) - 1
        stage.keep(kept)
        session.receive({anchor: states[:, : kept - start] for anchor, states in output.anchors.items()})
