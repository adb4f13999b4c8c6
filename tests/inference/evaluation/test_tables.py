"""Tables say what the groups say, keep kinds of figures apart, and stand straight in a terminal."""

import json
from dataclasses import asdict

import pytest

from spd_lightning.inference.evaluation.summary import summarize
from spd_lightning.inference.evaluation.tables import (
    Table,
    logged_figures,
    logged_tables,
    make_tables,
    method_name,
    shown_groups,
    to_markdown,
)
from tests.inference.evaluation.synthetic import drafted, evaluation, sample

MEASURED, SIMULATED = "Speed, measured by wall clock", "Theoretical speedup, simulated"


@pytest.fixture(scope="module")
def summary() -> dict:
    return json.loads(json.dumps(evaluation(num_prompts=3, num_tokens=40)[0]))


def tables_of(*samples) -> dict[str, Table]:
    return {table.title: table for table in make_tables([asdict(group) for group in summarize(samples)])}


def cells(table: Table, row: int = -1) -> dict[str, str]:
    return dict(zip(table.columns, table.rows[row], strict=True))


def test_figures_of_a_run_in_its_tables() -> None:
    tables = tables_of(
        sample(num_committed=1500, decode_seconds=100.0, is_correct=False),
        drafted([True, False, True, True], decode_seconds=0.5, num_devices=5, schedule="post_step", is_correct=True),
    )
    run = {"task": "gsm8k", "method": "spd n4", "T": "0"}
    assert cells(tables["Acceptance, counted"]) == run | {
        "prompts": "1", "N": "4", "K": "10", "judged": "4", "p": "0.750", "alpha": "0.400"
    }  # fmt: skip
    assert cells(tables[MEASURED], 0)["N"] == "1,500" and cells(tables[MEASURED], 0)["x ar"] == "-"
    assert cells(tables[MEASURED]) == run | {
        "prompts": "1", "N": "4", "tokens/s": "8.00", "devices": "5", "per device": "1.60",
        "x ar": "0.53", "x ar per device": "0.11",
    }  # fmt: skip
    assert cells(tables[SIMULATED]) == run | {
        "n": "4", "L_s": "2", "S0": "1.60", "adjusted S": "1.26", "implied S0": "-", "implied p": "-"
    }  # fmt: skip
    assert cells(tables["Answers"]) == run | {"identical to AR": "1/1 (100.0%)", "correct": "1/1 (100.0%)"}


def test_counted_measured_and_simulated_figures_share_no_table(summary: dict) -> None:
    columns = {table.title: set(table.columns) for table in make_tables(summary["groups"])}
    assert list(columns) == ["Acceptance, counted", MEASURED, SIMULATED, "Answers"]
    assert "S0" not in columns["Acceptance, counted"] | columns[MEASURED]
    assert not {"tokens/s", "x ar", "N"} & columns[SIMULATED]


def test_clocks_share_no_table() -> None:
    tables = tables_of(sample(), drafted([True], clock="virtual"))
    assert [row[1] for row in tables[MEASURED].rows] == ["ar"]
    assert [row[1] for row in tables["Speed, simulated by virtual clock"].rows] == ["spd n4"]
    assert "x ar" not in tables["Speed, simulated by virtual clock"].columns


def test_one_task_has_no_totals_and_baselines_come_first() -> None:
    samples = [drafted([True], temperature=1.0), drafted([True]), sample()]
    groups = [asdict(group) for group in summarize(samples)]
    shown = [(group["task"], method_name(group), group["temperature"]) for group in shown_groups(groups)]
    assert shown == [("gsm8k", "ar", 0.0), ("gsm8k", "spd n4", 0.0), ("gsm8k", "spd n4", 1.0)]
    more = [asdict(group) for group in summarize([*samples, sample(task="mt_bench")])]
    assert [group["task"] for group in shown_groups(more)].count("overall") == 3


def test_shares_are_parts_of_what_was_compared_or_scored() -> None:
    samples = [
        drafted([True], question_id=str(number), identical_to_ar=number > 0, is_correct=number == 0)
        for number in range(3)
    ]
    answers = cells(tables_of(*samples)["Answers"])
    assert (answers["identical to AR"], answers["correct"]) == ("2/3 (66.7%)", "1/3 (33.3%)")


def test_tables_without_rows_are_left_out() -> None:
    assert list(tables_of(sample())) == [MEASURED]
    assert make_tables([]) == []


def test_columns_stand_under_each_other(summary: dict) -> None:
    text = to_markdown(summary)
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(blocks) == 4
    for block in blocks:
        assert len({tuple(at for at, char in enumerate(line) if char == "|") for line in block}) == 1
        assert max(len(line) for line in block) <= 115
        names = [cell.strip() for cell in block[0].strip("|").split("|")]
        rules = [cell.strip() for cell in block[1].strip("|").split("|")]
        assert [name for name, rule in zip(names, rules, strict=True) if rule.strip("-") == ""] == ["task", "method"]
        assert all(rule.strip("-") in ("", ":") and len(rule) >= 2 for rule in rules)
    assert summary["command"] in text and "- mt_bench 131: a prompt of <4,100> tokens & no room" in text


def test_a_bar_in_a_name_does_not_end_a_cell() -> None:
    summary = {"command": "c", "groups": [asdict(group) for group in summarize([sample(task="a|b")])]}
    assert "| a\\|b " in to_markdown(summary)


def test_logged_figures_are_flat_and_equal_the_groups(summary: dict) -> None:
    figures = logged_figures(summary["groups"])
    total = next(g for g in summary["groups"] if g["task"] == "overall" and g["drafter"] == "post")
    run = "overall/spd/post/T0"
    assert {name: figures[f"{run}/{name}"] for name in ("p", "s0", "tokens_per_second", "share_identical")} == {
        name: total[name] for name in ("p", "s0", "tokens_per_second", "share_identical")
    }
    assert figures[f"{run}/speedup_ar"] == total["speedups"][0]["ratio"]
    assert "overall/ar/T0/tokens_per_second" in figures and "overall/ar/T0/p" not in figures
    assert all(isinstance(value, int | float) for value in figures.values())


def test_logged_tables_hold_every_group_and_tally(summary: dict) -> None:
    tables = logged_tables(summary["groups"])
    columns, rows = tables["groups"]
    assert len(rows) == len(summary["groups"]) and {len(row) for row in rows} == {len(columns)}
    columns, rows = tables["acceptance"]
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    by_fill = [row for row in found if (row["task"], row["drafter"], row["by"]) == ("overall", "post", "fill")]
    total = next(g for g in summary["groups"] if g["task"] == "overall" and g["drafter"] == "post")
    first = total["by_fill"][0]
    assert by_fill[0]["rate"] == first["accepted"] / first["judged"] and by_fill[0]["label"] == "1"
    assert {row["by"] for row in found} == {"fill", "position", "class"}
