"""The frontier of a search as inline SVG: quality against work, a dot a candidate, with the gate as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from oracle.report.plots import ticks

WIDTH, HEIGHT = 460.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 10.0, 24.0, 34.0
HIGHEST = 3.0
"""In limits: what is worse than so many times the gate is drawn at the top, and its words say where it really is."""


@dataclass(frozen=True, slots=True)
class Dot:
    """x: a share in 0..1. y: not negative, less is better. kind: `selected`, `passed`, `failed` or `control`."""

    x: float
    y: float
    kind: str
    says: str


def frontier(across: str, up: str, dots: Sequence[Dot], limit: float) -> Markup:
    """Less of both is better. limit: the gate, as a line."""
    top = max(ticks(min(max((dot.y for dot in dots), default=limit), HIGHEST * limit)))
    parts = [*_axes(across, up, top), *_gate(limit, top), *(_dot(dot, top) for dot in _in_order(dots))]
    return Markup(
        '<svg class="plot frontier" viewBox="0 0 {w:g} {h:g}" role="img"><title>{up} against {across}</title>'
        "{parts}</svg>"
    ).format(w=WIDTH, h=HEIGHT, up=up, across=across, parts=Markup("").join(parts))


def _in_order(dots: Sequence[Dot]) -> list[Dot]:
    """The selected one on top of all."""
    return sorted(dots, key=lambda dot: dot.kind == "selected")


def _x(value: float) -> float:
    return LEFT + value * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - min(value / top, 1.0) * (HEIGHT - TOP - BOTTOM)


def _axes(across: str, up: str, top: float) -> Iterator[Markup]:
    for mark in ticks(top):
        yield Markup('<line class="grid" x1="{a:g}" x2="{b:g}" y1="{y:.2f}" y2="{y:.2f}"/>').format(
            a=LEFT, b=WIDTH - RIGHT, y=_y(mark, top)
        )
        yield _text(LEFT - 6, _y(mark, top) + 3.5, f"{mark:g}", "end")
    for mark in ticks(1.0):
        yield _text(_x(mark), HEIGHT - BOTTOM + 14, f"{mark:g}", "middle")
    yield _text(WIDTH - RIGHT, HEIGHT - 6, across, "end")
    yield _text(2, 10, up)


def _gate(limit: float, top: float) -> Iterator[Markup]:
    yield Markup('<line class="boundary" x1="{a:g}" x2="{b:g}" y1="{y:.2f}" y2="{y:.2f}"/>').format(
        a=LEFT, b=WIDTH - RIGHT, y=_y(limit, top)
    )
    yield _text(WIDTH - RIGHT, _y(limit, top) - 4, f"gate {limit:g}", "end")


def _dot(dot: Dot, top: float) -> Markup:
    size = 5.0 if dot.kind == "selected" else 3.2
    return Markup(
        '<circle class="dot {kind}" cx="{x:.2f}" cy="{y:.2f}" r="{r:g}"><title>{says}</title></circle>'
    ).format(kind=dot.kind, x=_x(dot.x), y=_y(dot.y, top), r=size, says=dot.says)


def _text(x: float, y: float, words: str, anchor: str = "start") -> Markup:
    return Markup('<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{words}</text>').format(
        x=x, y=y, words=words, anchor=anchor
    )
