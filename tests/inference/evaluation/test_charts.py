"""Bars are as long as their values, and the drawing says in words what it shows."""

import re
from xml.etree import ElementTree

import pytest

from spd_lightning.inference.evaluation.charts import LABELS, VALUES, WIDTH, Bar, BarChart, draw, ticks

CHART = BarChart(
    title="Rates of <a> & b",
    axis="rate, accepted / judged",
    series=("T=0", "T=1"),
    rows=(
        ("fill 1", (Bar(0.5, "0.500", "5 of 10", (0.25, 0.75), 0.625), Bar(0.25, "0.250"))),
        ("a name that is far too long", (None, Bar(1.0, "1.000"))),
    ),
    maximum=1.0,
    reference=1.0,
    mark="predicted",
)
PLOT = WIDTH - LABELS - VALUES


def elements(chart: BarChart, kind: str) -> list[ElementTree.Element]:
    return [found for found in ElementTree.fromstring(draw(chart, "c")).iter() if found.get("class") == kind]


@pytest.mark.parametrize(
    "maximum, expected",
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (2.64, [0, 1, 2, 3]),
        (2.29, [0, 0.5, 1, 1.5, 2, 2.5]),
        (6.1, [0, 2, 4, 6, 8]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (480.0, [0, 100, 200, 300, 400, 500]),
    ],
)
def test_ticks_are_round_and_reach_the_maximum(maximum: float, expected: list[float]) -> None:
    assert ticks(maximum) == pytest.approx(expected)


def test_bars_are_as_long_as_their_values() -> None:
    first, second = elements(CHART, "s1"), elements(CHART, "s2")
    assert [float(bar.attrib["width"]) for bar in first] == pytest.approx([0.5 * PLOT], abs=0.06)
    assert [float(bar.attrib["width"]) for bar in second] == pytest.approx([0.25 * PLOT, PLOT], abs=0.06)
    assert {float(bar.attrib["x"]) for bar in first + second} == {LABELS}


def test_whisker_diamond_and_line_are_at_their_values() -> None:
    (whisker,), (mark,), (line,) = (elements(CHART, kind) for kind in ("whisker", "mark", "reference"))
    low, high = re.fullmatch(r"M([\d.]+) [\d.]+H([\d.]+)M.*", whisker.attrib["d"]).groups()
    assert (float(low), float(high)) == pytest.approx((LABELS + 0.25 * PLOT, LABELS + 0.75 * PLOT), abs=0.06)
    assert float(re.match(r"M([\d.]+)", mark.attrib["d"])[1]) == pytest.approx(LABELS + 0.625 * PLOT, abs=0.06)
    assert float(line.attrib["x1"]) == LABELS + PLOT
    plain = BarChart("t", "a", ("s",), (("r", (Bar(1.0, "1"),)),))
    assert not any(elements(plain, kind) for kind in ("whisker", "mark", "reference"))


def test_values_stand_behind_all_that_belongs_to_their_bar() -> None:
    values = {value.text: float(value.attrib["x"]) for value in elements(CHART, "value")}
    assert values["0.500"] > LABELS + 0.75 * PLOT and values["1.000"] > LABELS + PLOT
    assert LABELS + 0.25 * PLOT < values["0.250"] < LABELS + 0.5 * PLOT
    right = BarChart("t", "a", ("s",), (("r", (Bar(0.5, "x", mark=0.9),)),), maximum=1.0)
    assert float(elements(right, "value")[0].attrib["x"]) > LABELS + 0.9 * PLOT + 5


def test_the_axis_reaches_bars_whiskers_diamonds_and_line() -> None:
    for changes in (dict(value=7.0), dict(bounds=(0.0, 7.0)), dict(mark=7.0)):
        chart = BarChart("t", "a", ("s",), (("r", (Bar(**(dict(value=1.0, text="v") | changes)),)),))
        assert float(elements(chart, "tick")[-1].text) == 8
    chart = BarChart("t", "a", ("s",), (("r", (Bar(0.1, "v"),)),), reference=1.0)
    assert float(elements(chart, "tick")[-1].text) == 1
    zero = BarChart("t", "a", ("s",), (("r", (Bar(0.0, "0"),)),))
    assert float(elements(zero, "s1")[0].attrib["width"]) == 0


def test_a_drawing_has_a_title_and_its_values_in_words() -> None:
    drawing = ElementTree.fromstring(draw(CHART, "c7"))
    assert drawing.attrib["role"] == "img" and drawing.attrib["aria-labelledby"] == "c7-title c7-desc"
    assert {child.get("id"): child.text for child in drawing if child.get("id")} == {
        "c7-title": "Rates of <a> & b",
        "c7-desc": "rate, accepted / judged. fill 1: T=0 0.500 (predicted 0.625), T=1 0.250; "
        "a name that is far too long: T=0 none, T=1 1.000",
    }
    assert [label.text for label in elements(CHART, "label")] == ["fill 1", "a name that is f…"]
    assert [axis.text for axis in elements(CHART, "axis")] == ["rate, accepted / judged"]
