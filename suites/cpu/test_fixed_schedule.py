"""A given schedule of reuse: how it is written, what is refused, and that it is run exactly as given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from oracle.evidence.ranks import RankPool
from suites.cached import MICRO, MICRO_DUAL, decisions_on_rank, groups, output_of
from suites.scripted import begin_of, schedule_of
from suites.support import defaults, fingerprint, load_engine
from wanref.caching.error import CacheError
from wanref.caching.fixed import FixedSchedule, parse_reuse_steps
from wanref.request import Request
from wanref.topology import Topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle", steps=8, seed=3, output_type="latent")


def test_steps_are_written_by_stage_and_branch() -> None:
    assert parse_reuse_steps("0.cond=3-5+8/1.uncond=4", 2) == {
        (0, "cond"): {3, 4, 5, 8},
        (1, "uncond"): {4},
    }
    assert parse_reuse_steps("*.uncond=2/1.cond=7", 2) == {(0, "uncond"): {2}, (1, "uncond"): {2}, (1, "cond"): {7}}
    assert parse_reuse_steps("*.*=2+4", 1) == {(0, "cond"): {2, 4}, (0, "uncond"): {2, 4}}


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "0=3", "cond=3", "0.both=3", "x.cond=3", "-1.cond=3", "0.cond=", "0.cond=a", "0.cond=3-"),
        *("0.cond=-3", "0.cond=5-3", "0.cond=3+", "0.cond=\u00b2", "0.cond=1/0.cond=2", "*.*=1/0.cond=2"),
    ],
)
def test_what_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(CacheError, match="fixed: "):
        parse_reuse_steps(text, 2)


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        ("2.cond=1", r"stage 2 \(cond\) is not in topology pp2cfg1"),
        ("0.cond=9", r"does not run at steps \[9\]"),
        ("0.cond=0", "step 0, before the high-noise expert has computed there"),
        ("1.uncond=2-3", "step 3, before the low-noise expert has computed there"),
    ],
)
def test_a_schedule_that_the_request_cannot_run_is_refused(steps: str, match: str) -> None:
    schedule = schedule_of(*[("high", 1 - i / 8) for i in range(3)], *[("low", 0.5 - i / 8) for i in range(3)])
    with pytest.raises(CacheError, match=match):
        FixedSchedule(parse_reuse_steps(steps, 2))(begin_of(schedule, Topology(pp=2)))


def test_a_reuse_of_a_branch_that_does_not_run_is_refused() -> None:
    schedule = schedule_of(("high", 1.0), ("high", 0.5), scale=1.0)
    with pytest.raises(CacheError, match=r"uncond does not run at steps \[1\]"):
        FixedSchedule(parse_reuse_steps("0.uncond=1", 1))(begin_of(schedule))


def test_a_schedule_runs_exactly_as_given() -> None:
    engine = load_engine(MICRO, defaults=defaults())
    native = engine(REQUEST)
    output = output_of(engine, REQUEST, "fixed:steps=0.cond=2-3+6/0.uncond=5")
    reused = [(d.where.step.index, d.where.branch) for d in output.decisions if d.verdict == "reuse"]
    assert reused == [(2, "cond"), (3, "cond"), (5, "uncond"), (6, "cond")]
    assert len(output.decisions) == 16
    assert sum(d.computed_blocks for d in output.decisions) == 6 * (16 - 4), "block calls, counted"
    origins = {(d.where.step.index, d.where.branch): [o.step for o in d.origins] for d in output.decisions if d.origins}
    assert origins == {(2, "cond"): [1], (3, "cond"): [1], (5, "uncond"): [4], (6, "cond"): [5]}
    assert fingerprint(output.latents) != fingerprint(native.latents)
    assert fingerprint(engine(REQUEST).latents) == fingerprint(native.latents), "unmounted, it is native again"


def test_linear_reuse_runs_from_the_last_two_computed_steps() -> None:
    engine = load_engine(MICRO_DUAL, defaults=defaults())
    plain = output_of(engine, REQUEST, "fixed:steps=*.*=2+7")
    linear = output_of(engine, REQUEST, "fixed:steps=*.*=2+7,reuse=linear")
    for output, origins in ((plain, {2: [1], 7: [6]}), (linear, {2: [0, 1], 7: [5, 6]})):
        found = {d.where.step.index: [o.step for o in d.origins] for d in output.decisions if d.verdict == "reuse"}
        assert found == origins
    assert fingerprint(plain.latents) != fingerprint(linear.latents)


def test_every_stage_runs_its_own_part_of_the_schedule(ranks: RankPool) -> None:
    by_rank = ranks.run(2, decisions_on_rank, MICRO, "pp2cfg1", "fixed:steps=0.uncond=3/1.cond=3+5", REQUEST)
    for rank, expected in enumerate([{(3, "uncond")}, {(3, "cond"), (5, "cond")}]):
        assert {(d.where.step.index, d.where.branch) for d in by_rank[rank] if d.verdict == "reuse"} == expected
    at_3 = [[d.where.branch for d in decisions if d.where.step.index == 3] for decisions in by_rank]
    assert at_3 == [["uncond", "cond"]] * 2, "who reuses on stage 0 goes first, and on both stages alike"


def test_steps_are_required_and_no_other_option_is_known(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(), defaults=defaults())
    with pytest.raises(CacheError, match="steps= is missing"):
        engine.mount("fixed:reuse=plain")
    with pytest.raises(CacheError, match="'threshold' is not known"):
        engine.mount("fixed:steps=*.*=1,threshold=1")
    with pytest.raises(CacheError, match="reuse='cubic' is not accepted"):
        engine.mount("fixed:steps=*.*=1,reuse=cubic")
    assert engine.cache is None
    assert groups(engine(REQUEST).decisions) == {}
