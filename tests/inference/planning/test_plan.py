"""Plans of the published targets and of made-up ones: splits, drafters, which one is the best."""

import dataclasses
from dataclasses import dataclass, field

import pytest

from spd_lightning.inference.planning.costs import DrafterCosts, TargetCosts
from spd_lightning.inference.planning.model import EstimatedPieces, MeasuredPieces
from spd_lightning.inference.planning.plan import (
    Assumptions,
    DrafterOptions,
    EstimatedTimes,
    PieceTimes,
    Planner,
    best_by_split,
    best_plan,
)
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.model_size import TargetSize, resolve_stage_layers

ASSUMED = Assumptions(p=0.8, overhead_ms=0.1, link_ms=0.0, max_length=4096)
QUARTERS = DrafterOptions("quarters", "pre_step", 50_000)


def qwen_planner(costs: TargetCosts, options: DrafterOptions = QUARTERS) -> Planner:
    return Planner(costs, EstimatedTimes(costs, bandwidth=4000.0), options, ASSUMED)


def costs_of(num_layers: int, kind: str = "full_attention") -> TargetCosts:
    size = TargetSize(
        model_type="llama", layer_types=(kind,) * num_layers, hidden_size=8, intermediate_size=16, num_heads=2,
        num_kv_heads=1, head_dim=4, vocab_size=100, is_tied=False, linear=None, dtype="float32",
    )  # fmt: skip
    return TargetCosts(size, "auto", 10)


@dataclass
class FixedTimes:
    """A layer takes 1 ms; what else takes how long is said; drafters are remembered."""

    head_ms: float
    spec_layer_ms: float
    is_measured: bool = True
    stage_fixed_ms: float = 0.0
    explanation: str = "made up"
    asked: list[DrafterCosts] = field(default_factory=list)

    def layer_ms(self, layer_type: str) -> float:
        return 1.0

    def drafter_ms(self, drafter: DrafterCosts, fill: int) -> float:
        self.asked.append(drafter)
        return self.spec_layer_ms * drafter.size.num_layers


def fixed_planner(num_layers: int = 12, options: DrafterOptions = QUARTERS, **times) -> Planner:
    return Planner(costs_of(num_layers), FixedTimes(**times), options, ASSUMED)


def test_estimates_are_bytes_over_a_share_of_the_bandwidth(qwen_costs):
    costs = qwen_costs("4B")
    times = EstimatedTimes(costs, bandwidth=1000.0)
    assert isinstance(times, PieceTimes)
    assert times.head_ms == pytest.approx((248_320 + 1) * 2560 * 2 / 600e6)
    assert times.layer_ms("full_attention") == pytest.approx(costs.by_type["full_attention"].read_bytes / 600e6)
    layout = FeatureLayout.build(32, 8)
    drafter = QUARTERS.costs(costs, layout.stage_layers, 3)
    assert times.drafter_ms(drafter, 8) == pytest.approx(drafter.draft.read_bytes / 600e6)
    assert times.drafter_ms(drafter, 1) == pytest.approx(drafter.draft_at(1).read_bytes / 600e6)
    pieces = qwen_planner(costs).plan("uniform", (4,) * 8, 3).prediction.pieces
    by_fill = [pieces.drafter_ms_at(fill) for fill in range(1, 9)]
    assert by_fill == sorted(by_fill) and by_fill[-1] == pieces.drafter_ms > by_fill[0] > 0.2 * by_fill[-1]
    assert not times.is_measured
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="bandwidth="):
            EstimatedTimes(costs, bandwidth)


@pytest.mark.parametrize("name", ["4B", "9B"])
def test_the_head_of_qwen_takes_longer_than_a_whole_stage_of_eight(qwen_costs, name):
    planner = qwen_planner(qwen_costs(name))
    pieces = planner.plan("uniform", planner.splits(8)["uniform"], 3).prediction.pieces
    assert isinstance(pieces, EstimatedPieces)
    assert pieces.stage_ms[0] == pytest.approx(sum(planner.layers_ms[:4]))
    assert pieces.head_ms > max(pieces.stage_ms)
    pieces = planner.plan("uniform", planner.splits(4)["uniform"], 3).prediction.pieces
    assert pieces.head_ms < min(pieces.stage_ms)


