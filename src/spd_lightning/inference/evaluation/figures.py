"""The charts of a summary: which there are and what they show. Knows no SVG and no page."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spd_lightning.inference.evaluation.charts import MAX_SERIES, Bar, BarChart
from spd_lightning.inference.evaluation.formulas import wilson_interval
from spd_lightning.inference.evaluation.sample import TOKEN_CLASSES
from spd_lightning.inference.evaluation.summary import OVERALL, RANGES
from spd_lightning.inference.evaluation.tables import NONE, GroupDict, Table, method_name, rate_of, shown_groups

RATE = "acceptance rate, accepted / judged"
KINDS = (
    ("Acceptance by position in the answer", "by_position", RANGES),
    ("Acceptance by token class", "by_class", TOKEN_CLASSES),
)
Section = tuple[str, str, list[BarChart]]


def chart_sections(summary: Mapping[str, Any]) -> list[Section]:
    """(heading, note, charts) of what a summary has figures for.

    Args:
        summary: as `report.render_report` takes it.
    """
    groups = summary["groups"]
    drafted = [group for group in groups if group["drafter"] is not None]
    totals = [group for group in drafted if group["task"] == OVERALL and group["num_judged"]]
    predicted = {(item["method"], item["drafter"], item["temperature"]): item for item in summary.get("predicted", [])}
    note = (
        "All tasks together. Position 1 is the first token after the prefill's. Fill is the number of tokens in flight "
        "when a draft was made. Predicted is the drafter's validation, on other text, with p as its rates imply it. "
        "Whiskers are 95% intervals, as if drafts were independent of each other."
    )
    charts = [
        chart
        for name in dict.fromkeys(method_name(group) for group in totals)
        for chart in _acceptance_charts(name, [group for group in totals if method_name(group) == name], predicted)
    ]
    sections: list[Section] = [("Acceptance by position, token class and fill level, counted", note, charts)]
    for clock, heading in (
        ("wall", "Speedup by task, measured by wall clock"),
        ("virtual", "Speedup by task, simulated by virtual clock"),
    ):
        note = "Decode tokens/s over those of a baseline on the same prompts of the same run; the line is the baseline."
        timed = [group for group in drafted if group["clock"] == clock]
        sections.append((heading, note, list(_speedup_charts(timed))))
    note = (
        "S0 assumes that drafting and communication are free; adjusted S counts the layers of drafts that nothing "
        "hides. Diamonds follow from acceptance by fill level, as if answers had no end."
    )
    sections.append(("Theoretical speedup by task, simulated", note, list(_simulated_charts(drafted))))
    note = "Mean milliseconds of a cycle's parts. Where ranks work side by side, their parts are not to be added."
    sections.append(
        (
            "Cycle breakdown",
            note,
            [chart for profile in summary.get("profiles", []) for chart in _cycle_charts(profile)],
        )
    )
    return [section for section in sections if section[2]]


def numbers_of(chart: BarChart) -> Table:
    """The chart's values as a table."""
    has_details = [
        any(bar is not None and bar.detail for bar in bars)
        for bars in zip(*(bars for _, bars in chart.rows), strict=True)
    ]
    columns = [""]
    for series, detailed in zip(chart.series, has_details, strict=True):
        columns += [series, *(["of"] if detailed else []), *([chart.mark] if chart.mark else [])]
    rows = []
    for label, bars in chart.rows:
        row = [label]
        for bar, detailed in zip(bars, has_details, strict=True):
            row.append(NONE if bar is None else bar.text)
            if detailed:
                row.append(NONE if bar is None else bar.detail)
            if chart.mark:
                row.append(NONE if bar is None or bar.mark is None else f"{bar.mark:.3f}")
        rows.append(tuple(row))
    return Table(chart.title, chart.note, tuple(columns), tuple(rows), num_texts=1)


def _run(group: GroupDict) -> tuple[str, str, float]:
    return group["method"], group["drafter"], group["temperature"]


def _rate_bar(tally: Mapping[str, Any], mark: float | None = None) -> Bar:
    rate = rate_of(tally)
    detail = f"{tally['accepted']} of {tally['judged']}"
    return Bar(rate, f"{rate:.3f}", detail, wilson_interval(tally["accepted"], tally["judged"]), mark)


def _acceptance_charts(name: str, totals: Sequence[GroupDict], predicted: Mapping[Any, Any]) -> Iterable[BarChart]:
    """The charts of one drafter, with a series per temperature."""
    for start in range(0, len(totals), MAX_SERIES):
        shown = totals[start : start + MAX_SERIES]
        series = tuple(f"T={group['temperature']:g}" for group in shown)
        for title, by, labels in KINDS:
            kinds = [{tally["label"]: _rate_bar(tally) for tally in group[by]} for group in shown]
            rows = tuple(
                (label, tuple(kind.get(label) for kind in kinds))
                for label in labels
                if any(label in kind for kind in kinds)
            )
            yield BarChart(f"{title}: {name}", RATE, series, rows, maximum=1.0)
        if (num_stages := shown[0]["num_stages"]) is not None:
            columns = [_fill_bars(group, predicted.get(_run(group)), num_stages) for group in shown]
            labels = [*(f"fill {fill}" for fill in range(1, num_stages + 1)), "all drafts (p)"]
            rows = tuple(zip(labels, zip(*columns, strict=True), strict=True))
            has_marks = any(_run(group) in predicted for group in shown)
            mark = "predicted by validation" if has_marks else None
            yield BarChart(f"Acceptance by fill level: {name}", RATE, series, rows, maximum=1.0, mark=mark)


