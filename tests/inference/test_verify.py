"""Committed tokens have the target's law: exactly, by enumeration, and as drawn; coupled text is the target's own."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spd_lightning.inference import verify
from spd_lightning.inference.sampling import Purpose, SamplingParams, gumbel_noise, warp
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.verify import (
    DraftProposal,
    RejectionVerifier,
    make_proposer,
    make_verifier,
    residual_weights,
)

VOCAB, TOKENS = 14, 11  # three padding rows
MODES = ("rejection", "coupled")
DRAFT_IDS = torch.tensor([0, 2, 3, 6, 9, 10])  # gaps at 1, 4, 5, 7 and 8
WARPS = {
    "plain": dict(temperature=1.0),
    "cold": dict(temperature=0.7),
    "top_k": dict(temperature=0.7, top_k=4),
    "top_p": dict(temperature=0.7, top_p=0.8),
    "all": dict(temperature=0.7, top_k=5, top_p=0.9),
    "one": dict(temperature=1.0, top_k=1),
}


def logits_pair(seed: int, noise: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The target's logits, with padding rows that would win, and the draft's, which are like them."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    target[TOKENS:] = 50
    draft = target[DRAFT_IDS] + noise * torch.randn(len(DRAFT_IDS), generator=generator, dtype=torch.float64)
    return target.to(dtype), draft.to(dtype)


def laws(params: SamplingParams, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """`P` on the tokens, and `Q` spread over them."""
    settings = (params.temperature, params.top_k, params.top_p)
    q = torch.zeros(TOKENS, dtype=torch.float64)
    q[DRAFT_IDS] = warp(draft, *settings)
    return warp(target[:TOKENS], *settings), q


def normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def committed_law(p: Tensor, q: Tensor, accept: Callable, residual: Callable) -> Tensor:
    """The law of the committed token: `x` drawn from `q`, accepted or replaced; both by the rules given."""
    law = torch.zeros_like(p)
    for x in q.nonzero().flatten().tolist():
        chance = accept(p, q, x)
        law[x] += q[x] * chance
        law += q[x] * (1 - chance) * normalized(residual(p, q, x))
    return law


def chance_of_accepting(p: Tensor, q: Tensor, x: int) -> float:
    return min(1.0, float(p[x] / q[x]))


def our_residual(p: Tensor, q: Tensor, x: int) -> Tensor:
    return residual_weights(p, q[DRAFT_IDS], DRAFT_IDS)


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("seed", range(8))
def test_acceptance_and_residual_reproduce_the_target_law(name: str, seed: int) -> None:
    p, q = laws(SamplingParams(**WARPS[name]), *logits_pair(seed))
    law = committed_law(p, q, chance_of_accepting, our_residual)
    torch.testing.assert_close(law, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "accept, residual",
    [
        (chance_of_accepting, lambda p, q, x: p),  # a rejected token is replaced from P itself
        (chance_of_accepting, lambda p, q, x: p * (torch.arange(TOKENS) != x)),  # from P without the token
        (lambda p, q, x: float(p[x]), our_residual),  # accepted as if it had been the likeliest draft
        (chance_of_accepting, lambda p, q, x: (p - q).abs()),  # the residual without the cut at zero
    ],
)
def test_the_usual_mistakes_show_in_the_law(accept: Callable, residual: Callable) -> None:
    p, q = laws(SamplingParams(temperature=0.7), *logits_pair(0))
    distance = 0.5 * (committed_law(p, q, accept, residual) - p).abs().sum()
    assert distance > 0.01


def test_a_draft_law_that_was_not_drawn_from_shows_in_the_law() -> None:
    """Drawn with top-k, judged without: the acceptance rule needs the very law of the draw."""
    target, draft = logits_pair(0)
    p, drawn = laws(SamplingParams(temperature=0.7, top_k=2), target, draft)
    _, judged = laws(SamplingParams(temperature=0.7), target, draft)
    law = torch.zeros_like(p)
    for x in drawn.nonzero().flatten().tolist():
        chance = chance_of_accepting(p, judged, x)
        law[x] += drawn[x] * chance
        law += drawn[x] * (1 - chance) * normalized(our_residual(p, judged, x))
    assert 0.5 * (law - p).abs().sum() > 0.01


@pytest.fixture
def fixed_numbers(monkeypatch: pytest.MonkeyPatch) -> dict[Purpose, float]:
    """The uniform number that each purpose gets, in place of the keyed ones."""
    numbers: dict[Purpose, float] = {}
    monkeypatch.setattr(verify, "uniform", lambda seed, position, purpose: numbers[purpose])
    return numbers


@pytest.mark.parametrize("name", WARPS)
def test_the_rejection_pair_follows_that_rule(name: str, fixed_numbers: dict[Purpose, float]) -> None:
    """Each number is set just beside each threshold of the rule, so the code's law is the enumerated one."""
    params = SamplingParams(**WARPS[name], seed=0)
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    target, draft = logits_pair(3)
    p, q = laws(params, target, draft)
    residual = normalized((p - q).clamp(min=0))

    def interval(law: Tensor, token: int) -> tuple[float, float]:
        return float(law[:token].sum()) + 1e-12, float(law[: token + 1].sum()) - 1e-12

    for x in q.nonzero().flatten().tolist():
        for fixed_numbers[Purpose.DRAFT] in interval(q, x):
            proposal = proposer.propose(draft, position=5)
            assert proposal.token == x
            assert proposal.probs is not None and torch.equal(proposal.probs, q[DRAFT_IDS])
        chance = chance_of_accepting(p, q, x)
        for fixed_numbers[Purpose.ACCEPT] in (0.0, chance - 1e-12):
            if chance > 0:
                assert verifier.judge(target, proposal, position=5) == Verdict(accepted=True, token=x)
        if chance < 1:
            fixed_numbers[Purpose.ACCEPT] = chance + 1e-12
            for token in residual.nonzero().flatten().tolist():
                for fixed_numbers[Purpose.TARGET] in interval(residual, token):
                    assert verifier.judge(target, proposal, position=5) == Verdict(accepted=False, token=token)
    for token in p.nonzero().flatten().tolist():
        for fixed_numbers[Purpose.TARGET] in interval(p, token):
            assert verifier.draw(target, position=5) == token