@pytest.mark.parametrize("name, gain", [("4B", 1.15), ("9B", 1.15)])
def test_the_balanced_split_of_qwen_beats_the_uniform_one_at_eight_stages(qwen_costs, name, gain):
    planner = qwen_planner(qwen_costs(name))
    splits = planner.splits(8)
    assert splits == {"uniform": (4,) * 8, "balanced": (5, 5, 5, 4, 4, 4, 4, 1)}
    uniform, balanced = (planner.plan(split, layers, 2).prediction for split, layers in splits.items())
    assert uniform.slowest_stage == balanced.slowest_stage == 8
    assert uniform.cycle_ms > 1.35 * balanced.cycle_ms
    # While the pipeline fills, the last stage with the head rests, so less is gained on average.
    assert balanced.speedup / uniform.speedup == pytest.approx(gain, abs=0.05)


def test_qwen_4b_in_figures(qwen_costs):
    """By hand, from the sizes: 24 x 230.2 MB + 8 x 219.2 MB + 1271.4 MB over 2400 GB/s."""
    planner = qwen_planner(qwen_costs("4B"))
    prediction = planner.plan("balanced", (5, 5, 5, 4, 4, 4, 4, 1), 3).prediction
    assert prediction.pieces.ar_ms == pytest.approx((24 * 230.2 + 8 * 219.2 + 1271.4) / 2400, rel=1e-3)
    assert prediction.cycle_ms == pytest.approx((219.2 + 1271.4) / 2400 + 0.1, rel=1e-3)
    # Projections of 1, 1, 2, 2, 3, 3, 4, 4, 5 states (stages end at 5, 10, 15, 19, 23, 27, 31, 32), three layers, head.
    layer = 2 * 2560 * (4096 + 1024) + 3 * 2560 * 9216
    draft = 2 * ((1 + 1 + 2 + 2 + 3 + 3 + 4 + 5 + 5) * 2560**2 + 3 * layer + 50_000 * 2560) + 3 * 2 * 1024 * 1024 * 2
    assert prediction.pieces.drafter_ms == pytest.approx(draft / 2400e6, rel=1e-3)
    assert prediction.is_drafter_hidden
    # Filling, even the drafter's 7 rows take less than the five layers of the first stage: 0.2 x 7 such cycles for each
    # full one.
    seven_rows = draft - 2 * (5 + 5) * 2560**2
    assert prediction.pieces.drafter_ms_at(7) == pytest.approx(seven_rows / 2400e6, rel=1e-3)
    first_stage = (4 * 230.2 + 219.2) / 2400
    assert prediction.pieces.drafter_ms_at(7) < first_stage < prediction.pieces.drafter_ms
    mean = (0.621 + 0.2 * 7 * first_stage) / 2.4 + 0.1
    assert prediction.speedup == pytest.approx(3.562 / 2.4 / mean, rel=1e-3)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["4B", "9B"])
def test_training_balances_as_the_plan_does(qwen_costs, qwen_folder, name, num_stages):
    planned = qwen_planner(qwen_costs(name)).splits(num_stages)["balanced"]
    assert resolve_stage_layers(str(qwen_folder(name)), num_stages, "balanced") == planned


@pytest.mark.parametrize("name", ["4B", "9B"])
def test_no_split_of_qwen_is_faster_than_the_balanced_one(qwen_costs, name):
    planner = qwen_planner(qwen_costs(name))
    for num_stages in (4, 8):
        balanced = list(planner.splits(num_stages)["balanced"])
        slowest = max(planner.plan("balanced", tuple(balanced), 1).prediction.ranks_ms)
        for giver in range(num_stages):
            for taker in range(num_stages):
                moved = list(balanced)
                moved[giver] -= 1
                moved[taker] += 1
                if min(moved) >= 1:
                    other = planner.plan("balanced", tuple(moved), 1).prediction
                    assert max(other.ranks_ms) >= slowest


def test_balance_counts_the_head_in_the_unit_of_the_layers():
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=0.5)
    assert planner.splits(3) == {"uniform": (4, 4, 4), "balanced": (5, 5, 2)}
    prediction = planner.plan("balanced", (5, 5, 2), 1).prediction
    assert isinstance(prediction.pieces, MeasuredPieces)
    assert prediction.ranks_ms == (5.0, 5.0, 5.0)


def test_of_equally_fast_drafters_the_deepest_hidden_one_is_the_best():
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=1.5)
    plans = planner.plans([3], range(1, 9))
    balanced = best_plan(plan for plan in plans if plan.split == "balanced")
    assert balanced.num_spec_layers == 3  # 4.5 ms behind 5 ms; 4 would take 6
    assert balanced.prediction.is_drafter_hidden
    assert best_plan(plans) == balanced


