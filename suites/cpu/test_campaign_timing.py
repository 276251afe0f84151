"""Timing: what is compared with what, in which order, and what a cache without any cost of its own would have taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.campaign import timing
from oracle.campaign.gates import check_timing
from oracle.campaign.ideal import Pace, cached_blocks, ideal_ratio, makespan, measure_pace, native_blocks
from oracle.campaign.refusal import CampaignError
from oracle.campaign.timing import RankTiming, Sample, Timing, bootstrap, summarise, time_requests, timing_of
from oracle.campaign.worth import Point, control_at, judge_worth
from oracle.evidence.ranks import RankPool
from suites.scripted import schedule_of
from suites.support import defaults, load_engine
from wanref.caching.base import Decision, Judgement, Where
from wanref.caching.spec import CacheSpec
from wanref.pipeline import WanReference
from wanref.request import Request
from wanref.topology import Branch, parse_topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle", steps=4, seed=3)
FIXED = CacheSpec("fixed", {"steps": "*.*=1+3"})
SCHEDULE = schedule_of(("high", 1.0), ("high", 0.5))
PACE = Pace(block=0.01, request=0.2)


def decide(topology: str, computed: dict[tuple[int, Branch, int], int]) -> list[Decision]:
    """Decisions by (step, branch, stage), each with so many blocks computed."""
    grid = parse_topology(topology)
    decisions = []
    for (step, branch, stage), blocks in computed.items():
        chain = 1 if grid.cfg == 2 and branch == "uncond" else 0
        where = Where(0, SCHEDULE.steps[step], branch, grid.place(chain * grid.pp + stage))
        verdict: Any = "compute" if blocks else "reuse"
        decisions.append(Decision(where, Judgement(verdict, "schedule"), verdict, False, (), blocks, 0.0, 0.0))
    return decisions


# The longest way.


@pytest.mark.parametrize(
    ("jobs", "time"),
    [([[2]], 2), ([[2], [3]], 5), ([[2, 2]], 4), ([[2, 2], [2, 2]], 6), ([[0, 2], [2, 2]], 4), ([[2, 2], [0, 2]], 6)],
)
def test_a_chain_is_a_flow_shop(jobs: list[list[int]], time: int) -> None:
    assert makespan(jobs) == time


@pytest.mark.parametrize(("topology", "blocks"), [("pp1cfg1", 16), ("pp1cfg2", 8), ("pp2cfg1", 12), ("pp2cfg2", 8)])
def test_native_blocks_on_the_longest_way(topology: str, blocks: int) -> None:
    assert native_blocks(SCHEDULE, parse_topology(topology), 4) == blocks
    unguided = schedule_of(("high", 1.0), ("high", 0.5), scale=1.0)
    assert native_blocks(unguided, parse_topology(topology), 4) == 8


def test_hits_that_nobody_waits_for_save_nothing() -> None:
    one = parse_topology("pp1cfg1")
    assert cached_blocks(decide("pp1cfg1", {(0, "cond", 0): 4, (0, "uncond", 0): 0}), one) == 4
    two = parse_topology("pp1cfg2")
    assert cached_blocks(decide("pp1cfg2", {(0, "cond", 0): 4, (0, "uncond", 0): 0}), two) == 4
    assert cached_blocks(decide("pp1cfg2", {(0, "cond", 0): 0, (0, "uncond", 0): 0}), two) == 0
    # On a chain of two stages a lone hit of the first pays, if its branch goes first.
    chain = parse_topology("pp2cfg1")
    lone = {(0, "cond", 0): 2, (0, "cond", 1): 2, (0, "uncond", 0): 0, (0, "uncond", 1): 2}
    assert cached_blocks(decide("pp2cfg1", lone), chain) == 4


def test_a_stage_whose_decisions_are_missing_is_refused() -> None:
    with pytest.raises(CampaignError, match="step 0, cond has decisions of 1 of 2 stages"):
        cached_blocks(decide("pp2cfg1", {(0, "cond", 0): 2}), parse_topology("pp2cfg1"))


def test_the_ideal_shrinks_the_blocks_and_nothing_else() -> None:
    # 12 blocks of .01 s are .6 of a request of .2 s: half of them gone leaves .7.
    assert ideal_ratio(12, 0.5, [PACE]) == pytest.approx(0.7)
    assert ideal_ratio(12, 0.5, [PACE, Pace(0.02, 0.3)]) == pytest.approx(1 - 0.5 * 12 * 0.015 / 0.3)
    with pytest.raises(CampaignError, match=r"the blocks took 1.20 of the request"):
        ideal_ratio(24, 0.5, [PACE])


# Medians and the interval.


def rank(
    seconds: Sequence[tuple[float, float]], topology: str = "pp1cfg1", decisions: Sequence[Decision] = ()
) -> RankTiming:
    samples = [Sample(native, cached, SCHEDULE, SCHEDULE, tuple(decisions)) for native, cached in seconds]
    return RankTiming(tuple(samples), PACE, topology, 4, 1, recording=False)


def test_medians_over_runs_of_the_slowest_rank() -> None:
    hits = decide("pp1cfg2", {(0, "cond", 0): 4, (1, "cond", 0): 0})
    slow = decide("pp1cfg2", {(0, "uncond", 0): 4, (1, "uncond", 0): 0})
    ranks = [
        rank([(1.0, 0.6), (1.1, 0.5), (1.2, 0.4)], "pp1cfg2", hits),
        rank([(0.9, 0.7), (1.2, 0.1), (1.3, 0.2)], "pp1cfg2", slow),
    ]
    summary = summarise(ranks)
    assert (summary.native, summary.cached) == (1.2, 0.5)
    assert summary.ratio == pytest.approx(0.5 / 1.2)
    assert summary.blocks == 0.5
    assert summary.ideal == pytest.approx(1 - 0.5 * 8 * 0.01 / 0.2)
    assert summary.low <= summary.ratio <= summary.high
    assert (summary.samples, summary.topology, summary.recording) == (3, "pp1cfg2", False)
    assert timing_of(summary.as_json()) == summary


def test_what_is_not_one_run_is_refused() -> None:
    with pytest.raises(CampaignError, match="1 ranks are not one run of pp1cfg2's 2"):
        summarise([rank([(1, 1)], "pp1cfg2")])
    with pytest.raises(CampaignError, match="2 ranks are not one run"):
        summarise([rank([(1, 1)], "pp1cfg2"), rank([(1, 1), (1, 1)], "pp1cfg2")])
    other = schedule_of(("high", 1.0))
    mixed = (Sample(1, 1, SCHEDULE, SCHEDULE, ()), Sample(1, 1, other, other, ()))
    with pytest.raises(CampaignError, match="not of one schedule"):
        summarise([replace(rank([(1, 1)] * 2), samples=mixed)])
    with pytest.raises(CampaignError, match=r"timing: .* is not one"):
        timing_of({"native": 1.0})


def test_the_interval_is_that_of_resampled_pairs() -> None:
    rng = np.random.default_rng(1)
    native = 1 + 0.05 * rng.standard_normal(15)
    cached = 0.5 * native + 0.02 * rng.standard_normal(15)
    drawn = [rng.integers(15, size=15) for _ in range(4000)]
    ratios = [np.median(cached[d]) / np.median(native[d]) for d in drawn]
    low, high = bootstrap(native, cached)
    assert (low, high) == pytest.approx(tuple(np.percentile(ratios, [2.5, 97.5])), abs=4e-3)
    assert bootstrap(native, cached) == (low, high), "the same for the same times"
    assert low < np.median(cached) / np.median(native) < high


def test_the_interval_knows_that_a_run_belongs_to_its_pair() -> None:
    # A machine that slows down slows both: the ratio of every pair is .5, and so is that of every resample of odd size.
    native = np.linspace(1, 3, 9)
    assert bootstrap(native, native / 2) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("seconds", [[1.0, 0.0], [1.0, np.nan], [1.0, np.inf], [1.0, -1.0]])
def test_seconds_that_are_none_are_refused(seconds: list[float]) -> None:
    with pytest.raises(CampaignError, match="not all finite and above 0"):
        bootstrap(np.array(seconds), np.ones(2))
    with pytest.raises(CampaignError, match="2 native and 1 cached runs are not pairs"):
        bootstrap(np.ones(2), np.ones(1))


# On an engine.


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> WanReference:
    return load_engine(tiny(), defaults=defaults())


def test_runs_alternate_and_so_does_which_comes_first(engine: WanReference, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, bool]] = []
    original = timing._time

    def spy(engine: WanReference, request: Request, cache: CacheSpec | None) -> Any:
        assert engine.observer is None
        ran.append((request.seed, cache is not None))  # type: ignore[arg-type]
        return original(engine, request, cache)

    monkeypatch.setattr(timing, "_time", spy)
    measured = time_requests(engine, [replace(REQUEST, seed=seed) for seed in (1, 2, 3)], FIXED)
    warm_up, timed = ran[:2], ran[2:]
    assert warm_up == [(1, False), (1, True)]
    assert timed == [(1, False), (1, True), (2, True), (2, False), (3, False), (3, True)]
    assert engine.cache is None
    assert not measured.recording
    assert len(measured.samples) == 3
    for sample in measured.samples:
        assert sum(decision.verdict == "reuse" for decision in sample.decisions) == 4
    summary = summarise([measured])
    assert summary.blocks == 0.5
    assert 0.5 < summary.ideal < 1
    check_timing(summary)


def test_a_timing_is_not_taken_with_recording_on(engine: WanReference) -> None:
    engine.observer = lambda event: None
    try:
        with pytest.raises(CampaignError, match="an observer is mounted on the engine"):
            time_requests(engine, [REQUEST], FIXED)
    finally:
        engine.observer = None


def test_recording_that_starts_in_the_middle_is_seen_and_refused(
    engine: WanReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = timing.measure_pace

    def leave_one_mounted(engine: WanReference, request: Request) -> Pace:
        pace = original(engine, request)
        engine.observer = lambda event: None
        return pace

    monkeypatch.setattr(timing, "measure_pace", leave_one_mounted)
    try:
        measured = time_requests(engine, [REQUEST], FIXED)
    finally:
        engine.observer = None
    with pytest.raises(CampaignError, match="recording=True is not accepted"):
        check_timing(summarise([measured]))


def test_what_cannot_be_timed_is_refused(engine: WanReference) -> None:
    for options, match in (
        ({"cache": None}, "give one of the two"),
        ({"cache": FIXED, "steps": 2}, "give one of the two"),
        ({"cache": FIXED, "requests": []}, r"requests=\[\]"),
    ):
        with pytest.raises(CampaignError, match=match):
            time_requests(engine, **({"requests": [REQUEST]} | options))  # type: ignore[arg-type]
    engine.mount(FIXED)
    try:
        with pytest.raises(CampaignError, match="cache='fixed' is mounted"):
            time_requests(engine, [REQUEST], FIXED)
    finally:
        engine.unmount()


def test_the_control_is_timed_as_fewer_steps(engine: WanReference) -> None:
    summary = summarise([time_requests(engine, [REQUEST], None, steps=1)])
    assert summary.blocks == 0.25


def time_on_rank(folder: Path, topology: str) -> RankTiming:
    return time_requests(load_engine(folder, topology, defaults=defaults()), [REQUEST], FIXED)


def test_ranks_time_one_run_together(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    summary = summarise(ranks.run(2, time_on_rank, tiny(), "pp2cfg1"))
    assert isinstance(summary, Timing)
    assert (summary.topology, summary.blocks) == ("pp2cfg1", 0.5)


def test_a_pace_is_that_of_the_blocks(engine: WanReference) -> None:
    pace = measure_pace(engine, REQUEST)
    assert 0 < 32 * pace.block < pace.request
    assert engine.observer is None


# Worth.


CONTROLS = [Point(0.2, 0.96, 0.3), Point(0.4, 0.98, 0.1)]


def test_the_control_is_linear_between_what_was_measured() -> None:
    assert control_at(0.3, CONTROLS) == Point(0.3, pytest.approx(0.97), pytest.approx(0.2))
    assert control_at(0.7, CONTROLS) == Point(0.7, pytest.approx(0.99), pytest.approx(0.05))
    assert control_at(0.1, CONTROLS) == Point(0.1, 0.96, 0.3)
    assert control_at(1.2, CONTROLS) == Point(1.2, 1.0, 0.0)
    with pytest.raises(CampaignError, match="every campaign runs the control"):
        control_at(0.3, [])


@pytest.mark.parametrize(
    ("ssim", "temporal", "verdict"),
    [
        (0.971, 0.199, "qualified"),
        (0.971, 0.201, "qualified, not worth it"),
        (0.969, 0.199, "qualified, not worth it"),
        (0.5, 0.5, "qualified, not worth it"),
    ],
)
def test_a_cache_has_to_beat_the_control_in_both(ssim: float, temporal: float, verdict: str) -> None:
    assert judge_worth(Point(0.3, ssim, temporal), CONTROLS) == verdict


def test_what_is_just_the_control_is_not_worth_it() -> None:
    assert judge_worth(CONTROLS[0], CONTROLS) == "qualified, not worth it"
