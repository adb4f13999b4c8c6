"""A summary as one HTML page that needs nothing else: no scripts, no other files. Knows no browser."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from spd_lightning.inference.evaluation import figures
from spd_lightning.inference.evaluation.charts import BarChart, draw
from spd_lightning.inference.evaluation.page_style import STYLE
from spd_lightning.inference.evaluation.sample import Sample
from spd_lightning.inference.evaluation.summary import OVERALL
from spd_lightning.inference.evaluation.tables import NONE, Table, make_tables, method_name, number, share

MAX_DIFFERENCES = 50
TERMS = (
    ("N, K", "tokens committed by the decode, without the prefill's own token; cycles (EAGLE-3: rounds)"),
    ("p", "acceptance rate: accepted over judged drafts"),
    ("alpha", "tokens per cycle, N / K"),
    ("n, L_s, k", "pipeline stages; decoder layers of the drafter; drafts per round of EAGLE-3"),
    ("S0", "n alpha: the speedup if drafting and communication were free; simulated"),
    ("adjusted S", "S0 with the layers of those drafts counted that nothing hides; simulated"),
    ("fill", "tokens in the pipeline when a draft was made: 1 after a flush, n when the pipeline is full"),
    ("T", "temperature; 0 is greedy"),
)


def render_report(summary: Mapping[str, Any], samples: Sequence[Sample]) -> str:
    """The page of one evaluation.

    Args:
        summary: content of `summary.json`: `groups` (`summary.make_summary`), `command`, and where given

            - `settings`, `machine`, `versions`: mappings that are shown as they are;
            - `predicted`: a list of `formulas.predicted_acceptance` with `method`, `drafter` and `temperature` added;
            - `profiles`: a list of mappings with `title`, `note` and `fills`, each of which has `fill`, `num_cycles`
              and `parts_ms`: mean milliseconds of `PDM`, `stage 1` and so on, and what else there is;
            - `skipped`: a list of mappings with `task`, `question_id` and `error`.
        samples: that the summary was made of.
    """
    groups = summary["groups"]
    drafters = list(dict.fromkeys(group["drafter"] for group in groups if group["drafter"] is not None))
    title = f"Evaluation of {', '.join(drafters)}" if drafters else "Evaluation of baselines"
    tables = "".join(_table_section(table) for table in make_tables(groups))
    charts = _chart_sections(summary)
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_lead(samples))}</p></header>",
        _section("In short", _list(_findings(groups))),
        tables,
        charts,
        _differences(samples),
        _skipped(summary.get("skipped", [])),
        _run(summary),
        _section("Terms", _definitions(TERMS)),
    ]
    return _page(title, body)


def render_profile(profile: Mapping[str, Any]) -> str:
    """The page of one cycle profile: `title`, `note` and `fills`, as in a summary's `profiles`."""
    title = f"Cycle profile: {profile['title']}"
    sections = _chart_sections({"groups": [], "profiles": [profile]})
    return _page(title, [f"<header><h1>{escape(title)}</h1><p>{escape(profile['note'])}</p></header>", sections])


