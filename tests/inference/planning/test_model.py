"""The cycle's formula: worked cases, the published cycles, what is refused, memory by rank."""

import random

import pytest

from spd_lightning.inference.planning.costs import DrafterCosts, TargetCosts
from spd_lightning.inference.planning.model import EstimatedPieces, MeasuredPieces, memory_by_rank, predict
from spd_lightning.inference.schedule import PipelineSchedule, Verdict
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.model_size import DrafterSize, read_target_size
from spd_lightning.modules.tiny_target import tiny_config

PIECES = MeasuredPieces(stage_ms=(3.0, 4.0, 2.0), head_ms=3.0, drafter_ms=4.5)


def test_the_slowest_of_stages_head_and_drafter_makes_the_cycle():
    prediction = predict(PIECES, p=0.5, overhead_ms=0.25, link_ms=0.5)
    assert prediction.ranks_ms == (3.0, 4.0, 5.0)
    assert (prediction.slowest_stage, prediction.slack_ms, prediction.is_drafter_hidden) == (3, 0.5, True)
    assert prediction.cycle_ms == 5.0 + 0.5 + 0.25
    assert prediction.alpha == 1 / (1 + 0.5 * 2)
    # Half of the cycles refill: at fill 1 and 2 the drafter, with 4.5, is the slowest.
    assert prediction.mean_cycle_ms == pytest.approx((5.0 + 4.5) / 2 + 0.5 + 0.25)
    assert prediction.tokens_per_second == pytest.approx(1000 * 0.5 / 5.5)
    assert prediction.tokens_per_second_per_device == pytest.approx(prediction.tokens_per_second / 4)
    assert PIECES.ar_ms == 12.0
    assert prediction.speedup == pytest.approx(0.5 * 12 / 5.5)


@pytest.mark.parametrize("schedule", ["pre_step", "post_step"])
@pytest.mark.parametrize("p", [0.0, 0.6, 0.9, 1.0])
def test_tokens_per_second_are_those_of_a_simulated_decode(p, schedule):
    """Cycle by cycle with the decoder's own schedule: as many stages run as tokens are in flight."""
    pieces = MeasuredPieces(stage_ms=(2.0, 5.0, 3.0, 1.0), head_ms=7.0, drafter_ms=4.0)
    prediction = predict(pieces, p, overhead_ms=0.5, schedule=schedule)
    state, draws, milliseconds = PipelineSchedule(4, [0], 0), random.Random(0), 0.0
    for _ in range(40_000):
        plan = state.plan()
        slowest = max((2.0, 5.0, 3.0, 8.0)[: plan.fill])
        milliseconds += 0.5 + (max(slowest, 4.0) if schedule == "pre_step" else slowest + 4.0)
        verdict = None
        if plan.judged is not None:
            verdict = Verdict(True, state.tokens[plan.judged]) if draws.random() < p else Verdict(False, 0)
        state.advance(0, verdict)
    num_committed = state.num_verified - 2
    assert num_committed / state.num_cycles == pytest.approx(prediction.alpha, rel=0.02)
    assert milliseconds / state.num_cycles == pytest.approx(prediction.mean_cycle_ms, rel=0.01)
    assert 1000 * num_committed / milliseconds == pytest.approx(prediction.tokens_per_second, rel=0.02)


def test_the_mean_cycle_is_that_of_the_full_pipeline_where_the_first_stage_or_the_drafter_is_the_slowest():
    assert predict(MeasuredPieces((4.0, 4.0, 2.0), 1.0, 3.0), p=0.3).mean_cycle_ms == pytest.approx(4.0)
    assert predict(MeasuredPieces((1.0, 2.0, 3.0), 1.0, 6.0), p=0.3).mean_cycle_ms == pytest.approx(6.0)


@pytest.mark.parametrize("drafter_ms, full, always", [(3.0, True, True), (3.1, True, False), (5.1, False, False)])
def test_a_drafter_can_hide_behind_the_full_pipeline_only(drafter_ms, full, always):
    prediction = predict(MeasuredPieces((3.0, 4.0, 2.0), 3.0, drafter_ms), p=0.5)
    assert (prediction.is_drafter_hidden, prediction.is_drafter_always_hidden) == (full, always)


