"""The arithmetic of the plots, and that of what they show: how far a cached run's latents went."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.evidence.reader import Trace, open_trace
from oracle.report.card import describe
from oracle.report.plots import (
    CURVE,
    LEFT,
    MOST_TICKS,
    RIGHT,
    WIDTH,
    Call,
    Curve,
    Lane,
    cell_width,
    middle,
    plot,
    spans,
    step_ticks,
    ticks,
)
from oracle.verdict.align import align
from oracle.verdict.divergence import Divergence, measure_divergence
from suites.traced import ASKED, LIVE, Event, edited, record_trace, with_manifest

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

STEPS = ASKED.steps or 0
CALL = Call("compute", None, "")


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0.0, (0.0,)),
        (1.0, (0.0, 0.5, 1.0)),
        (0.3, (0.0, 0.1, 0.2, 0.3)),
        (0.31, (0.0, 0.1, 0.2, 0.3, 0.4)),
        (5e-7, (0.0, 2e-7, 4e-7, 6e-7)),
        (17.0, (0.0, 5.0, 10.0, 15.0, 20.0)),
    ],
)
def test_ticks_are_round_numbers_up_to_the_largest_value_or_just_above(top: float, expected: tuple[float, ...]) -> None:
    assert ticks(top) == expected


@given(st.floats(1e-12, 1e12))
def test_ticks_reach_every_value_with_few_equal_distances_and_no_room_to_spare(top: float) -> None:
    marks = ticks(top)
    distance = marks[1]
    assert 2 <= len(marks) <= MOST_TICKS + 1
    assert marks[-2] < top <= marks[-1]
    assert f"{distance:e}".split("e")[0] in ("1.000000", "2.000000", "5.000000")
    assert all(math.isclose(mark, n * distance) for n, mark in enumerate(marks))


@pytest.mark.parametrize(
    ("steps", "every"), [(1, 1), (8, 1), (10, 1), (11, 2), (40, 5), (50, 5), (51, 10), (1000, 100)]
)
def test_at_most_ten_steps_are_numbered(steps: int, every: int) -> None:
    assert list(step_ticks(steps)) == list(range(0, steps, every))
    assert len(step_ticks(steps)) <= 10


@pytest.mark.parametrize("steps", [1, 8, 50, 400])
def test_every_step_has_its_place_within_the_width(steps: int) -> None:
    places = [middle(step, steps) for step in range(steps)]
    assert np.allclose(np.diff(places), cell_width(steps))
    assert places[0] - cell_width(steps) / 2 == pytest.approx(LEFT)
    assert places[-1] + cell_width(steps) / 2 <= WIDTH - RIGHT + 1e-9


def test_experts_have_their_first_step_and_the_one_behind_their_last() -> None:
    assert spans(["high"] * 3 + ["low"] * 2) == [("high", 0, 3), ("low", 3, 5)]
    assert spans(["low"]) == [("low", 0, 1)]


def drawn(values: tuple[float | None, ...], experts: tuple[str, ...]) -> ElementTree.Element:
    lane = Lane("<cond> & more", tuple(CALL for _ in values))
    curve = Curve("distance", values, tuple(f"step {step}" for step in range(len(values))))
    return ElementTree.fromstring(str(plot("a <b>", "says", experts, [lane], curve)))


def test_a_curve_has_its_points_at_the_height_of_their_values_and_no_line_across_a_gap() -> None:
    svg = drawn((0.0, 0.1, None, 0.4, 0.2), ("high",) * 5)
    foot = max(float(line.attrib["y1"]) for line in svg.iter("line"))
    lines = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in svg.iter("polyline")
    ]
    assert [len(line) for line in lines] == [2, 2]
    heights = {round(x, 2): (foot - y) / CURVE for line in lines for x, y in line}
    assert heights == {
        round(middle(step, 5), 2): pytest.approx(value / 0.4, abs=1e-3)
        for step, value in ((0, 0.0), (1, 0.1), (3, 0.4), (4, 0.2))
    }
    points = [each for each in svg.iter("circle") if each.attrib["class"] == "point"]
    assert [point.findtext("title") for point in points] == ["step 0", "step 1", "step 3", "step 4"]
    assert [text.text for text in svg.iter("text")].count("<cond> & more") == 1


def test_the_boundary_stands_between_the_last_step_of_one_expert_and_the_first_of_the_next() -> None:
    (line,) = [
        each for each in drawn((0.0,) * 5, ("high",) * 3 + ("low",) * 2).iter("line") if "boundary" in str(each.attrib)
    ]
    x = float(line.attrib["x1"])
    assert x == pytest.approx((middle(2, 5) + middle(3, 5)) / 2, abs=0.01)
    assert not [each for each in drawn((0.0,) * 5, ("high",) * 5).iter("line") if "boundary" in str(each.attrib)]


# Divergence.


@pytest.fixture(scope="module")
def twins(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    folder = tmp_path_factory.mktemp("twins")
    forced = record_trace(ranks, tiny(), folder / "forced", cache=LIVE, forced=True)
    return forced, record_trace(ranks, tiny(), folder / "cached", cache=LIVE)


def latents(trace: Trace) -> list[np.ndarray]:
    aligned = align(trace)
    return [aligned.array(key, 0) for key in aligned.ordered if key.block == "scheduler"]


def measured(forced: Trace, cached: Trace) -> Divergence:
    divergence = measure_divergence(align(forced), align(cached))
    assert divergence is not None
    return divergence


def test_the_distance_is_that_of_the_latents_relative_to_the_twins(twins: tuple[Trace, Trace]) -> None:
    forced, cached = twins
    divergence = measured(forced, cached)
    pairs = list(zip(latents(forced), latents(cached), strict=True))
    expected = [float(np.sqrt(np.sum((c - f) ** 2.0)) / np.sqrt(np.sum(f**2.0))) for f, c in pairs]
    assert divergence.measure == "distance"
    assert divergence.values == pytest.approx(expected, rel=1e-5)
    assert divergence.differs == tuple(value > 0 for value in expected)
    first = expected.index(next(value for value in expected if value))
    assert 0 < first == divergence.first
    assert describe(divergence) == (
        f"Latents differ from the forced twin's from step {first} on; at the end they are {expected[-1]:.3g} away, "
        "relative to the twin's (Euclidean distance)."
    )


def test_at_level_stats_the_difference_of_rms_never_exceeds_the_distance(
    twins: tuple[Trace, Trace], tmp_path: Path
) -> None:
    exact = measured(*twins)
    forced, cached = (with_manifest(each, tmp_path / each.folder.name, level="stats") for each in twins)
    divergence = measured(forced, cached)
    rms = [[float(np.sqrt(np.mean(each.astype(float) ** 2))) for each in latents(trace)] for trace in twins]
    assert divergence.measure == "rms"
    assert divergence.values == pytest.approx([abs(c - f) / f for f, c in zip(*rms, strict=True)], rel=1e-4, abs=1e-6)
    assert all((a or 0) <= (b or 0) * (1 + 1e-6) for a, b in zip(divergence.values, exact.values, strict=True))
    assert divergence.differs == exact.differs
    assert "the distance is at least that" in describe(divergence)


def test_at_level_digest_only_the_first_step_that_differs_is_known(twins: tuple[Trace, Trace], tmp_path: Path) -> None:
    exact = measured(*twins)
    digest = with_manifest(twins[1], tmp_path / "digest", level="digest")
    divergence = measured(twins[0], digest)
    assert divergence.measure == "digest"
    assert divergence.values == tuple(None if differs else 0.0 for differs in exact.differs)
    assert divergence.first == exact.first
    assert "Only their digests were recorded" in describe(divergence)
    without = with_manifest(twins[1], tmp_path / "decisions", level="decisions")
    assert measure_divergence(align(twins[0]), align(without)) is None


def test_latents_that_are_lost_or_not_finite_have_no_distance(twins: tuple[Trace, Trace], tmp_path: Path) -> None:
    forced, cached = twins
    last = STEPS - 1
    lost = Path(shutil.copytree(cached.folder, tmp_path / "lost"))
    (lost / f"request000.rank0.step{last:04d}.safetensors").unlink()
    divergence = measured(forced, open_trace(lost))
    assert divergence.values[last] is None
    assert divergence.values[:last] == measured(forced, cached).values[:last]

    def not_finite(event: Event) -> Event:
        return {**event, "nan": 1} if event["kind"] == "tensor" and event["step"] == last else event

    infected = edited(cached, tmp_path / "infected", not_finite)
    manifest = json.loads((infected.folder / "manifest.json").read_text())
    (infected.folder / "manifest.json").write_text(json.dumps({**manifest, "level": "stats"}))
    assert measured(forced, open_trace(infected.folder)).values[last] is None
    same = measured(forced, forced)
    assert same.first is None
    assert describe(same) == "After every step the latents are those of the forced twin, byte by byte."
