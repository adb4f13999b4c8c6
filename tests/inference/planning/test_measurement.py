"""What is timed: modules of the target's sizes, with caches of the asked length; times are whole and kept."""

import time

import pytest
import torch

from spd_lightning.inference.planning import measurement
from spd_lightning.inference.planning.costs import DrafterCosts, TargetCosts
from spd_lightning.inference.planning.measurement import MeasuredTimes, drafter_config
from spd_lightning.inference.planning.plan import DrafterOptions, PieceTimes
from spd_lightning.inference.stage import Stage
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.model_size import read_target_size
from spd_lightning.modules.tiny_target import tiny_config
from tests.modules.conftest import FAMILIES

LENGTH = 6


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch):
    monkeypatch.setattr(measurement, "WARM_UP", 1)
    monkeypatch.setattr(measurement, "REPEATS", 3)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request) -> str:
    return request.param


def make_times(folder, family: str, dtype: str = "float32") -> MeasuredTimes:
    tiny_config(family, num_layers=8, hidden_size=64).save_pretrained(folder)
    target = TargetCosts(read_target_size(str(folder)), dtype, LENGTH)
    return MeasuredTimes(str(folder), target, "cpu")


def drafter_for(times: MeasuredTimes, num_spec_layers: int, schedule="pre_step", anchors=(0, 3, 7)) -> DrafterCosts:
    return DrafterOptions(anchors, schedule, 40).costs(times.target, (3, 3, 2), num_spec_layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_piece_of_every_family_is_timed(tmp_path, family, dtype):
    times = make_times(tmp_path, family, dtype)
    assert isinstance(times, PieceTimes)
    assert times.is_measured
    assert "MEASURED" in times.explanation
    pieces = [times.head_ms, times.stage_fixed_ms, times.drafter_ms(drafter_for(times, 2), 4)]
    pieces += [times.layer_ms(layer_type) for layer_type in times.target.by_type]
    assert all(milliseconds > 0 for milliseconds in pieces)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_timed_have_the_targets_sizes_and_types(tmp_path, family, monkeypatch, dtype):
    runs = []
    run = Stage.run

    def recorded(stage, entering, position):
        runs.append((stage, tuple(entering.shape), position))
        return run(stage, entering, position)

    monkeypatch.setattr(Stage, "run", recorded)
    times = make_times(tmp_path, family, dtype)
    for layer_type, cost in times.target.by_type.items():
        runs.clear()
        times.layer_ms(layer_type)
        stage = runs[0][0]
        assert stage.modules.layer_types == (layer_type,) * times.target.size.layer_types.count(layer_type)
        for layer in stage.modules.layers:
            weights = list(layer.parameters())
            assert sum(w.numel() * w.element_size() for w in weights) == cost.weight_bytes
            assert {weight.dtype for weight in weights} == {getattr(torch, dtype)}
            assert all(bool(weight.isfinite().all()) and bool((weight != 0).any()) for weight in weights)
        assert [(shape, position) for _, shape, position in runs] == [
            ((1, LENGTH, 64), 0), *(((1, 1, 64), LENGTH + index) for index in range(4))
        ]  # fmt: skip


def test_few_layers_are_enough_once_they_outgrow_the_processors_caches(tmp_path, monkeypatch):
    times = make_times(tmp_path, "llama")
    monkeypatch.setattr(measurement, "CACHE_BYTES", 2 * times.target.layers[0].weight_bytes + 1)
    counts = []
    make = times._stage_modules
    monkeypatch.setattr(times, "_stage_modules", lambda kind, count: counts.append(count) or make(kind, count))
    times.layer_ms("full_attention")
    assert counts == [3]


def test_a_layers_time_is_its_share_of_the_stage_without_what_layers_share(tmp_path, monkeypatch):
    times = make_times(tmp_path, "llama")
    times.stage_fixed_ms = 4.0
    monkeypatch.setattr(times, "_median_ms", lambda run: 20.0)
    assert times.layer_ms("full_attention") == (20.0 - 4.0) / 8


@pytest.mark.parametrize(
    ("fill", "schedule", "num_rows"), [(3, "pre_step", 4), (3, "post_step", 3), (1, "pre_step", 1)]
)
def test_drafts_are_timed_at_the_asked_fill_and_context(tmp_path, monkeypatch, fill, schedule, num_rows):
    times = make_times(tmp_path, "llama")
    blocks = []
    run_layers = PipelineDraftModule.run_layers

    def recorded(module, hidden, position_ids, attends, num_query_rows):
        blocks.append((len(module.layers), hidden.shape[2], int(position_ids[0, 0])))
        return run_layers(module, hidden, position_ids, attends, num_query_rows)

    monkeypatch.setattr(PipelineDraftModule, "run_layers", recorded)
    times.drafter_ms(drafter_for(times, 2, schedule), fill)
    # A full pipeline: each draft takes a row into the cache, so the next one begins a position later.
    moves = 1 if fill == 3 else 0
    one = [(1, LENGTH, 0), *((1, num_rows, LENGTH + moves * index) for index in range(4))]
    assert blocks == one + [(4, *block[1:]) for block in one]


def test_each_drafter_layer_more_costs_the_same(tmp_path, monkeypatch):
    times = make_times(tmp_path, "llama")
    asked = []

    def draft_ms(drafter: DrafterCosts, fill: int) -> float:
        asked.append(drafter.size.num_layers)
        return 2.0 + 0.5 * drafter.size.num_layers

    monkeypatch.setattr(times, "_draft_ms", draft_ms)
    assert [times.drafter_ms(drafter_for(times, layers), 3) for layers in (1, 2, 3, 8)] == [2.5, 3.0, 3.5, 6.0]
    assert asked == [1, 4]  # once for all depths
    times.drafter_ms(drafter_for(times, 2, anchors=(0, 4, 7)), 3)  # the same sizes, but one row with less to project
    assert asked == [1, 4, 1, 4]


def test_between_one_token_and_a_full_pipeline_times_follow_what_is_read(tmp_path, monkeypatch):
    times = make_times(tmp_path, "llama")
    monkeypatch.setattr(times, "_draft_ms", lambda drafter, fill: {1: 2.0, 3: 5.0}[fill])
    drafter = drafter_for(times, 1)
    one, two, full = (drafter.draft_at(fill).read_bytes for fill in (1, 2, 3))
    assert [times.drafter_ms(drafter, fill) for fill in (1, 3)] == [2.0, 5.0]
    assert times.drafter_ms(drafter, 2) == pytest.approx(2.0 + 3.0 * (two - one) / (full - one))
    assert 2.0 < times.drafter_ms(drafter, 2) < 5.0


def test_the_drafter_that_is_timed_has_the_planned_sizes(tmp_path):
    times = make_times(tmp_path, "qwen3_5")
    for anchors in ((0, 3, 7), (0, 7), "auto"):
        drafter = drafter_for(times, 3, anchors=anchors)
        module = PipelineDraftModule(drafter_config(drafter))
        assert sum(parameter.numel() for parameter in module.parameters()) == drafter.size.num_parameters


def test_the_median_leaves_out_warming_up(tmp_path, monkeypatch):
    times = make_times(tmp_path, "llama")
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    seconds = [9.0, 0.001, 0.003, 0.005]

    def run(index: int) -> None:
        now[0] += seconds[index]

    assert times._median_ms(run) == pytest.approx(3.0)