def test_where_nothing_is_left_a_rejection_falls_back_to_the_target_law() -> None:
    p = torch.tensor([0.2, 0.0, 0.3, 0.5], dtype=torch.float64)
    every = torch.arange(4)
    assert torch.equal(residual_weights(p, p, every), p)
    below = p - torch.tensor([0.0, 0.0, 1e-17, 1e-16], dtype=torch.float64)
    assert residual_weights(below, p, every).sum() > 0


def chi_square(counts: Tensor, law: Tensor) -> float:
    """In standard deviations above its mean; tokens of probability 0 must not occur."""
    assert (counts[law == 0] == 0).all()
    possible = law > 0
    expected = law[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_drawn_and_committed_tokens_have_the_target_law(mode, name: str) -> None:
    params = SamplingParams(**WARPS[name], seed=1, verify=mode)
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    target, draft = logits_pair(4)
    p, q = laws(params, target, draft)
    drafted, committed, drawn = (torch.zeros(TOKENS, dtype=torch.float64) for _ in range(3))
    num_draws, num_accepted = 1200, 0
    for position in range(num_draws):
        proposal = proposer.propose(draft, position)
        verdict = verifier.judge(target, proposal, position)
        assert verdict.token == proposal.token or not verdict.accepted
        drafted[proposal.token] += 1
        committed[verdict.token] += 1
        drawn[verifier.draw(target, position)] += 1
        num_accepted += verdict.accepted
    assert chi_square(drafted, q) < 4
    assert chi_square(committed, p) < 4
    assert chi_square(drawn, p) < 4
    assert chi_square(committed, normalized(p + 0.5 * q)) > 4  # it would see a bias

    distance, margin = 0.5 * (p - q).abs().sum().item(), 4 * 0.5 / math.sqrt(num_draws)
    acceptance = num_accepted / num_draws
    assert acceptance < 1 - distance + margin
    assert acceptance > (1 - distance if mode == "rejection" else (1 - distance) / (1 + distance)) - margin


def test_tokens_at_neighbouring_positions_are_independent() -> None:
    params = SamplingParams(temperature=1.0, seed=2)
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    target, draft = logits_pair(5)
    p, _ = laws(params, target, draft)
    tokens = [verifier.judge(target, proposer.propose(draft, i), i).token for i in range(3000)]
    counts = torch.zeros(TOKENS, TOKENS, dtype=torch.float64)
    for one, other in pairwise(tokens):
        counts[one, other] += 1
    assert abs(chi_square(counts.flatten(), torch.outer(p, p).flatten())) < 4


@pytest.mark.parametrize("name", ["plain", "top_p", "all"])
def test_coupled_tokens_are_those_of_plain_sampling_for_200_seeds(name: str) -> None:
    """Rows change with the position; the drafts are now good, now bad."""
    num_accepted = 0
    for seed in range(200):
        params = SamplingParams(**WARPS[name], seed=seed, verify="coupled")
        proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
        autoregressive = make_verifier(params, TOKENS)
        for position in range(4):
            target, draft = logits_pair(17 * seed + position, noise=0.4 * position)
            proposal = proposer.propose(draft, position)
            assert proposal.token in DRAFT_IDS.tolist()
            verdict = verifier.judge(target, proposal, position)
            assert verdict.token == autoregressive.draw(target, position)
            assert verdict.accepted == (verdict.token == proposal.token)
            num_accepted += verdict.accepted
    assert 80 < num_accepted < 720


def exact_coupled_acceptance(p: Tensor, q: Tensor) -> float:
    """The chance that Gumbel-max with shared noise picks the same token from both laws."""
    both = ((p > 0) & (q > 0)).nonzero().flatten().tolist()
    return sum(1 / float(torch.maximum(p / p[v], q / q[v]).sum()) for v in both)


@pytest.mark.parametrize("name", ["plain", "top_k", "all"])
def test_coupled_acceptance_lies_in_the_interval_of_the_design(name: str) -> None:
    params = SamplingParams(**WARPS[name], seed=3, verify="coupled")
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    for seed in range(50):
        target, draft = logits_pair(seed)
        p, q = laws(params, target, draft)
        distance, exact = 0.5 * (p - q).abs().sum().item(), exact_coupled_acceptance(p, q)
        assert (1 - distance) / (1 + distance) - 1e-12 <= exact <= 1 - distance + 1e-12
    num = 1500
    accepted = sum(verifier.judge(target, proposer.propose(draft, i), i).accepted for i in range(num))
    assert accepted / num == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(num))


