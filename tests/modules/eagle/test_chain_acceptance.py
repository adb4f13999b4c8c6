"""Acceptance by step of a chain: which positions count, what is pooled, and what it implies."""

import pytest
import torch
import torch.nn.functional as F

from spd_lightning.modules.eagle.chain_acceptance import (
    ChainAcceptance,
    chain_positions,
    draft_chances,
    tokens_per_round,
)
from spd_lightning.modules.losses import TargetHead


def test_tokens_per_round_by_hand() -> None:
    assert tokens_per_round([0.5], 3) == 1 + 0.5 + 0.25 + 0.125
    assert tokens_per_round([0.8, 0.5], 3) == pytest.approx(1 + 0.8 + 0.4 + 0.2)
    assert tokens_per_round([0.0, 1.0], 7) == 1.0
    assert tokens_per_round([1.0, 1.0], 7) == 8.0
    assert tokens_per_round([0.8, 0.5, 0.1], 1) == 1.8


def test_chains_are_those_that_decoding_makes() -> None:
    """Tokens 3 4 5 6 are an answer's, so 3 comes from the prefill and the first chain, of base 2, predicts 4 5 6."""
    supervised = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    bases = chain_positions(supervised, 4)
    assert [chosen.shape[1] for chosen in bases] == [7, 6, 5, 4]
    assert [chosen[0].nonzero().flatten().tolist() for chosen in bases] == [[2, 3, 4], [2, 3], [2], []]


def test_a_chain_does_not_run_over_a_user_turn() -> None:
    supervised = torch.tensor([[1, 1, 0, 1, 1, 1, 0]], dtype=torch.bool)  # answers 1 2 and 4 5 6
    bases = chain_positions(supervised, 3)
    assert [chosen[0].nonzero().flatten().tolist() for chosen in bases] == [[0, 3, 4], [3], []]


def test_a_step_counts_where_all_steps_before_it_were_accepted() -> None:
    metric = ChainAcceptance(2)
    bases = [torch.tensor([[True, True, True, False]]), torch.tensor([[True, True, False]])]
    chances = [
        torch.tensor([[1.0, 0.0, 1.0], [0.5, 0.2, 0.9], [0.5, 0.2, 0.9]]).double(),
        torch.tensor([[1.0, 1.0], [0.4, 0.6], [0.4, 0.6]]).double(),
    ]
    metric.update(bases, chances, torch.tensor(3.0).double(), torch.tensor(2.0).double())
    figures = metric.compute()
    assert figures["p_step_1"] == pytest.approx(2 / 3)
    assert figures["p_step_2"] == 1.0  # of two second steps one came after an accepted draft, and it was right
    assert figures["p_t1_step_1"] == pytest.approx(1.6 / 3)
    assert figures["p_t1_step_2"] == pytest.approx((0.5 * 0.4 + 0.2 * 0.6) / 0.7)
    assert figures["loss"] == 1.0 and figures["coverage"] == pytest.approx(2 / 3)
    assert figures["s0_k3"] == pytest.approx(1 + 2 / 3 * 3)
    metric.update(bases, chances, torch.tensor(3.0).double(), torch.tensor(2.0).double())
    assert metric.compute() == pytest.approx(figures)


def test_nothing_measured_is_nothing_and_divergence_is_said() -> None:
    metric = ChainAcceptance(2)
    assert metric.compute() == {}
    one = [torch.ones(1, 1, dtype=torch.bool)], [torch.ones(3, 1).double()]
    metric.update(*one, torch.tensor(float("nan")).double(), torch.tensor(1.0).double())
    with pytest.raises(ValueError, match="diverged"):
        metric.compute()


def test_chances_are_those_of_the_laws(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    head_weight = torch.randn(12, 8, dtype=torch.float64, generator=generator)
    ids = torch.tensor([0, 2, 3, 7, 9])
    draft_head = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    ours, theirs = torch.randn(2, 30, 8, dtype=torch.float64, generator=generator)
    head = TargetHead(head_weight, head_weight[ids], 10)
    monkeypatch.setattr("spd_lightning.modules.eagle.chain_acceptance.chunk_size", lambda _: 7)
    chances, kl, covered = draft_chances(ours, draft_head, ids, theirs, head)
    p, q = (theirs @ head_weight[:10].T).softmax(-1), torch.zeros(30, 10).double()
    q[:, ids] = (ours @ draft_head.T).softmax(-1)
    assert torch.equal(chances[0], (p.argmax(-1) == q.argmax(-1)).double())
    torch.testing.assert_close(chances[1], torch.minimum(p, q).sum(-1))
    torch.testing.assert_close(chances[2], chances[1])  # there are fewer than 50 tokens
    inside = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    torch.testing.assert_close(kl, F.kl_div(q[:, ids].log(), inside, reduction="sum"))
    assert float(covered) == float(torch.isin(p.argmax(-1), ids).sum())
