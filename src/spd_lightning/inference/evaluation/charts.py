"""Horizontal bars as SVG text. Knows numbers and labels; colours and fonts are the page's, by class names."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 328
"""Narrowest width of a drawing, in pixels: it fits a phone, and letters are never scaled below their size."""
LABELS, VALUES = 130, 44
"""Room for labels on the left and for values on the right of the bars."""
BAR, GAP, AXIS = 14, 8, 38
"""Heights: of a bar, between rows, and of the axis with its numbers and its name."""
LONGEST_LABEL = 17
MAX_SERIES = 4


@dataclass(frozen=True)
class Bar:
    """One value.

    Attributes:
        value: length of the bar.
        text: the value as it is written beside the bar.
        detail: what it was made of, such as `30 of 40`.
        bounds: ends of the whisker, if any.
        mark: another value of the same quantity, shown as a diamond, if any.
    """

    value: float
    text: str
    detail: str = ""
    bounds: tuple[float, float] | None = None
    mark: float | None = None


@dataclass(frozen=True)
class BarChart:
    """Rows of bars, one bar per series in each.

    Attributes:
        title: what is shown and of what.
        axis: the quantity with its unit.
        series: names of the series, at most `MAX_SERIES`.
        rows: labels and bars; none where a series has no value.
        maximum: end of the axis; chosen by the values if not given.
        reference: a value that a line is drawn at.
        mark: name of what the diamonds show.
        note: what a reader must know.
    """

    title: str
    axis: str
    series: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Bar | None, ...]], ...]
    maximum: float | None = None
    reference: float | None = None
    mark: str | None = None
    note: str = ""

    @property
    def description(self) -> str:
        """All that the picture shows, in words."""
        return "; ".join(
            f"{label}: " + ", ".join(_spoken(name, bar, self.mark) for name, bar in zip(self.series, bars, strict=True))
            for label, bars in self.rows
        )


def ticks(maximum: float) -> list[float]:
    """Round numbers from 0 on, at most six; the last one is not below the maximum."""
    rough = maximum / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= rough)
    return [index * step for index in range(math.ceil(maximum / step) + 1)]


def draw(chart: BarChart, name: str) -> str:
    """The chart as an SVG element; `name` is unique on the page."""
    shown = [bar for _, bars in chart.rows for bar in bars if bar is not None]
    ends = [value for bar in shown for value in (bar.value, bar.mark or 0, *(bar.bounds or ()))]
    marks = ticks(chart.maximum or max(*ends, chart.reference or 0, 1e-9))
    row_height = len(chart.series) * BAR + GAP
    bottom = len(chart.rows) * row_height + GAP // 2
    scale = (WIDTH - LABELS - VALUES) / marks[-1]
    parts, values = [_axis(chart, marks, scale, bottom)], []
    for number, (label, bars) in enumerate(chart.rows):
        top = GAP // 2 + number * row_height
        middle = top + len(bars) * BAR / 2
        parts.append(_text(LABELS - 8, middle, _short(label), "label"))
        for index, bar in enumerate(bars):
            if bar is not None:
                parts.append(_bar(bar, index, top + index * BAR, scale))
                values.append(_value(bar, top + index * BAR, scale))
    if chart.reference is not None:
        x = LABELS + chart.reference * scale
        parts.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
    parts += values  # last, so that no line runs through them
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-desc" viewBox="0 0 {WIDTH} {bottom + AXIS}">'
        f'<title id="{name}-title">{escape(chart.title)}</title>'
        f'<desc id="{name}-desc">{escape(f"{chart.axis}. {chart.description}")}</desc>{"".join(parts)}</svg>'
    )


def _spoken(series: str, bar: Bar | None, mark: str | None) -> str:
    if bar is None:
        return f"{series} none"
    marked = "" if bar.mark is None else f" ({mark} {bar.mark:.3f})"
    return f"{series} {bar.text}{marked}"


def _axis(chart: BarChart, marks: Sequence[float], scale: float, bottom: int) -> str:
    parts = []
    for mark in marks:
        x = LABELS + mark * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 10, f"{mark:g}", "tick"))
    return "".join([*parts, _text(WIDTH / 2, bottom + 29, chart.axis, "axis")])


def _bar(bar: Bar, index: int, top: int, scale: float) -> str:
    middle = top + BAR / 2
    parts = [
        f'<rect class="s{index + 1}" x="{LABELS}" y="{top + 1:.1f}" width="{bar.value * scale:.1f}" '
        f'height="{BAR - 2}"><title>{escape(f"{bar.text} {bar.detail}".strip())}</title></rect>'
    ]
    if bar.bounds is not None:
        low, high = (LABELS + bound * scale for bound in bar.bounds)
        path = f"M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 3:.1f}v6M{high:.1f} {middle - 3:.1f}v6"
        parts += [f'<path class="{kind}" d="{path}"/>' for kind in ("halo", "whisker")]
    if bar.mark is not None:
        x = LABELS + bar.mark * scale
        parts.append(f'<path class="mark" d="M{x:.1f} {middle - 5:.1f}l5 5l-5 5l-5 -5z"/>')
    return "".join(parts)


def _value(bar: Bar, top: int, scale: float) -> str:
    """The text behind all that belongs to the bar."""
    reach = max((bar.value, *(bar.bounds or ()))) * scale
    reach = reach if bar.mark is None else max(reach, bar.mark * scale + 5)
    return _text(LABELS + reach + 4, top + BAR / 2, bar.text, "value")


def _text(x: float | int, y: float | int, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