def _fill_bars(total: GroupDict, predicted: Mapping[str, Any] | None, num_stages: int) -> list[Bar | None]:
    """Acceptance at fill `1..n`, and `p` of all drafts together."""
    by_fill = {tally["label"]: tally for tally in total["by_fill"]}
    marks = [*predicted["by_fill"], predicted["p"]] if predicted else [None] * (num_stages + 1)
    tallies = [by_fill.get(str(fill)) for fill in range(1, num_stages + 1)]
    pooled = {"accepted": total["num_accepted"], "judged": total["num_judged"]}
    bars = zip([*tallies, pooled], marks, strict=True)
    return [None if tally is None else _rate_bar(tally, mark) for tally, mark in bars]


def _by_task(groups: Sequence[GroupDict]) -> Iterable[tuple[str, list[GroupDict]]]:
    """What the charts of one drafter and temperature are called, and its groups: the tasks and then all of them."""
    groups = shown_groups(groups)
    for name in dict.fromkeys(method_name(group) for group in groups):
        named = [group for group in groups if method_name(group) == name]
        for temperature in dict.fromkeys(group["temperature"] for group in named):
            own = [group for group in named if group["temperature"] == temperature]
            yield f"{name}, T={temperature:g}", own


def _speedup_charts(groups: Sequence[GroupDict]) -> Iterable[BarChart]:
    for name, own in _by_task(groups):
        ratios = [{speedup["baseline"]: speedup for speedup in group["speedups"]} for group in own]
        baselines = list(dict.fromkeys(baseline for found in ratios for baseline in found))
        for start in range(0, len(baselines), MAX_SERIES):
            shown = baselines[start : start + MAX_SERIES]
            rows = tuple(
                (group["task"], tuple(_ratio_bar(found.get(baseline)) for baseline in shown))
                for group, found in zip(own, ratios, strict=True)
            )
            series = tuple(f"against {baseline}" for baseline in shown)
            yield BarChart(f"Speedup: {name}", "times the baseline's tokens/s", series, rows, reference=1.0)


def _ratio_bar(speedup: Mapping[str, Any] | None) -> Bar | None:
    if speedup is None:
        return None
    return Bar(speedup["ratio"], f"{speedup['ratio']:.2f}", f"{speedup['num_prompts']} prompts")


def _simulated_charts(groups: Sequence[GroupDict]) -> Iterable[BarChart]:
    for name, own in _by_task([group for group in groups if group["s0"] is not None]):
        has_cost = any(group["adjusted_s"] != group["s0"] for group in own)
        keys = {"S0": "s0"} | ({"adjusted S": "adjusted_s"} if has_cost else {})
        rows = []
        for group in own:
            implied = group["implied"] and group["implied"]["s0"]
            bars = [
                Bar(group[key], f"{group[key]:.2f}", mark=implied if key == "s0" else None) for key in keys.values()
            ]
            rows.append((group["task"], tuple(bars)))
        title, axis = f"Simulated speedup: {name}", "S0, times plain decoding (simulated)"
        yield BarChart(title, axis, tuple(keys), tuple(rows), reference=1.0, mark="implied S0")


def _cycle_charts(profile: Mapping[str, Any]) -> Iterable[BarChart]:
    """The parts of a cycle when the pipeline is fullest, and at every fill level what runs side by side in it."""
    levels = sorted(profile["fills"], key=lambda level: level["fill"])
    full, axis = levels[-1], "ms per cycle, mean"
    parts = tuple((part, (_time_bar(value),)) for part, value in full["parts_ms"].items())
    note = f"{full['num_cycles']} cycles. {profile['note']}"
    yield BarChart(f"Parts of a cycle at fill {full['fill']}: {profile['title']}", axis, ("time",), parts, note=note)
    rows = []
    for level in levels:
        slowest = max(value for part, value in level["parts_ms"].items() if part.startswith("stage "))
        pdm = level["parts_ms"]["PDM"]
        slack = f"slack {slowest - pdm:.2f}"
        rows.append((f"fill {level['fill']}", (_time_bar(pdm), Bar(slowest, f"{slowest:.2f}", slack))))
    series, note = (
        ("PDM", "slowest stage"),
        "Slack is the slowest stage less the PDM: the PDM hides where it is positive.",
    )
    yield BarChart(f"PDM and slowest stage: {profile['title']}", axis, series, tuple(rows), note=note)


def _time_bar(milliseconds: float) -> Bar:
    return Bar(milliseconds, f"{milliseconds:.2f}")
