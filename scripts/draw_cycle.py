"""Draws docs/cycle.svg: ten cycles of a pipeline of four stages with one rejection, by the decoder's own schedule.

python scripts/draw_cycle.py docs/cycle.svg
"""

import sys
from pathlib import Path

from spd_lightning.inference.schedule import PipelineSchedule, Verdict

NUM_STAGES, PROMPT = 4, 10
VERDICTS = {4: True, 5: False, 9: True, 10: True}
"""What the target says of the judged draft, by cycle."""
NUM_CYCLES = 10
CELL, ROW, LEFT, TOP = 64, 40, 118, 34
VERIFIED, DRAFT, FLUSHED, IDLE, INK, SOFT = "#0072b2", "#e69f00", "#e9d3c4", "#eef1f4", "#1b1f24", "#57606a"


def box(x: float, y: float, fill: str, text: str = "", colour: str = "#fff", dashed: bool = False) -> str:
    """One cell with its text."""
    outline = f' stroke="{SOFT}" stroke-dasharray="4 3"' if dashed else ""
    shape = f'<rect x="{x + 3}" y="{y + 3}" width="{CELL - 6}" height="{ROW - 6}" rx="4" fill="{fill}"{outline}/>'
    return shape + (label(x + CELL / 2, y + ROW / 2 + 5, text, colour) if text else "")


def label(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle", size: int = 14) -> str:
    """Text around a point."""
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def draw() -> str:
    """The picture as SVG text."""
    schedule = PipelineSchedule(NUM_STAGES, list(range(PROMPT)), PROMPT)
    rows = ["drafter", *(f"stage {stage}" for stage in range(1, NUM_STAGES + 1)), "verdict"]
    width, height = LEFT + NUM_CYCLES * CELL + 12, TOP + len(rows) * ROW + 66
    parts = [label(LEFT - 12, TOP + index * ROW + ROW / 2 + 5, name, anchor="end") for index, name in enumerate(rows)]
    parts.append(label(LEFT - 12, 22, "cycle", SOFT, "end"))
    for cycle in range(1, NUM_CYCLES + 1):
        plan, x = schedule.plan(), LEFT + (cycle - 1) * CELL
        verdict = Verdict(VERDICTS[cycle], plan.judged or 0) if plan.judged is not None else None
        is_rejection = verdict is not None and not verdict.accepted
        parts.append(label(x + CELL / 2, 22, str(cycle), SOFT))
        parts.append(box(x, TOP, FLUSHED if is_rejection else DRAFT, str(plan.drafted), INK))
        for stage in range(1, NUM_STAGES + 1):
            y, position = TOP + stage * ROW, plan.position_at(stage)
            if position is None:
                parts.append(box(x, y, IDLE))
            elif position < schedule.num_verified:
                parts.append(box(x, y, VERIFIED, str(position)))
            else:
                parts.append(box(x, y, FLUSHED if is_rejection else DRAFT, str(position), INK))
        if verdict is not None:
            sign = "accepted" if verdict.accepted else "rejected"
            y = TOP + (NUM_STAGES + 1) * ROW + 18
            parts += [label(x + CELL / 2, y, str(plan.judged)), label(x + CELL / 2, y + 16, sign, SOFT, size=12)]
        schedule.advance(plan.drafted, verdict)
    y = height - 34
    keys = [("#fff", VERIFIED, "certain"), (INK, DRAFT, "a draft"), (INK, FLUSHED, "flushed when the cycle ends")]
    x = float(LEFT)
    for colour, fill, meaning in keys:
        parts += [box(x, y - ROW / 2, fill, "10", colour), label(x + CELL + 4, y + 5, meaning, anchor="start")]
        x += CELL + 40 + 8 * len(meaning)
    title = "Which token each stage works on, cycle by cycle; the drafter's row has the position that it proposes."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' font-family="system-ui,Segoe UI,Roboto,sans-serif"><title>{title}</title>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>' + "".join(parts) + "</svg>\n"
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), encoding="utf-8")
