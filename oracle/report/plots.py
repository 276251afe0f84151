"""Plots as inline SVG: what a cache did at each call, and what became of the latents, over one axis of steps.

Units are pixels at the width at which text is 10 px high; a page may show a plot larger, and never smaller. Colours are
the page's, by class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import floor, log10

from markupsafe import Markup

WIDTH, LEFT, RIGHT = 308.0, 92.0, 6.0
WIDEST_CELL = 26.25
CELL, LANE = 13.0, 16.0
CURVE = 72.0
HEAD, GAP = 15.0, 20.0
MOST_TICKS = 4


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stage's blocks. verdict: `compute` or `reuse`, or None where nothing was decided; shadow: what the
    rule said in the forced twin; says: a sentence about it."""

    verdict: str | None
    shadow: str | None
    says: str


@dataclass(frozen=True, slots=True)
class Lane:
    """The calls of one branch on one stage, a call a step."""

    label: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One value a step, not negative, or None where there is none. label: what they are; says: each in words."""

    label: str
    values: tuple[float | None, ...]
    says: tuple[str, ...]


def ticks(top: float, most: int = MOST_TICKS) -> tuple[float, ...]:
    """0 and at most `most` equal distances of 1, 2 or 5 times a power of ten, up to `top` or just above."""
    if top <= 0:
        return (0.0,)
    power = floor(log10(top / most))
    steps = ((1, power), (2, power), (5, power), (1, power + 1))
    counts = (next(n for n in count(1) if _times(n * digit, exponent) >= top) for digit, exponent in steps)
    digit, exponent, distances = next((*step, n) for step, n in zip(steps, counts, strict=True) if n <= most)
    return tuple(_times(n * digit, exponent) for n in range(distances + 1))


def step_ticks(steps: int, most: int = 10) -> range:
    """The steps that are numbered: every first, second, fifth, tenth, ..."""
    every = next(digit * 10**power for power in range(9) for digit in (1, 2, 5) if steps <= most * digit * 10**power)
    return range(0, steps, every)


def cell_width(steps: int) -> float:
    return min(WIDEST_CELL, (WIDTH - LEFT - RIGHT) / steps)


def middle(step: int, steps: int) -> float:
    """The x of a step."""
    return LEFT + (step + 0.5) * cell_width(steps)


def height_of(value: float, top: float) -> float:
    """How far above the curve's foot a value lies."""
    return value / top * CURVE if top else 0.0


def spans(experts: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each expert with its first step, and the step behind its last."""
    starts = [step for step, expert in enumerate(experts) if step == 0 or expert != experts[step - 1]]
    return [(experts[start], start, end) for start, end in zip(starts, [*starts[1:], len(experts)], strict=True)]


def plot(title: str, says: str, experts: Sequence[str], lanes: Sequence[Lane], curve: Curve | None) -> Markup:
    """A lane for each branch and stage, a column for each step; below them the curve. `experts`: one a step."""
    foot = HEAD + LANE * len(lanes)
    bottom = foot if curve is None else foot + GAP + CURVE
    parts = [
        *_experts(spans(experts), len(experts), bottom),
        *_lanes(lanes, len(experts)),
        *(() if curve is None else _curve(curve, len(experts), bottom)),
        *_steps(len(experts), bottom),
    ]
    return Markup(
        '<svg class="plot" viewBox="0 0 {width:g} {height:g}" role="img"><title>{title}</title><desc>{says}</desc>'
        "{parts}</svg>"
    ).format(width=WIDTH, height=bottom + 18, title=title, says=says, parts=Markup("").join(parts))


def _lanes(lanes: Sequence[Lane], steps: int) -> Iterator[Markup]:
    width = cell_width(steps)
    gap = min(2.0, width / 5)
    for row, lane in enumerate(lanes):
        top = HEAD + LANE * row
        yield _text(LEFT - 6, top + CELL / 2 + 3.5, lane.label, "end")
        for step, call in enumerate(lane.calls):
            kind = {"compute": "computed", "reuse": "reused"}.get(call.verdict or "", "absent")
            yield Markup(
                '<g><title>{says}</title><rect class="{kind}" x="{x:.2f}" y="{y:g}" width="{w:.2f}" height="{h:g}"/>'
            ).format(says=call.says, kind=kind, x=LEFT + step * width + gap / 2, y=top, w=width - gap, h=CELL)
            if call.shadow == "reuse":
                yield Markup('<circle class="forced" cx="{x:.2f}" cy="{y:g}" r="{r:.2f}"/>').format(
                    x=middle(step, steps), y=top + CELL / 2, r=min(3.0, width * 0.3)
                )
            yield Markup("</g>")


def _curve(curve: Curve, steps: int, foot: float) -> Iterator[Markup]:
    marks = ticks(max((value for value in curve.values if value is not None), default=0.0))
    right = LEFT + cell_width(steps) * steps
    yield _text(LEFT, foot - CURVE - 6, curve.label)
    for mark in marks:
        y = foot - height_of(mark, marks[-1])
        yield Markup('<line class="grid" x1="{a:g}" x2="{b:.2f}" y1="{y:.2f}" y2="{y:.2f}"/>').format(
            a=LEFT, b=right, y=y
        )
        yield _text(LEFT - 6, y + 3.5, f"{mark:g}", "end")
    points = [
        None if value is None else (middle(step, steps), foot - height_of(value, marks[-1]))
        for step, value in enumerate(curve.values)
    ]
    for line in _unbroken(points):
        drawn = " ".join(f"{x:.2f},{y:.2f}" for x, y in line)
        yield Markup('<polyline class="curve" points="{drawn}"/>').format(drawn=drawn)
    for point, says in zip(points, curve.says, strict=True):
        if point is not None:
            yield Markup(
                '<circle class="point" cx="{x:.2f}" cy="{y:.2f}" r="{r:.2f}"><title>{says}</title></circle>'
            ).format(x=point[0], y=point[1], r=min(2.5, cell_width(steps) * 0.3), says=says)


def _unbroken(points: Sequence[tuple[float, float] | None]) -> Iterator[list[tuple[float, float]]]:
    """The stretches between missing points: a line across one would show what was not measured."""
    line: list[tuple[float, float]] = []
    for point in (*points, None):
        if point is not None:
            line.append(point)
        elif line:
            yield line
            line = []


def _experts(found: Sequence[tuple[str, int, int]], steps: int, bottom: float) -> Iterator[Markup]:
    """Names on either side of each boundary; the first reaches into the margin, so that one step is room enough."""
    for (before, *_), (behind, start, _) in pairwise(found):
        x = LEFT + start * cell_width(steps)
        yield Markup('<line class="boundary" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{y:g}"/>').format(x=x, y=bottom)
        yield _text(x - 4, 9, f"{before} noise", "end")
        yield _text(x + 4, 9, f"{behind} noise")


def _steps(steps: int, bottom: float) -> Iterator[Markup]:
    for step in step_ticks(steps):
        yield _text(middle(step, steps), bottom + 13, str(step), "middle")
    yield _text(LEFT - 6, bottom + 13, "step", "end")


def _text(x: float, y: float, words: str, anchor: str = "start") -> Markup:
    return Markup('<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{words}</text>').format(
        x=x, y=y, words=words, anchor=anchor
    )


def _times(digits: int, exponent: int) -> float:
    """From decimal digits, so that a label is 0.3 and not 0.30000000000000004."""
    return float(f"{digits}e{exponent}")