def test_a_post_step_drafter_of_first_stage_states_waits_for_the_first_stage():
    planner = fixed_planner(12, DrafterOptions((4,), "post_step", 50), head_ms=0.0, spec_layer_ms=1.0)
    assert planner.plan("uniform", (4, 4, 4), 1).prediction.read_stages == (1,)
    boundaries = fixed_planner(12, DrafterOptions("auto", "post_step", 50), head_ms=0.0, spec_layer_ms=1.0)
    assert boundaries.plan("uniform", (4, 4, 4), 1).prediction.read_stages == (1, 2, 3)


def test_post_step_the_shallowest_drafter_is_the_best():
    options = dataclasses.replace(QUARTERS, schedule="post_step")
    assert (
        best_plan(
            fixed_planner(options=options, head_ms=3.0, spec_layer_ms=1.5).plans([3], range(1, 9))
        ).num_spec_layers
        == 1
    )


def test_an_even_split_that_is_as_fast_is_preferred_by_its_name():
    best = best_plan(fixed_planner(head_ms=0.0, spec_layer_ms=0.0).plans([3], [2]))
    assert (best.split, best.stage_layers) == ("uniform", (4, 4, 4))


def test_every_number_of_stages_split_and_depth_is_considered_and_the_best_of_each_split_shown():
    plans = fixed_planner(head_ms=3.0, spec_layer_ms=1.5).plans([2, 3, 6], [1, 2, 4])
    assert len(plans) == 3 * 2 * 3
    shown = best_by_split(plans)
    assert [(plan.num_stages, plan.split) for plan in shown] == [
        (2, "uniform"), (2, "balanced"), (3, "uniform"), (3, "balanced"), (6, "uniform"), (6, "balanced")
    ]  # fmt: skip
    for plan in shown:
        rivals = [p.prediction.speedup for p in plans if (p.num_stages, p.split) == (plan.num_stages, plan.split)]
        assert plan.prediction.speedup == max(rivals)


def test_what_stages_share_is_in_each_of_them_and_once_in_plain_decoding():
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=0.1, stage_fixed_ms=0.25)
    pieces = planner.plan("uniform", (4, 4, 4), 1).prediction.pieces
    assert pieces.stage_ms == (4.25, 4.25, 4.25)
    assert pieces.ar_ms == 12 + 3 + 0.25


@pytest.mark.parametrize(
    "anchors, read",
    [("quarters", (0, 3, 6, 9, 11)), ("auto", (0, 5, 10, 11)), ((0, 7), (0, 7))],
)
def test_anchors_are_quarters_boundaries_or_a_list(anchors, read):
    options = dataclasses.replace(QUARTERS, anchors=anchors)
    assert options.costs(costs_of(12), (5, 5, 2), 1).layout.anchors == read
    assert dataclasses.replace(QUARTERS, anchors="quarters").costs(costs_of(2), (1, 1), 1).layout.anchors == (0, 1)


def test_drafters_have_the_targets_sizes_unless_others_are_given():
    target = costs_of(12)
    size = QUARTERS.costs(target, (4, 4, 4), 2).size
    assert (size.query_width, size.kv_width, size.intermediate_size, size.num_gains) == (8, 4, 16, 5)
    own = DrafterOptions(
        (0, 4), "pre_step", 30, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=5, feature_norm="none"
    )
    size = own.costs(target, (4, 4, 4), 2).size
    assert (size.query_width, size.kv_width, size.intermediate_size, size.num_gains) == (24, 12, 5, 0)
    assert (size.draft_vocab_size, size.num_layers) == (30, 2)
    assert own.costs(dataclasses.replace(target, dtype="bfloat16"), (4, 4, 4), 2).num_bytes == 2


def test_a_plan_as_json_has_all_figures():
    plan = fixed_planner(head_ms=3.0, spec_layer_ms=1.5).plan("balanced", (5, 5, 2), 2)
    written = plan.to_json()
    assert written["stage_layers"] == [5, 5, 2]
    assert written["stage_ms"] == [5.0, 5.0, 5.0]
    assert (written["drafter_ms"], written["slack_ms"], written["is_drafter_hidden"]) == (3.0, 2.0, True)
    assert written["speedup"] == plan.prediction.speedup
    assert list(written["overhead_budget_ms"]) == ["2", "2.5", "3"]
    assert [rank["total_bytes"] for rank in written["ranks"]] == [rank.total_bytes for rank in plan.memory]