def _page(title: str, body: Sequence[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>{''.join(body)}</main></body></html>\n"
    )


def _lead(samples: Sequence[Sample]) -> str:
    prompts: dict[str, set[Any]] = {}
    for sample in samples:
        prompts.setdefault(sample.task, set()).add(sample.prompt)
    tasks = ", ".join(f"{task} ({len(asked)} prompts)" for task, asked in prompts.items())
    methods = ", ".join(dict.fromkeys(sample.method for sample in samples))
    temperatures = " and ".join(f"{value:g}" for value in sorted({sample.temperature for sample in samples}))
    return f"{tasks}; methods {methods}; temperature {temperatures}; {len(samples)} answers."


def _findings(groups: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """What was found of each drafter and temperature over all tasks, as HTML."""
    for group in groups:
        if group["task"] != OVERALL or group["drafter"] is None:
            continue
        clock = "measured by wall clock" if group["clock"] == "wall" else "simulated by virtual clock"
        ratios = "".join(f", {number(speedup['ratio'], 2)} × {speedup['baseline']}" for speedup in group["speedups"])
        parts = [
            f"p {number(group['p'], 3)}, {number(group['alpha'], 3)} tokens per cycle (counted)",
            f"{number(group['tokens_per_second'], 2)} tokens/s{ratios} ({clock})",
            f"S0 {number(group['s0'], 2)} (simulated: assumes free drafting and communication)",
        ]
        if group["num_compared"]:
            parts.append(f"{share(group['num_identical'], group['num_compared'])} identical to plain decoding")
        name = f"{method_name(group)}, T={group['temperature']:g}"
        yield f"<strong>{escape(name)}</strong>: {escape('; '.join(parts))}."
        if group["cycle_deviation"]:
            yield (
                f'<strong class="warning">{escape(name)}: the counts miss the identity of N and K by '
                f"{group['cycle_deviation']} cycles, so they are wrong somewhere.</strong>"
            )


def _chart_sections(summary: Mapping[str, Any]) -> str:
    parts, count = [], 0
    for heading, note, charts in figures.chart_sections(summary):
        shown = []
        for chart in charts:
            count += 1
            shown.append(_figure(chart, f"chart{count}"))
        parts.append(_section(heading, f'<p>{escape(note)}</p><div class="figures">{"".join(shown)}</div>'))
    return "".join(parts)


def _figure(chart: BarChart, name: str) -> str:
    keys = [
        f'<li><span class="key k{index}"></span>{escape(series)}</li>' for index, series in enumerate(chart.series, 1)
    ]
    if chart.mark is not None:
        keys.append(f'<li><span class="diamond"></span>{escape(chart.mark)}</li>')
    legend = f'<ul class="legend">{"".join(keys)}</ul>' if len(keys) > 1 else ""
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    return (
        f"<figure><figcaption>{escape(chart.title)}</figcaption>{legend}"
        f'<div class="scroll">{draw(chart, name)}</div>{note}'
        f"<details><summary>Numbers</summary>{_scroll(_html_table(figures.numbers_of(chart)), chart.title)}</details></figure>"
    )


def _table_section(table: Table) -> str:
    return _section(table.title, f"<p>{escape(table.note)}</p>{_scroll(_html_table(table), table.title)}")


def _html_table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = ["" if index < table.num_texts else ' class="n"' for index in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    rows = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    return f"<table><thead><tr>{cells(table.columns, 'th')}</tr></thead><tbody>{rows}</tbody></table>"


def _scroll(content: str, label: str) -> str:
    """A box that scrolls by itself, by keyboard as well."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{content}</div>'


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>' for key, value in pairs)}</dl>"


def _differences(samples: Iterable[Sample]) -> str:
    """Where answers leave plain decoding's; nothing if none does at temperature 0."""
    found = [(sample, difference) for sample in samples if (difference := sample.first_difference) is not None]
    if not found:
        return ""
    rows = [
        (
            *(sample.task, method_name(vars(sample)), sample.question_id, f"{sample.temperature:g}"),
            *(str(difference[key]) for key in ("position", "token", "ar_token")),
            NONE if difference["margin"] is None else f"{difference['margin']:.3g}",
        )
        for sample, difference in found[:MAX_DIFFERENCES]
    ]
    columns = ("task", "method", "question", "T", "position", "token", "AR's token", "top-2 margin")
    note = f"Number of them: {len(found)}." + (f" The first {MAX_DIFFERENCES}:" if len(found) > MAX_DIFFERENCES else "")
    return _table_section(Table("Answers that differ from plain decoding", note, columns, tuple(rows), num_texts=3))


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> str:
    if not skipped:
        return ""
    rows = tuple(tuple(str(item[key]) for key in ("task", "question_id", "error")) for item in skipped)
    return _table_section(
        Table("Skipped prompts", "They count nowhere.", ("task", "question", "error"), rows, num_texts=3)
    )


def _run(summary: Mapping[str, Any]) -> str:
    parts = [f"<pre>{escape(summary['command'])}</pre>"]
    for name in ("settings", "machine", "versions"):
        if facts := summary.get(name):
            parts.append(f"<h3>{name.capitalize()}</h3>{_definitions(facts.items())}")
    return _section("What was run", "".join(parts))