def test_a_filling_pipeline_drafts_faster():
    """Drafts of 1, 3 and 4.5 ms beside stages of 3, 4 and 5 ms: hidden at every fill level."""
    pieces = MeasuredPieces((3.0, 4.0, 2.0), 3.0, 4.5, filling_drafter_ms=(1.0, 3.0))
    prediction = predict(pieces, p=0.5)
    assert [prediction.work_ms(fill) for fill in (1, 2, 3)] == [3.0, 4.0, 5.0]
    assert prediction.is_drafter_always_hidden
    assert not predict(
        MeasuredPieces((3.0, 4.0, 2.0), 3.0, 4.5, filling_drafter_ms=(1.0, 4.1)), p=0.5
    ).is_drafter_always_hidden
    post = predict(pieces, p=0.5, schedule="post_step")
    assert [post.work_ms(fill) for fill in (1, 2, 3)] == [3.0 + 1.0, 4.0 + 3.0, 5.0 + 4.5]


def test_stages_wait_for_a_drafter_that_takes_longer():
    prediction = predict(MeasuredPieces((3.0, 4.0, 2.0), 3.0, 6.0), p=1.0)
    assert (prediction.cycle_ms, prediction.slack_ms, prediction.is_drafter_hidden) == (6.0, -1.0, False)
    assert predict(MeasuredPieces((3.0, 4.0, 2.0), 3.0, 5.0), p=1.0).is_drafter_hidden


def test_post_step_drafting_adds_to_the_slowest_stage_and_waits_for_one_more_message():
    prediction = predict(PIECES, p=0.5, overhead_ms=0.25, link_ms=0.5, schedule="post_step")
    assert prediction.cycle_ms == 5.0 + 4.5 + 2 * 0.5 + 0.25
    assert prediction.mean_cycle_ms == pytest.approx((5.0 + 4.5 + 0.5 * (3.0 + 4.5 + 4.0 + 4.5)) / 2 + 1.25)
    assert not prediction.is_drafter_hidden


def test_post_step_drafting_waits_only_for_the_stages_that_it_reads():
    """PPSD reads the first of three stages, which take 3, 4 and 5 ms."""
    prediction = predict(PIECES, p=0.5, schedule="post_step", read_stages=(1,))
    assert [prediction.work_ms(fill) for fill in (1, 2, 3)] == [3.0 + 4.5] * 3
    assert predict(PIECES, p=0.5, schedule="post_step", read_stages=(2,)).work_ms(1) == 4.5


def test_a_rank_with_all_layers_pays_for_what_layers_share_once():
    pieces = MeasuredPieces(stage_ms=(3.0, 4.0, 2.0), head_ms=3.0, drafter_ms=1.0, stage_fixed_ms=0.5)
    assert pieces.ar_ms == 12.0 - 2 * 0.5
    assert predict(pieces, p=1.0).cycle_ms == 5.0


@pytest.mark.parametrize("speedup", [1.0, 1.1, 2.0])
def test_the_budget_is_the_overhead_at_which_the_speedup_is_reached(speedup):
    budget = predict(PIECES, p=0.9).overhead_budget_ms(speedup)
    assert budget is not None
    assert predict(PIECES, p=0.9, overhead_ms=budget).speedup == pytest.approx(speedup)
    assert predict(PIECES, p=0.9, overhead_ms=7.0, link_ms=1.0).overhead_budget_ms(speedup) == budget


def test_there_is_no_budget_for_a_speedup_that_free_overhead_does_not_reach():
    prediction = predict(MeasuredPieces((3.0, 4.0, 2.0), 3.0, 5.0), p=0.9)  # 12 ms against 5 ms, alpha 1 / 1.2
    assert prediction.speedup == pytest.approx(2.0)
    assert prediction.overhead_budget_ms(1.99) == pytest.approx(0.025, abs=0.001)
    assert prediction.overhead_budget_ms(2.01) is None


@pytest.mark.parametrize("num_stages", [1, 4, 16])
def test_without_costs_of_drafting_the_speedup_is_s0_of_the_design(num_stages):
    prediction = predict(EstimatedPieces((1.0,) * num_stages, 0.0, 0.0), p=0.8)
    assert prediction.speedup == pytest.approx(num_stages / (1 + 0.2 * (num_stages - 1)))
    assert prediction.speedup <= 1 / (1 - 0.8)


PUBLISHED = [  # stages, drafter layers, what the constants give, what the published tables imply (ms)
    (4, 4, 8.29, 8.25),
    (8, 3, 4.75, 4.75),
    (8, 2, 4.75, 4.77),
    (8, 4, 5.42, 5.16),
    (16, 2, 3.96, 4.59),
]


