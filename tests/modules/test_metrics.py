"""Acceptance sums against whole-logit definitions; implied figures against a simulation and the design's constants."""

import random

import pytest
import torch
import torch.nn.functional as F

from spd_lightning.modules import losses, metrics
from spd_lightning.modules.losses import TargetHead
from spd_lightning.modules.metrics import FillAcceptance, acceptance_sums, implied_figures, keep_top_k


def test_constant_acceptance_gives_the_closed_form() -> None:
    """`alpha = 1 / (1 + (1-p)(n-1))` of design §1."""
    for num_stages in (1, 2, 4, 8, 16):
        for p in (0.0, 0.3, 0.8, 0.99):
            figures = implied_figures([p] * num_stages)
            assert figures.acceptance == pytest.approx(p)
            assert figures.tokens_per_cycle == pytest.approx(1 / (1 + (1 - p) * (num_stages - 1)))
            assert figures.speedup == pytest.approx(num_stages * figures.tokens_per_cycle)


def test_implied_figures_match_a_simulated_pipeline() -> None:
    """Cycles are counted as decoding does: a flush costs `n - 1` cycles in which nothing is judged."""
    by_fill, num_stages = [0.9, 0.7, 0.8, 0.6], 4
    rng = random.Random(0)
    judged = accepted = cycles = 0
    drafted_at = 1  # fill at which the draft that is judged next was made
    cycles += num_stages - 1
    for _ in range(200_000):
        judged += 1
        cycles += 1
        if rng.random() < by_fill[min(drafted_at, num_stages) - 1]:
            accepted += 1
            drafted_at += 1
        else:
            drafted_at = 1
            cycles += num_stages - 1
    figures = implied_figures(by_fill)
    assert figures.acceptance == pytest.approx(accepted / judged, abs=4e-3)
    assert figures.tokens_per_cycle == pytest.approx(judged / cycles, abs=4e-3)


@pytest.mark.parametrize(
    ("rates", "expected"), [([1.0, 1.0], (1.0, 1.0, 2.0)), ([0.0, 1.0], (0.0, 0.5, 1.0)), ([0.4], (0.4, 1.0, 1.0))]
)
def test_extremes(rates, expected) -> None:
    figures = implied_figures(rates)
    assert (figures.acceptance, figures.tokens_per_cycle, figures.speedup) == pytest.approx(expected)


def test_a_rate_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.2 at fill 2"):
        implied_figures([0.5, 1.2])


def make_case(positions: int, fills: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    vocab, tokens, dim, ids = 90, 85, 12, torch.arange(0, 80, 2)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64)
    weight[tokens:] *= 50
    head = TargetHead(weight, weight[ids], tokens)
    target = torch.randn(positions, dim, generator=generator, dtype=torch.float64)
    drafters = [
        target + a * torch.randn(positions, dim, generator=generator, dtype=torch.float64) for a in range(fills)
    ]
    return drafters, weight[ids], ids, target, head


@pytest.mark.parametrize("top_k", [50, 7])
def test_sums_are_the_definitions(top_k: int, monkeypatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 85 * 4)
    monkeypatch.setattr(metrics, "TOP_K", top_k)
    drafters, draft_head, ids, target, head = make_case(31, 3, 0)
    sums = acceptance_sums(drafters, draft_head, ids, target, head)
    p = F.softmax(target @ head.weight[:85].T, dim=-1)
    for index, states in enumerate(drafters):
        q = torch.zeros_like(p)
        q[:, ids] = F.softmax(states @ draft_head.T, dim=-1)
        assert sums.matched[index] == (p.argmax(-1) == q.argmax(-1)).sum()
        assert sums.overlap[index].item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-10)
        cut_p, cut_q = keep_top_k(p, top_k), keep_top_k(q, top_k)
        assert sums.overlap_top_k[index].item() == pytest.approx(torch.minimum(cut_p, cut_q).sum().item(), abs=1e-10)
        restricted = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
        kl = (restricted * (restricted / q[:, ids]).log()).sum().item()
        assert sums.kl[index].item() == pytest.approx(kl, abs=1e-9)
    assert sums.positions.tolist() == [31] * 3
    assert sums.covered.tolist() == [torch.isin(p.argmax(-1), ids).sum()] * 3


def test_a_target_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    drafters, draft_head, ids, target, head = make_case(200, 1, 1)
    sums = acceptance_sums(drafters[:1], draft_head, ids, target, head)  # the drafter is the target itself
    assert sums.matched[0] == sums.covered[0] < sums.positions[0]


def test_pooling_weighs_positions_not_batches() -> None:
    metric = FillAcceptance(2)
    parts = [make_case(positions, 2, positions) for positions in (1, 40)]
    for drafters, draft_head, ids, target, head in parts:
        metric.update(acceptance_sums(drafters, draft_head, ids, target, head))
    figures = metric.compute()
    matched = sum(float(acceptance_sums(*part).matched[1]) for part in parts)
    assert figures["p_fill_2"] == pytest.approx(matched / 41)
    assert figures["loss"] == pytest.approx(sum(float(acceptance_sums(*part).kl[1]) for part in parts) / 41)
    assert figures["coverage"] == pytest.approx(sum(float(acceptance_sums(*part).covered[0]) for part in parts) / 41)
    assert figures["s0"] == pytest.approx(implied_figures([figures["p_fill_1"], figures["p_fill_2"]]).speedup)
    metric.reset()
    assert metric.compute() == {}


def test_outputs_that_are_no_numbers_stop_the_run() -> None:
    """They must not count as acceptance: the smaller of one and NaN is one in Python."""
    metric = FillAcceptance(2)
    drafters, draft_head, ids, target, head = make_case(5, 2, 0)
    drafters[1][3] = float("nan")
    metric.update(acceptance_sums(drafters, draft_head, ids, target, head))
    with pytest.raises(ValueError, match="training has diverged"):
        metric.compute()


def test_sums_of_16_bit_states_are_taken_in_float32() -> None:
    drafters, draft_head, ids, target, head = make_case(40, 1, 0)
    narrow = TargetHead(head.weight.bfloat16(), head.draft_rows.bfloat16(), head.num_tokens)
    given = [drafters[0].bfloat16()], draft_head.bfloat16(), ids, target.bfloat16()
    logits = (given[0][0] @ given[1].T).float()
    q = torch.zeros(40, 85).index_copy(1, ids, logits.softmax(-1))
    p = (given[3] @ narrow.weight[:85].T).float().softmax(-1)
    assert acceptance_sums(*given, narrow).overlap.item() == pytest.approx(torch.minimum(p, q).sum().item(), rel=1e-5)


def test_top_k_renormalises() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.3]])
    torch.testing.assert_close(keep_top_k(probs, 2), torch.tensor([[0.625, 0.0, 0.375]]))
    torch.testing.assert_close(keep_top_k(probs, 9), probs)