def test_coupled_sampling_takes_the_largest_sum_of_log_probability_and_noise() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=8, verify="coupled")
    target, draft = logits_pair(6)
    p, q = laws(params, target, draft)
    for position in range(50):
        noise = gumbel_noise(8, position, torch.arange(TOKENS))
        assert make_verifier(params, TOKENS).draw(target, position) == (p.log() + noise).argmax()
        assert make_proposer(params, DRAFT_IDS).propose(draft, position).token == (q.log() + noise).argmax()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=9e-6, top_k=3, verify="coupled"),
        SamplingParams(temperature=1.0, top_k=1, seed=0),
        SamplingParams(temperature=1.7, top_k=1, seed=0, verify="coupled"),
        SamplingParams(temperature=1.0, top_p=1e-9, seed=0),
    ],
)
def test_a_law_of_one_token_is_greedy(params: SamplingParams, dtype: torch.dtype) -> None:
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    verdicts = []
    for position in range(60):
        target, draft = logits_pair(position, dtype=dtype)
        if position % 2:  # ties: the lowest id wins
            target[:TOKENS], draft[:] = target[:TOKENS].round(), draft.round()
        best = int(target[:TOKENS].argmax())
        proposal = proposer.propose(draft, position)
        assert proposal.token == DRAFT_IDS[draft.argmax()]
        assert verifier.draw(target, position) == best
        verdicts.append(verifier.judge(target, proposal, position))
        assert verdicts[-1] == Verdict(accepted=proposal.token == best, token=best)
    assert 5 < sum(verdict.accepted for verdict in verdicts) < 55


