"""Figures of design §9 out of counts: pooled totals, never means of ratios."""

import pytest

from spd_lightning.inference.stats import DecodeStats, Judgement


def test_figures_of_one_decode() -> None:
    verdicts = [Judgement(11, 1, True), Judgement(12, 2, True), Judgement(13, 3, False)]
    stats = DecodeStats(4, num_committed=3, num_cycles=6, judgements=verdicts)
    assert (stats.num_judged, stats.num_accepted) == (3, 2)
    assert stats.alpha == 0.5 and stats.speedup == 2.0 and stats.acceptance == pytest.approx(2 / 3)
    assert stats.acceptance_by_fill() == {1: (1, 1), 2: (1, 1), 3: (0, 1)}


def test_nothing_decoded_has_no_figures() -> None:
    stats = DecodeStats(4)
    assert stats.alpha is None and stats.acceptance is None and stats.speedup is None
    assert stats.acceptance_by_fill() == {}


def test_pooling_adds_totals() -> None:
    long = DecodeStats(4, 90, 100, [Judgement(i, 4, True) for i in range(90)])
    short = DecodeStats(4, 1, 10, [Judgement(0, 1, False)])
    pooled = DecodeStats.pooled([long, short, DecodeStats(4)])
    assert (pooled.num_committed, pooled.num_cycles, pooled.num_judged) == (91, 110, 91)
    assert pooled.alpha == pytest.approx(91 / 110) and pooled.acceptance == pytest.approx(90 / 91)
    with pytest.raises(ValueError, match=r"decodes of \[2, 4\] stages"):
        DecodeStats.pooled([long, DecodeStats(2)])
    with pytest.raises(ValueError, match="cannot pool"):
        DecodeStats.pooled([])