def published_cycle_ms(num_stages: int, num_spec_layers: int, link_ms: float = 0.0) -> float:
    """Qwen3.5-4B on H20, eager: 28.4 ms for the target, 1.3 + 0.73 L_s ms for a draft, 1.2 ms of overhead."""
    pieces = MeasuredPieces((28.4 / num_stages,) * num_stages, head_ms=0.0, drafter_ms=1.3 + 0.73 * num_spec_layers)
    prediction = predict(pieces, p=0.8, overhead_ms=1.2, link_ms=link_ms)
    assert prediction.mean_cycle_ms == pytest.approx(prediction.cycle_ms)  # all stages are alike
    return prediction.cycle_ms


@pytest.mark.parametrize("num_stages, num_spec_layers, modelled, _implied", PUBLISHED)
def test_published_constants_give_the_cycles_of_the_design(num_stages, num_spec_layers, modelled, _implied):
    assert published_cycle_ms(num_stages, num_spec_layers) == pytest.approx(modelled, abs=0.011)


@pytest.mark.parametrize("num_stages, num_spec_layers, _modelled, implied", PUBLISHED[:4])
def test_published_cycles_of_4_and_8_stages_are_met_within_10_percent(num_stages, num_spec_layers, _modelled, implied):
    assert published_cycle_ms(num_stages, num_spec_layers) == pytest.approx(implied, rel=0.10)
    assert published_cycle_ms(num_stages, num_spec_layers) == pytest.approx(implied, rel=0.06)  # what the docs say


def test_published_cycle_of_16_stages_is_longer_by_the_crossing_of_nodes():
    """17 ranks do not fit on a node of 8 or 16; the constants, without such a link, are 14% too fast."""
    assert published_cycle_ms(16, 2) / 4.59 == pytest.approx(0.86, abs=0.005)
    assert published_cycle_ms(16, 2, link_ms=0.63) == pytest.approx(4.59, abs=0.01)


@pytest.mark.parametrize(
    "settings, words",
    [({"p": 1.1}, "p=1.1"), ({"p": -0.1}, "p=-0.1"), ({"p": float("nan")}, "p=nan"),
     ({"p": 0.5, "overhead_ms": -1.0}, "overhead_ms=-1.0"), ({"p": 0.5, "link_ms": float("nan")}, "link_ms=nan")],
)  # fmt: skip
def test_impossible_assumptions_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        predict(PIECES, **settings)


@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_holds_its_layers_and_its_end_of_the_pipeline(tmp_path, tied):
    tiny_config("qwen3_5", num_layers=8, tie_word_embeddings=tied).save_pretrained(tmp_path)
    target = TargetCosts(read_target_size(str(tmp_path)), "float32", 10)
    layout = FeatureLayout.build(8, 3, stage_layers=[3, 4, 1])
    drafter = DrafterCosts(DrafterSize.of(target.size, layout, 2, 40), layout, 4, 10)
    *stages, draft = memory_by_rank(target, drafter, max_length=100)
    layers = [cost.weight_bytes for cost in target.layers]
    head, embedding = target.head.weight_bytes, target.embedding.weight_bytes
    assert [rank.rank for rank in (*stages, draft)] == [0, 1, 2, 3]
    assert [rank.weight_bytes for rank in stages] == [
        sum(layers[:3]) + embedding, sum(layers[3:7]), layers[7] + head
    ]  # fmt: skip
    kinds = target.size.layer_types
    assert [rank.cache_bytes for rank in stages] == [
        target.cache_bytes(kinds[:3], 103, 3), target.cache_bytes(kinds[3:7], 103, 2), target.cache_bytes(kinds[7:], 103, 1)
    ]  # fmt: skip
    assert draft.weight_bytes == drafter.draft.weight_bytes + embedding
    assert draft.total_bytes == draft.weight_bytes + drafter.cache_bytes(103)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_with_both_ends_holds_a_tied_head_once(tmp_path, tied):
    tiny_config("llama", num_layers=4, tie_word_embeddings=tied).save_pretrained(tmp_path)
    target = TargetCosts(read_target_size(str(tmp_path)), "float32", 10)
    layout = FeatureLayout.build(4, 1)
    drafter = DrafterCosts(DrafterSize.of(target.size, layout, 1, 40), layout, 4, 10)
    assert memory_by_rank(target, drafter, 100)[0].weight_bytes == target.token.weight_bytes