@pytest.mark.parametrize(
    "params", [SamplingParams(), *(SamplingParams(temperature=1.0, seed=0, verify=v) for v in MODES)]
)
def test_padding_and_masked_tokens_are_never_committed(params: SamplingParams) -> None:
    proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
    target, draft = logits_pair(7)
    target[[0, 1, 4, 9]] = -math.inf
    draft[1:3] = -math.inf
    for position in range(300):
        proposal = proposer.propose(draft, position)
        assert proposal.token not in DRAFT_IDS[1:3].tolist()
        for token in (verifier.draw(target, position), verifier.judge(target, proposal, position).token):
            assert token < TOKENS and target[token] > -math.inf


@pytest.mark.parametrize(
    "params", [SamplingParams(), *(SamplingParams(temperature=1.0, seed=0, verify=v) for v in MODES)]
)
def test_equal_laws_accept_everything(params: SamplingParams) -> None:
    every = torch.arange(TOKENS)
    proposer, verifier = make_proposer(params, every), make_verifier(params, TOKENS, every)
    for position in range(300):
        target, _ = logits_pair(position)
        proposal = proposer.propose(target[:TOKENS].clone(), position)
        assert verifier.judge(target, proposal, position) == Verdict(accepted=True, token=proposal.token)


@pytest.mark.parametrize("verify_mode", MODES)
def test_draws_are_keyed_by_seed_and_position_alone(verify_mode) -> None:
    """The same objects, new objects, another order: the same tokens; another seed: others."""
    target, draft = logits_pair(9)

    def tokens(seed: int, positions: list[int]) -> dict[int, tuple[int, Verdict, int]]:
        params = SamplingParams(temperature=1.0, seed=seed, verify=verify_mode)
        proposer, verifier = make_proposer(params, DRAFT_IDS), make_verifier(params, TOKENS, DRAFT_IDS)
        found = {}
        for position in positions:
            proposal = proposer.propose(draft, position)
            verdict = verifier.judge(target, proposal, position)
            found[position] = (proposal.token, verdict, verifier.draw(target, position))
        return found

    forward = list(range(40))
    assert tokens(0, forward) == tokens(0, forward[::-1])
    assert tokens(0, forward) != tokens(1, forward)
    assert len({value[2] for value in tokens(0, forward).values()}) > 2


def test_sampling_without_a_seed_and_foreign_drafts_are_caught() -> None:
    with pytest.raises(AssertionError, match="seeded"):
        make_proposer(SamplingParams(temperature=1.0), DRAFT_IDS)
    with pytest.raises(AssertionError, match="seeded"):
        make_verifier(SamplingParams(temperature=1.0, verify="coupled"), TOKENS)
    verifier = make_verifier(SamplingParams(temperature=1.0, seed=0), TOKENS, DRAFT_IDS)
    assert isinstance(verifier, RejectionVerifier)
    probs = torch.full((len(DRAFT_IDS),), 1 / len(DRAFT_IDS), dtype=torch.float64)
    for token in (1, 13):  # in a gap, and beyond
        with pytest.raises(AssertionError):
            verifier.judge(logits_pair(0)[0], DraftProposal(token, probs), 5)
