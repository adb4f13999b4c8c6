"""The table and the JSON say what is estimated, measured and assumed, and hold the proposal."""

import json
import re

import pytest

from spd_lightning.inference.planning.plan import best_by_split
from spd_lightning.inference.planning.report import PlanReport
from tests.inference.planning.test_plan import fixed_planner, qwen_planner


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"\*? +\d+ (uniform|balanced|drafter's) ", line)]


@pytest.fixture(scope="module")
def report(qwen_costs) -> PlanReport:
    planner = qwen_planner(qwen_costs("4B"))
    return PlanReport("some/target", planner, planner.plans([4, 8], range(1, 5)), None)


def test_the_head_is_put_into_proportion(report):
    target = report.planner.target
    assert report.head_share == pytest.approx(0.149, abs=0.001)
    assert report.head_share == target.head.read_bytes / sum(
        c.read_bytes for c in (*target.layers, target.head, target.embedding)
    )
    assert report.head_exceeds_stage_at == [8]
    assert (
        "15% of what a token reads, as long as 5.6 layers: longer than a whole stage of the uniform split at n = 8"
        in " ".join(report.text().split())
    )


def test_the_head_exceeds_a_split_only_when_it_is_longer_than_its_longest_stage():
    planner = fixed_planner(head_ms=2.5, spec_layer_ms=1.5)  # 12 layers: 3 3 2 2 2 and 2 2 2 2 2 2
    assert PlanReport("t", planner, planner.plans([4, 5, 6], [1]), None).head_exceeds_stage_at == [6]


def test_the_table_has_a_row_for_each_number_of_stages_and_split_and_marks_the_best(report):
    rows = rows_of(report.text())
    assert len(rows) == len(best_by_split(report.plans)) == 4
    [marked] = [row for row in rows if row.startswith("*")]
    assert marked.split()[1:3] == [str(report.best.num_stages), report.best.split]
    assert f"{report.best.prediction.speedup:.2f}x" in marked
    assert "5x3 4x4 1x1" in rows[3]


def test_estimates_and_measurements_are_called_what_they_are(report):
    assert "times: ESTIMATED: bytes read / (0.6 x 4,000 GB/s)" in report.text()
    assert report.to_json()["times"] == "estimated"
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=1.5)
    measured = PlanReport("t", planner, planner.plans([3], [1]), None)
    assert measured.to_json()["times"] == "measured"
    assert "times: made up" in measured.text()
    for words in ("acceptance p = 0.8", "0.1 ms of overhead a cycle", "0 ms a link", "drafting pre_step"):
        assert words in " ".join(report.text().split())


def test_the_proposal_names_what_training_takes_and_the_memory_of_each_rank(report):
    text = report.text()
    best = report.best
    assert f"num_stages: {best.num_stages}, stage_layers: {list(best.stage_layers)}, num_spec_layers: " in text
    lines = text.splitlines()
    [first] = [index for index, line in enumerate(lines) if "memory of each rank for 4,096 tokens" in line]
    roles = [line.split("  ")[2].strip() for line in lines[first + 1 :]]
    assert roles == [*(f"stage {number}" for number in range(1, best.num_stages + 1)), "drafter"]
    assert f"{best.memory[-1].total_bytes / 1e9:.2f} GB" in lines[-1]


def test_a_cycle_that_the_head_bounds_is_said_to_be():
    bound = fixed_planner(head_ms=9.0, spec_layer_ms=0.1)
    assert "the head bounds its cycle" in PlanReport("t", bound, bound.plans([3], [1]), None).text()
    free = fixed_planner(head_ms=1.0, spec_layer_ms=0.1)
    assert "the head bounds its cycle" not in PlanReport("t", free, free.plans([3], [1]), None).text()


def test_budgets_that_cannot_be_had_are_dashes():
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=1.5)
    report = PlanReport("t", planner, planner.plans([3], [1]), None)
    uniform, balanced = [row.split() for row in rows_of(report.text())]
    # Alpha is 1 / 1.4, plain decoding 15 ms: 10.714 / 2 - 5 for the balanced split, 7 for the uniform one.
    assert uniform[-3:] == ["-", "-", "-"]
    assert balanced[-3:] == ["0.357", "-", "-"]


def test_a_drafter_of_ones_own_comes_first():
    planner = fixed_planner(head_ms=3.0, spec_layer_ms=1.5)
    own = planner.plan("drafter's", (6, 4, 2), 2)
    report = PlanReport("t", planner, planner.plans([3], [1]), own)
    rows = rows_of(report.text())
    assert len(rows) == 3
    assert "drafter's 6x1 4x1 2x1" in rows[0]
    assert report.to_json()["drafter"]["stage_layers"] == [6, 4, 2]


def test_json_holds_everything(report):
    written = json.loads(json.dumps(report.to_json()))
    assert len(written["plans"]) == 2 * 2 * 4
    assert written["best"] == report.best.to_json()
    assert written["drafter"] is None
    assert (written["num_layers"], written["dtype"]) == (32, "bfloat16")
    assert written["layers"]["linear_attention"]["count"] == 24
    assert written["layers"]["full_attention"]["ms"] == report.planner.layer_ms["full_attention"]
    assert written["head"]["share"] == report.head_share
    assert written["head"]["exceeds_stage_at"] == [8]
    assert written["assumed"] == {
        "p": 0.8, "overhead_ms": 0.1, "link_ms": 0.0, "max_length": 4096, "length": 1024, "schedule": "pre_step"
    }  # fmt: skip
    assert written["ar"]["ms"] == pytest.approx(3.562, abs=0.001)


def test_the_text_fits_a_terminal(report):
    assert max(map(len, report.text().splitlines())) <= 130
