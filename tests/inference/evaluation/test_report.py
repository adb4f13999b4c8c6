"""The page is whole, needs nothing from elsewhere, and its numbers are those of the summary."""

import copy
import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from spd_lightning.inference.evaluation.report import MAX_DIFFERENCES, render_profile, render_report
from spd_lightning.inference.evaluation.summary import make_summary
from spd_lightning.inference.evaluation.tables import make_tables
from tests.inference.evaluation.synthetic import drafted, evaluation, sample

VOID = {"meta", "br", "line", "rect", "path"}  # of what the page uses


@dataclass
class Element:
    """A node of the page."""

    tag: str
    attributes: dict[str, str | None]
    children: list["Element"] = field(default_factory=list)
    own_text: str = ""

    def all(self, tag: str) -> list["Element"]:
        below = [found for child in self.children for found in child.all(tag)]
        return [self, *below] if self.tag == tag else below

    @property
    def text(self) -> str:
        return self.own_text + "".join(child.text for child in self.children)


class Page(HTMLParser):
    """The tree of a page; every element that is opened must be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]
        self.feed(source)
        self.close()
        assert len(self.open) == 1, f"not closed: {[element.tag for element in self.open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of <{tag}> is given twice"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID or tag == "rect":
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].own_text += data


def rows_of(table: Element) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    rows = [tuple(cell.text for cell in row.children) for row in table.all("tr")]
    return rows[0], rows[1:]


def section(page: Element, heading: str) -> Element:
    (found,) = [part for part in page.all("section") if part.children[0].text == heading]
    return found


@pytest.fixture(scope="module")
def made() -> tuple[dict, str, Element]:
    summary, samples = evaluation(num_prompts=4, num_tokens=60)
    summary = json.loads(json.dumps(summary))
    source = render_report(summary, samples)
    return summary, source, Page(source).root


def test_the_page_is_html_and_its_ids_are_unique(made) -> None:
    _, source, page = made
    assert source.startswith("<!DOCTYPE html>\n<html lang=") and len(page.all("h1")) == 1
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids)) > 20
    declared = page.all("meta")[1].attributes
    assert declared == {"name": "viewport", "content": "width=device-width, initial-scale=1"}


def test_nothing_is_fetched_and_nothing_runs(made) -> None:
    _, source, page = made
    assert not re.search(r"https?:|//|url\(|@import|javascript:", source.replace("<!DOCTYPE html>", ""))
    tags = {element.tag for kind in ("head", "body") for part in page.all(kind) for element in walk(part)}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "image", "a"}
    names = {name for element in walk(page) for name in element.attributes}
    assert not {name for name in names if name.startswith("on")} and not names & {"src", "href", "xlink:href", "style"}


def walk(element: Element) -> list[Element]:
    return [element, *(found for child in element.children for found in walk(child))]


def test_every_figure_can_be_read_aloud(made) -> None:
    _, _, page = made
    figures = page.all("figure")
    assert len(figures) == 2 * 3 + 4 + 4 + 2
    for figure in figures:
        (drawing,) = figure.all("svg")
        title, description = (drawing.children[index] for index in (0, 1))
        assert (title.tag, description.tag) == ("title", "desc") and drawing.attributes["role"] == "img"
        assert drawing.attributes["aria-labelledby"] == f"{title.attributes['id']} {description.attributes['id']}"
        assert title.text == figure.all("figcaption")[0].text and len(description.text) > 20
        (axis,) = [text for text in drawing.all("text") if text.attributes["class"] == "axis"]
        assert axis.text
        for value in (text.text for text in drawing.all("text") if text.attributes["class"] == "value"):
            assert value in description.text and value in figure.all("details")[0].text


def test_colours_follow_the_scheme_and_wide_things_scroll_in_a_box(made) -> None:
    _, source, page = made
    assert "prefers-color-scheme:dark" in source and 'name="color-scheme" content="light dark"' in source
    style = page.all("style")[0].text
    light, dark = (set(re.findall(r"--\w+", block)) for block in re.findall(r":root\{(.*?)\}", style, re.DOTALL))
    assert light == dark == set(re.findall(r"var\((--\w+)\)", style))
    boxed = {id(table) for box in walk(page) if box.attributes.get("class") == "scroll" for table in box.all("table")}
    assert page.all("table") and all(id(table) in boxed for table in page.all("table"))


def test_letters_are_never_small(made) -> None:
    style = made[2].all("style")[0].text
    sizes = [float(size) * (16 if unit == "rem" else 1) for size, unit in re.findall(r"([\d.]+)(px|rem)(?:/|;|\}| )",
             " ".join(re.findall(r"font(?:-size)?:[^;}]*[;}]", style)))]  # fmt: skip
    assert len(sizes) >= 8 and min(sizes) >= 12


def test_tables_hold_what_the_summary_says(made) -> None:
    summary, _, page = made
    for table in make_tables(summary["groups"]):
        shown = section(page, table.title)
        assert rows_of(shown.all("table")[0]) == (table.columns, list(table.rows))
        assert table.note in shown.text


def test_figures_show_what_the_summary_says(made) -> None:
    summary, _, page = made
    totals = {(g["drafter"], g["temperature"]): g for g in summary["groups"] if g["task"] == "overall" and g["drafter"]}
    figures = {figure.all("figcaption")[0].text: rows_of(figure.all("table")[0]) for figure in page.all("figure")}

    columns, rows = figures["Acceptance by token class: spd post"]
    assert columns == ("", "T=0", "of", "T=1", "of")
    for label, *found in rows:
        expected = []
        for temperature in (0.0, 1.0):
            (tally,) = [t for t in totals["post", temperature]["by_class"] if t["label"] == label]
            expected += [f"{tally['accepted'] / tally['judged']:.3f}", f"{tally['accepted']} of {tally['judged']}"]
        assert found == expected

    name = "smollm2-n6-exact"
    columns, rows = figures[f"Acceptance by fill level: spd {name}"]
    assert columns == ("", "T=0", "of", "predicted by validation", "T=1", "of", "predicted by validation")
    assert [row[0] for row in rows] == [*(f"fill {fill}" for fill in range(1, 7)), "all drafts (p)"]
    assert [row[3] for row in rows] == ["0.457", "0.501", "0.506", "0.509", "0.510", "0.509", "0.480"]
    assert {row[6] for row in rows} == {"-"}
    assert rows[-1][1] == f"{totals[name, 0.0]['p']:.3f}" and rows[-1][4] == f"{totals[name, 1.0]['p']:.3f}"

    columns, rows = figures["Speedup: spd post, T=1"]
    assert columns == ("", "against ar", "of", "against generate", "of")
    ratios = [f"{speedup['ratio']:.2f}" for speedup in totals["post", 1.0]["speedups"]]
    assert rows[-1] == ("overall", ratios[0], "12 prompts", ratios[1], "12 prompts")

    total = totals["post", 0.0]
    columns, rows = figures["Simulated speedup: spd post, T=0"]
    assert columns == ("", "S0", "implied S0", "adjusted S", "implied S0")
    assert rows[-1] == (
        "overall",
        f"{total['s0']:.2f}",
        f"{total['implied']['s0']:.3f}",
        f"{total['adjusted_s']:.2f}",
        "-",
    )
    assert figures[f"Simulated speedup: spd {name}, T=0"][0] == ("", "S0", "implied S0")

    assert figures[f"Parts of a cycle at fill 6: {name}"][1][0] == ("PDM", "6.10")
    assert figures[f"PDM and slowest stage: {name}"][1][0] == ("fill 1", "6.10", "5.00", "slack -1.10")


def test_simulated_figures_are_labelled_and_drawn_apart(made) -> None:
    _, _, page = made
    measured, simulated = (
        section(page, "Speedup by task, measured by wall clock"),
        section(page, "Theoretical speedup by task, simulated"),
    )
    assert "S0" not in measured.text
    for figure in page.all("figure"):
        if "S0" in figure.text:
            assert "simulated" in figure.all("figcaption")[0].text.lower()
    assert simulated.text.count("Simulated speedup") >= 4
    for line in section(page, "In short").all("li"):
        assert "(measured by wall clock)" in line.text
        assert re.search(r"S0 [\d.]+ \(simulated: assumes free drafting and communication\)", line.text)


def test_a_virtual_clock_is_named_everywhere() -> None:
    samples = [sample(clock="virtual"), drafted([True] * 3, clock="virtual")]
    page = Page(render_report(make_summary(samples, command="c"), samples)).root
    headings = [heading.text for heading in page.all("h2")]
    assert (
        headings.count("Speedup by task, simulated by virtual clock")
        == headings.count("Speed, simulated by virtual clock")
        == 1
    )
    assert "wall clock" not in page.all("body")[0].text


def test_differences_and_skipped_prompts_are_listed(made) -> None:
    _, _, page = made
    columns, rows = rows_of(section(page, "Answers that differ from plain decoding").all("table")[0])
    assert columns[-1] == "top-2 margin"
    assert rows == [("humaneval", "spd post", "3", "0", "61", "314", "15", "3.1e-05")]
    _, rows = rows_of(section(page, "Skipped prompts").all("table")[0])
    assert rows == [("mt_bench", "131", "a prompt of <4,100> tokens & no room")]


def test_many_differences_are_counted_and_the_first_are_shown() -> None:
    difference = {"position": 9, "token": 1, "ar_token": 2, "margin": None}
    samples = [
        drafted([True], question_id=str(number), identical_to_ar=False, first_difference=difference)
        for number in range(MAX_DIFFERENCES + 3)
    ]
    page = Page(render_report(make_summary(samples, command="c"), samples)).root
    shown = section(page, "Answers that differ from plain decoding")
    assert "Number of them: 53. The first 50:" in shown.text and len(rows_of(shown.all("table")[0])[1]) == 50


def test_wrong_counts_are_said_at_the_top(made) -> None:
    assert "miss the identity" not in made[1]
    samples = [drafted([True, False, True], num_cycles=12)]
    page = Page(render_report(make_summary(samples, command="c"), samples)).root
    assert "the counts miss the identity of N and K by 3 cycles" in section(page, "In short").text


def test_text_from_outside_stays_text(made) -> None:
    summary, _, page = made
    assert summary["command"] in section(page, "What was run").text
    evil = "<script>alert('1')</script>\"&"
    samples = [sample(task=evil), drafted([True], task=evil, drafter=evil), drafted([True], task="b", drafter=evil)]
    facts = dict(
        command=evil,
        machine={evil: evil},
        versions={evil: evil},
        skipped=[dict(task=evil, question_id=evil, error=evil)],
    )
    source = render_report(make_summary(samples, **facts), samples)
    assert "<script" not in source and not Page(source).root.all("script")
    assert section(Page(source).root, "What was run").text.count(evil) == 5


def test_a_summary_without_extras_has_a_page() -> None:
    for samples in ([], [sample()], [drafted([])], [drafted([True])]):
        page = Page(render_report(make_summary(samples, command="spd-infer eval"), samples)).root
        headings = [heading.text for heading in page.all("h2")]
        assert "Skipped prompts" not in headings and "Cycle breakdown" not in headings
        assert page.all("h1")[0].text == (
            "Evaluation of n4" if samples and samples[0].drafter else "Evaluation of baselines"
        )


def test_a_profile_has_a_page_of_its_own(made) -> None:
    profile = made[0]["profiles"][0]
    page = Page(render_profile(profile)).root
    assert page.all("h1")[0].text == "Cycle profile: smollm2-n6-exact" and profile["note"] in page.all("header")[0].text
    assert [figure.all("figcaption")[0].text for figure in page.all("figure")] == [
        "Parts of a cycle at fill 6: smollm2-n6-exact", "PDM and slowest stage: smollm2-n6-exact"
    ]  # fmt: skip


def test_the_page_depends_on_nothing_but_its_arguments(made) -> None:
    summary, source, _ = made
    kept = copy.deepcopy(summary)
    assert render_report(summary, evaluation(num_prompts=4, num_tokens=60)[1]) == source and summary == kept
