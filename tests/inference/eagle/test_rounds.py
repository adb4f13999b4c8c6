"""EAGLE-3 decodes: training parity of every draft, plain decoding's tokens, what is counted, and where they end."""

import pytest
import torch

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import GreedyVerifier, make_verifier
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import TOKENIZER, RecordingVerifier, ScriptedProposer
from tests.inference.eagle.setting import EagleBench
from tests.modules.conftest import FAMILIES, make_target

PROMPT = list(range(60, 71))
NEAR_TIE = 1e-3


def plain(bench: EagleBench, prompt=PROMPT, params=None, verifier=None) -> list[int]:
    params = params or SamplingParams(24)
    stop = StopCondition((), params.max_new_tokens, (), TOKENIZER)
    return list(decode_autoregressively([bench.stage], verifier or make_verifier(params, NUM_TOKENS), prompt, stop))


class Recording(ScriptedProposer):
    """Keeps the draft logits of each chain, with the token before it."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.drafted: list[tuple[int, int, torch.Tensor]] = []

    def propose(self, draft_logits, position):
        proposal = super().propose(draft_logits, position)
        self.drafted.append((position, proposal.token, draft_logits))
        return proposal


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-10), ("qwen3", 1e-10), ("qwen3_5", 1e-3)])
@pytest.mark.parametrize("draft_length", [3, 7])
def test_every_draft_is_what_the_training_time_test_computes(family: str, tolerance: float, draft_length: int) -> None:
    """A whole decode, accepted and rejected: draft `s` of a chain against step `s` of the unrolled training forward.

    Each chain is held against the training forward of the committed tokens and its own drafts behind them.
    """
    target = make_target(family, 8)
    bench = EagleBench(target, draft_length)
    answer = plain(bench)
    proposer = Recording(PROMPT + answer, 0.7)
    tokens, stats = bench.decode(PROMPT, proposer=proposer)
    assert tokens == answer and 5 < stats.num_accepted < stats.num_judged
    sequence, lengths = PROMPT + tokens, []
    for first in range(0, len(proposer.drafted), draft_length):
        chain = proposer.drafted[first : first + draft_length]
        start = chain[0][0]
        lengths.append(start)
        ids = torch.tensor([sequence[:start] + [token for _, token, _ in chain]])
        states = target.forward(ids, torch.ones_like(ids), (0, 2, 4, 5))
        with torch.no_grad():
            outputs = bench.drafter(
                states.anchors[1:], states.anchors[0], torch.arange(ids.shape[1])[None], draft_length
            )
            for step, (position, _, logits) in enumerate(chain):
                assert position == start + step
                expected = bench.drafter.lm_head(outputs[step][0, start - 2])
                torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
    assert len(lengths) == stats.num_cycles and len(set(lengths)) == len(lengths) > 3


@pytest.mark.parametrize("draft_length", [1, 3, 7, 15])
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dense_family", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_plain_decoding(dense_family: str, accuracy: float, draft_length: int) -> None:
    bench = EagleBench(make_target(dense_family, 8), draft_length)
    for prompt in (PROMPT, [5], [9, 200]):
        recorded = RecordingVerifier(GreedyVerifier(NUM_TOKENS))
        answer = plain(bench, prompt, verifier=recorded)
        judged = RecordingVerifier(GreedyVerifier(NUM_TOKENS))
        proposer = ScriptedProposer(prompt + answer, accuracy)
        tokens, stats = bench.decode(prompt, proposer=proposer, verifier=judged)
        assert tokens == answer and len(tokens) == 24 and stats.num_committed == 23
        for position, logits in recorded.logits.items():  # token equality alone is a weak oracle
            torch.testing.assert_close(judged.logits[position], logits, rtol=0, atol=1e-10)
        if accuracy == 0:
            assert stats.num_cycles == 23 and stats.num_accepted == 0
        if accuracy == 1:
            assert stats.num_cycles == -(-23 // (draft_length + 1)) and stats.acceptance == 1


@pytest.mark.parametrize("draft_length", [3, 7])
def test_greedy_tokens_of_a_hybrid_target_differ_at_near_ties_only(draft_length: int) -> None:
    """Its delta rule is computed in float32 and in other blocks than one by one."""
    bench = EagleBench(make_target("qwen3_5", 8), draft_length)
    for seed in range(6):
        prompt = torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        recorded = RecordingVerifier(GreedyVerifier(NUM_TOKENS))
        answer = plain(bench, prompt, verifier=recorded)
        tokens, _ = bench.decode(prompt, proposer=ScriptedProposer(prompt + answer, 0.6))
        if tokens != answer:
            index = next(i for i, (ours, theirs) in enumerate(zip(tokens, answer, strict=True)) if ours != theirs)
            best, second = recorded.logits[len(prompt) + index][:NUM_TOKENS].topk(2).values.tolist()
            print(f"near-tie: margin {best - second:.2e} at position {len(prompt) + index}")
            assert best - second < NEAR_TIE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trained_law_of_the_drafter_drafts(family: str) -> None:
    """With its own proposals, and decodes after one another: nothing is left of the one before."""
    bench = EagleBench(make_target(family, 8), 3)
    first, _ = bench.decode(PROMPT)
    other, _ = bench.decode([7, 8, 9, 10, 11, 12, 13])
    again, stats = bench.decode(PROMPT)
    assert again == first != other
    assert stats.num_committed == 23
    assert [j.fill for j in stats.judgements][:1] == [1] and {j.fill for j in stats.judgements} <= {1, 2, 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted(family: str) -> None:
    """Right, right, wrong, then all right: a round commits what was judged, or the whole chain and one more."""
    bench = EagleBench(make_target(family, 8), 3)
    params = SamplingParams(9)
    answer = plain(bench, params=params)
    wrong_at = {len(PROMPT) + 3}

    class Fixed(ScriptedProposer):
        def propose(self, draft_logits, position):
            self.accuracy = 0.0 if position in wrong_at else 1.0
            wrong_at.discard(position)
            return super().propose(draft_logits, position)

    tokens, stats = bench.decode(PROMPT, params, proposer=Fixed(PROMPT + answer, 1.0))
    assert tokens == answer
    # The first token is the prefill's. Round 1: 1 2 right, 3 wrong. Round 2: 4 5 6 right, and 7. Round 3: 8.
    base = len(PROMPT)
    found = [(j.position - base, j.fill, j.accepted) for j in stats.judgements]
    assert found == [(1, 1, True), (2, 2, True), (3, 3, False), (4, 1, True), (5, 2, True), (6, 3, True), (8, 1, True)]
    assert (stats.num_cycles, stats.num_committed) == (3, 8)
    assert stats.speedup == stats.alpha == 8 / 3 and stats.acceptance == 6 / 7


@pytest.mark.parametrize("length", range(1, 11))
def test_the_limit_and_an_end_of_sequence_cut_within_a_round(length: int) -> None:
    bench = EagleBench(make_target("qwen3", 8), 3)
    answer = plain(bench)
    proposer = ScriptedProposer(PROMPT + answer, 1.0)
    tokens, stats = bench.decode(PROMPT, SamplingParams(length), proposer=proposer)
    assert tokens == answer[:length] and stats.num_committed == length - 1
    eos = answer[length]
    tokens, stats = bench.decode(PROMPT, proposer=proposer, eos=[eos])
    assert tokens == answer[: answer.index(eos) + 1]
    assert stats.num_committed == len(tokens) - 1


def test_an_answer_may_be_left_in_the_middle_of_a_round() -> None:
    bench = EagleBench(make_target("qwen3_5", 8), 3)
    from spd_lightning.inference.eagle.rounds import decode_in_rounds
    from spd_lightning.inference.stats import DecodeStats

    answer = plain(bench)
    proposer, verifier = ScriptedProposer(PROMPT + answer, 1.0), GreedyVerifier(NUM_TOKENS)
    stop = StopCondition((), 24, (), TOKENIZER)
    left = decode_in_rounds(bench.stage, bench.session, proposer, verifier, 3, PROMPT, stop, DecodeStats(1))
    assert [next(left) for _ in range(4)] == answer[:4]
    left.close()
    assert bench.decode(PROMPT, proposer=ScriptedProposer(PROMPT + answer, 0.5))[0] == answer


def test_coupled_sampling_gives_the_text_of_plain_sampling_with_the_same_noise() -> None:
    bench = EagleBench(make_target("llama", 8), 3)
    for seed in range(5):
        params = SamplingParams(16, 1.0, top_k=20, seed=seed, verify="coupled")
        assert bench.decode(PROMPT, params)[0] == plain(bench, params=params)
