"""Each recorded decision is the one that its rule makes of the recorded numbers, or the comparison says where not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from oracle.evidence.probe import recording
from oracle.evidence.reader import Trace, open_trace
from oracle.verdict.align import Aligned, DecisionKey, align
from oracle.verdict.compare import compare
from oracle.verdict.decisions import FORCED_ENDS
from oracle.verdict.finding import Finding
from oracle.verdict.replayed import check_replay
from suites.cached import mounted
from suites.support import defaults, load_engine
from suites.traced import ASKED, Event, edited, record_trace, with_manifest
from wanref.caching.base import Begin, StackCall, identity_of
from wanref.caching.profile import CacheProfile, write_profile
from wanref.caching.spec import METHODS, parse_cache
from wanref.caching.teacache import LiveRule
from wanref.pipeline import WanReference
from wanref.plan import latents_shape
from wanref.request import Request

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu

LONG = replace(ASKED, steps=8, output_type="latent")
TEACACHE = "teacache:coefficients=1/0,dialect={},signal={},threshold={}"
THRESHOLDS = {"timestep_projection": 0.6, "timestep_embedding": 1.5, "modulated_input": 0.2}
LIVE = TEACACHE.format("vllm-omni", "modulated_input", 0.2)
PLANNED = TEACACHE.format("teacache", "timestep_projection", 0.6) + ",first=1"
DBCACHE = "cache-dit:threshold=0.1,max_warmup_steps="
CACHES = {
    **{f"{d}, {signal}": TEACACHE.format(d, signal, THRESHOLDS[signal]) for d, signal in FORCED_ENDS},
    "a published table": "teacache:coefficients=t2v-1.3b,threshold=200,sign=abs,first=1",
    "a clamped sum": "teacache:coefficients=1/-0.2,threshold=0.2,sign=clamp,first=1",
    "a capped sum": PLANNED.replace("0.6", "0.3") + ",cap=0.5,last=2",
    "another eps, linear reuse": LIVE + ",eps=0.5,reuse=linear",
    "warm-up": DBCACHE + "3",
    "no warm-up": DBCACHE + "0",
    "a cap": DBCACHE + "1,max_cached_steps=2",
    "a cap in a row": DBCACHE + "1,max_continuous_cached_steps=1",
    "a dynamic mask": DBCACHE + "4,mask=11010011",
    "a static mask": DBCACHE + "4,mask=11010011,mask_policy=static",
    "all is below": "cache-dit:threshold=1,max_warmup_steps=2",
    "two blocks before, one behind": DBCACHE + "1,fn=2,bn=1",
    "TaylorSeer": DBCACHE + "2,taylorseer_order=2",
    "a given schedule": "fixed:steps=0.cond=2-3+6/*.uncond=5,reuse=linear",
}


def record(
    engine: WanReference,
    folder: Path,
    cache: str,
    forced: bool = False,
    requests: Sequence[Request] = (LONG,),
    level: str = "decisions",
) -> Trace:
    """Recorded in this process, on one rank."""
    with mounted(engine, parse_cache(cache, forced)), recording(engine, folder, level):  # type: ignore[arg-type]
        for request in requests:
            engine(request)
    return open_trace(folder)


@pytest.fixture(scope="module")
def single(tiny: Callable[..., Path]) -> WanReference:
    return load_engine(tiny(), defaults=defaults())


@pytest.fixture(scope="module")
def dual(tiny: Callable[..., Path]) -> WanReference:
    return load_engine(tiny(layout="dual"), defaults=defaults())


@pytest.fixture(scope="module")
def recorded(single: WanReference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """Whole runs, for the comparison: one that decides by its hidden states, and its forced twin."""
    folder = tmp_path_factory.mktemp("traces")
    return {
        "cached": record(single, folder / "cached", LIVE, level="digest"),
        "forced": record(single, folder / "forced", LIVE, forced=True, level="digest"),
    }


def otherwise(aligned: Aligned, key: DecisionKey, **changes: Any) -> Aligned:
    """As if one decision had been recorded otherwise."""
    decisions = {**aligned.decisions, key: replace(aligned.decisions[key], **changes)}
    return replace(aligned, decisions=decisions)


def with_options(aligned: Aligned, **options: str | None) -> Aligned:
    """As if the run had been asked for with other options; None takes one away."""
    cache = aligned.manifest["cache"]
    changed = {name: value for name, value in {**cache["options"], **options}.items() if value is not None}
    manifest = {**aligned.manifest, "cache": {**cache, "options": changed}}
    return replace(aligned, trace=replace(aligned.trace, manifest=manifest))


def said(aligned: Aligned) -> list[str]:
    return [f"{finding.layer}: {finding}" for finding in check_replay(aligned)]


def places(findings: Sequence[Finding]) -> list[tuple[int, int | None, str | None, int | None]]:
    return [(f.spot.request, f.spot.step, f.spot.branch, f.spot.stage) for f in findings]


def check_each_decision(aligned: Aligned) -> None:
    """Nothing is wrong; and each verdict and number in turn, recorded otherwise, is found at its own call, alone."""
    assert said(aligned) == []
    assert {decision.ruled for decision in aligned.decisions.values()} == {"compute", "reuse"}
    for key, decision in aligned.decisions.items():
        other = "compute" if decision.ruled == "reuse" else "reuse"
        wrong = [{"verdict" if decision.shadow is None else "shadow": other}]
        for name in ("threshold", "accumulated_before", "rescaled", "accumulated_after"):
            if (number := getattr(decision, name)) is not None:
                wrong.append({name: float(np.nextafter(number, np.inf))})
        for changes in wrong:
            findings = list(check_replay(otherwise(aligned, key, **changes)))
            assert places(findings) == [key], changes
            assert (findings[0].layer, findings[0].cause) == ("decisions", "decision")


@pytest.mark.parametrize("forced", [False, True], ids=["cached", "forced"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_run_is_replayed_call_by_call(single: WanReference, tmp_path: Path, cache: str, forced: bool) -> None:
    check_each_decision(align(record(single, tmp_path / "t", CACHES[cache], forced)))


@pytest.mark.parametrize(
    "cache",
    [
        LIVE + ",coefficients_low=0.3/0.01",
        PLANNED + ",coefficients_low=0.5/0",
        "cache-dit:threshold=0.1,max_warmup_steps=1,low_threshold=0.2,low_max_continuous_cached_steps=1",
    ],
)
def test_each_expert_is_replayed_by_its_own_options(dual: WanReference, tmp_path: Path, cache: str) -> None:
    request = replace(LONG, flow_shift=6.0)
    aligned = align(record(dual, tmp_path / "t", cache, requests=[request]))
    assert {decision.expert for decision in aligned.decisions.values()} == {"high", "low"}
    check_each_decision(aligned)
    own, low = ("low_threshold", "0.1") if "low_threshold" in cache else ("coefficients_low", "1/0")
    findings = list(check_replay(with_options(aligned, **{own: low})))
    assert {(finding.spot.expert, finding.spot.branch) for finding in findings} == {("low", "cond"), ("low", "uncond")}


def test_an_expert_without_options_of_its_own_has_the_librarys_and_the_engines_defaults(
    dual: WanReference, tmp_path: Path
) -> None:
    """The low-noise expert's warm-up is 2 steps; the high-noise expert has 8, and never reuses."""
    request = replace(LONG, steps=12, flow_shift=3.0)
    aligned = align(record(dual, tmp_path / "t", "cache-dit:low_threshold=0.3", requests=[request]))
    check_each_decision(aligned)
    assert {d.expert for d in aligned.decisions.values() if d.verdict == "reuse"} == {"low"}
    assert said(with_options(aligned, low_threshold=None)) != []


def test_every_request_of_a_trace_is_replayed_from_nothing(single: WanReference, tmp_path: Path) -> None:
    requests = (LONG, replace(LONG, steps=5), replace(LONG, guidance_scale=1.0))
    check_each_decision(align(record(single, tmp_path / "t", LIVE + ",last=1", requests=requests)))


# A profile: options of each stage, and a range in which they were calibrated.


def profile(folder: Path, engine: WanReference, topology: str, options: dict[str, Any]) -> str:
    """A TeaCache profile for LONG in a topology, as a campaign would leave one."""
    plan = engine._plan(LONG)
    shape = latents_shape(plan.request, engine.checkpoint)
    begin = Begin(plan.schedule, engine.place, engine.stages, shape, engine.dtype, engine.device)
    identity = replace(identity_of(begin, engine.checkpoint.identity()), topology=topology)
    write_profile(folder / "profile.json", CacheProfile("teacache", options, identity, "this test", True))
    return str(folder / "profile.json")


def test_a_profile_is_replayed_by_each_stages_coefficients_and_range(
    ranks: RankPool, tiny: Callable[..., Path], single: WanReference, tmp_path: Path
) -> None:
    options = {
        "dialect": "vllm-omni",
        "coefficients": [[1.0, 0.0], [0.5, 0.125, 0.0]],
        "ranges": {"high": [[0.0, 0.1], [0.06, 0.3]]},
        "threshold": 0.2,
        "first": 2.0,
        "cap": None,
    }
    cache = profile(tmp_path, single, "pp2cfg1", options)
    trace = record_trace(ranks, tiny(), tmp_path / "t", "pp2cfg1", cache, level="decisions", requests=[LONG])
    aligned = align(trace)
    check_each_decision(aligned)
    guarded = {(d.stage, d.branch) for d in aligned.decisions.values() if d.reason == "range_guard"}
    assert guarded == {(stage, branch) for stage in (0, 1) for branch in ("cond", "uncond")}
    swapped = with_options(aligned, coefficients=str(options["coefficients"][::-1]))
    assert {(finding.spot.stage, finding.spot.rank) for finding in check_replay(swapped)} == {(0, 0), (1, 1)}
    unguarded = list(check_replay(with_options(aligned, ranges="{'high': [[0.0, 9.0], [0.06, 0.3]]}")))
    first = min(d.step for d in aligned.decisions.values() if (d.stage, d.reason) == (0, "range_guard"))
    assert places(unguarded) == [(0, first, "cond", 0), (0, first, "uncond", 0)]


# What a comparison says of a run that did not keep to its rule.


def check(reference: Trace, candidate: Trace, step: int, branch: str, says: str) -> None:
    verdict = compare(reference, candidate, "cached")
    assert verdict.layer == "decisions", verdict.sentence
    assert verdict.sentence.startswith(f"rank 0, stage 0, step {step}, {branch}: {says}"), verdict.sentence
    assert {finding.layer for finding in verdict.findings} == {"decisions"}


def change(trace: Trace, folder: Path, step: int, branch: str, **changes: Any) -> Trace:
    """A copy of a trace in which one decision has other fields; None takes one away."""

    def edit(event: Event) -> Event:
        if event["kind"] == "decision" and (event["step"], event["branch"]) == (step, branch):
            event.update(changes)
            return {name: value for name, value in event.items() if value is not None}
        return event

    return edited(trace, folder, edit)


def test_an_edited_verdict_is_found_by_the_rule_alone(recorded: dict[str, Trace], tmp_path: Path) -> None:
    """What was skipped and whose residual it was all fit: the reuse is real, and the rule is against it."""
    assert compare(recorded["forced"], recorded["cached"], "cached").holds
    fewer = change(recorded["cached"], tmp_path / "t", 3, "uncond", signal=0.9)
    check(recorded["forced"], fewer, 3, "uncond", "reused, though the rule computes here (accumulated 1.")
    by_mask = with_manifest(
        recorded["cached"],
        tmp_path / "m",
        cache={**recorded["cached"].manifest["cache"], "options": {"coefficients": "1/0", "threshold": "0.2"}},
    )
    check(recorded["forced"], by_mask, 1, "cond", "reused, though the rule computes here (of 8 calls the first 5")


def test_an_edited_signal_or_accumulator_is_found_where_the_rule_goes_by_it(
    recorded: dict[str, Trace], tmp_path: Path
) -> None:
    cached, forced = recorded["cached"], recorded["forced"]
    check(forced, change(cached, tmp_path / "a", 2, "cond", signal=0.01), 2, "cond", "rescaled is 0.0")
    check(
        forced, change(cached, tmp_path / "b", 2, "cond", accumulated_after=0.5), 2, "cond", "accumulated_after is 0.5"
    )
    check(forced, change(cached, tmp_path / "c", 2, "uncond", threshold=0.3), 2, "uncond", "threshold is 0.3, and 0.2")
    lost = change(cached, tmp_path / "d", 2, "cond", signal=None)
    check(forced, lost, 2, "cond", "no change of the signal was recorded for call 2")


def test_a_forced_run_is_held_to_the_verdicts_that_were_overridden(recorded: dict[str, Trace], tmp_path: Path) -> None:
    forced = recorded["forced"]
    later = change(forced, tmp_path / "a", 4, "cond", shadow="reuse")
    check(forced, later, 4, "cond", "would have reused, though the rule computes here (accumulated 0.2")
    check(forced, change(forced, tmp_path / "b", 2, "cond", shadow="compute"), 2, "cond", "would have computed, though")
    unsaid = change(forced, tmp_path / "c", 2, "cond", shadow=None)
    check(forced, unsaid, 2, "cond", "the rule's own verdict, which was overridden, is not recorded")
    aligned = otherwise(align(forced), (0, 2, "cond", 0), verdict="reuse")
    assert said(aligned) == [
        "decisions: rank 0, stage 0, step 2, cond: reused, though every call was to be forced to compute"
    ]


def test_a_verdict_that_was_overridden_in_a_cached_run_is_found(recorded: dict[str, Trace], tmp_path: Path) -> None:
    """A shadow of the right verdict does not hide that another was carried out."""
    hidden = otherwise(align(recorded["cached"]), (0, 2, "cond", 0), verdict="compute", shadow="reuse")
    assert places(list(check_replay(hidden))) == [(0, 2, "cond", 0)]


def test_an_accumulator_that_leaks_from_another_branch_is_found_even_where_the_reference_has_it_too(
    single: WanReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = LiveRule.judge

    def leaking(rule: LiveRule, call: StackCall) -> Any:
        states, branch = rule.states, call.where.branch
        if call.where.step.index == 2 and branch == "uncond":
            states["high", "uncond"].accumulated = states["high", "cond"].accumulated
        return judge(rule, call)

    monkeypatch.setattr(LiveRule, "judge", leaking)
    trace = record(single, tmp_path / "t", LIVE, level="digest")
    verdict = compare(trace, trace, "rerun")
    assert {(f.layer, f.spot.step, f.spot.branch) for f in verdict.findings} == {("decisions", 2, "uncond")}
    assert [f.says.partition(" is ")[0] for f in verdict.findings] == [
        "accumulated_before",
        "reference: accumulated_before",
    ]


def test_a_first_call_that_was_compared_with_another_branchs_signal_is_of_foreign_provenance(
    recorded: dict[str, Trace],
) -> None:
    first = otherwise(align(recorded["cached"]), (0, 0, "uncond", 0), signal=0.05)
    (finding,) = check_replay(first)
    assert (finding.layer, finding.cause) == ("decisions", "provenance")
    assert places([finding]) == [(0, 0, "uncond", 0)]


def test_a_difference_that_dbcache_does_not_take_or_lacks_is_found(single: WanReference, tmp_path: Path) -> None:
    aligned = align(record(single, tmp_path / "t", DBCACHE + "3"))
    taken, lost = (
        otherwise(aligned, (0, 1, "cond", 0), signal=0.05),
        otherwise(aligned, (0, 4, "uncond", 0), signal=None),
    )
    why = "at which the rule does not compare: the first 3 calls are computed"
    assert said(taken) == [f"decisions: rank 0, stage 0, step 1, cond: a difference was recorded for call 1, {why}"]
    why = "at which the rule compares"
    assert said(lost) == [f"decisions: rank 0, stage 0, step 4, uncond: no difference was recorded for call 4, {why}"]


def test_a_given_schedule_that_was_not_kept_is_found(single: WanReference, tmp_path: Path) -> None:
    aligned = align(record(single, tmp_path / "t", "fixed:steps=0.cond=2-3+6/0.uncond=5"))
    for steps, branch, step, says in (
        ("0.cond=2+6/0.uncond=5", "cond", 3, "reused, though the rule computes here (steps 2, 6 reuse)"),
        ("*.*=2-3+6", "uncond", 2, "computed, though the rule reuses here (steps 2, 3, 6 reuse)"),
        ("0.cond=2-3+6/1.uncond=5", "uncond", 5, "reused, though the rule computes here (steps none reuse)"),
    ):
        expected = f"decisions: rank 0, stage 0, step {step}, {branch}: {says}"
        assert said(with_options(aligned, steps=steps)) == [expected]


# Evidence that a replay needs.


def without(aligned: Aligned, *keys: DecisionKey) -> Aligned:
    return replace(aligned, decisions={key: d for key, d in aligned.decisions.items() if key not in keys})


def test_a_decision_that_is_missing_ends_the_replay_of_its_branch_and_is_missed(recorded: dict[str, Trace]) -> None:
    aligned = align(recorded["cached"])
    says = "no decision is recorded here, so that none after it can be replayed"
    for step in (0, 3, 7):
        assert said(without(aligned, (0, step, "cond", 0))) == [f"coverage: rank 0, stage 0, step {step}, cond: {says}"]
    both = otherwise(without(aligned, (0, 3, "cond", 0)), (0, 5, "uncond", 0), verdict="compute")
    assert [line.partition(":")[0] for line in said(both)] == ["coverage", "decisions"]


def test_the_last_decisions_of_a_request_that_was_cut_short_are_not_missed(recorded: dict[str, Trace]) -> None:
    """Why it ended is coverage's to say. What it decided until then is replayed as part of its whole schedule."""
    aligned = replace(align(recorded["cached"]), outcomes={0: {0: "aborted"}})
    cut = without(aligned, *((0, step, branch, 0) for step in (5, 6, 7) for branch in ("cond", "uncond")))
    assert said(cut) == []
    assert said(with_options(cut, last="1")) == []
    assert len(said(without(cut, (0, 3, "cond", 0)))) == 1


def test_a_decision_where_the_schedule_runs_nothing_is_found(single: WanReference, tmp_path: Path) -> None:
    aligned = align(record(single, tmp_path / "t", LIVE, requests=[replace(LONG, guidance_scale=1.0)]))
    assert said(aligned) == []
    key = (0, 2, "uncond", 0)
    extra = replace(aligned, decisions={**aligned.decisions, key: aligned.decisions[0, 2, "cond", 0]})
    assert said(extra) == ["decisions: rank 0, stage 0, step 2, uncond: decided here, where the schedule runs nothing"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decay": "0.95"}, "teacache may decide by its option 'decay', which is not known here"),
        ({"low_threshold": "0.1"}, "teacache may decide by its option 'low_threshold'"),
        ({"threshold": None}, "KeyError: 'threshold'"),
        ({"threshold": "much"}, "ValueError: could not convert string to float: 'much'"),
        ({"coefficients": None}, "KeyError: 'coefficients'"),
        ({"coefficients": "magcache"}, "ValueError: could not convert"),
        ({"coefficients": "[]"}, "IndexError"),
        ({"coefficients": "t2v-14b"}, "KeyError: 'modulated_input'"),
        ({"ranges": "{'low': [[0, 1]]}"}, "KeyError: 'high'"),
        ({"ranges": "{'high'"}, "SyntaxError"),
        ({"sign": "positive"}, "ValueError: sign='positive'"),
        ({"dialect": "magcache"}, "'magcache'"),
        ({"first": "one"}, "ValueError: could not convert string to float: 'one'"),
    ],
)
def test_options_that_give_no_rule_are_missing_evidence_said_once(
    recorded: dict[str, Trace], options: dict[str, str | None], says: str
) -> None:
    (finding,) = check_replay(with_options(align(recorded["cached"]), **options))
    assert (finding.layer, finding.cause) == ("coverage", "missing evidence")
    assert says in finding.says


@pytest.mark.parametrize(
    ("cache", "options"),
    [
        (LIVE, {"eps": "7", "reuse": "cubic"}),
        (DBCACHE + "2", {"fn": "3", "bn": "2", "taylorseer_order": "4", "low_fn": "2"}),
        ("fixed:steps=*.*=2+4", {"reuse": "linear"}),
    ],
)
def test_options_that_change_no_decision_are_passed_over(
    single: WanReference, tmp_path: Path, cache: str, options: dict[str, str | None]
) -> None:
    aligned = align(record(single, tmp_path / "t", cache))
    assert said(with_options(aligned, **options)) == []
    assert said(with_options(aligned, another="1")) != []


def test_of_caches_that_are_not_known_and_runs_without_one_nothing_is_said(recorded: dict[str, Trace]) -> None:
    aligned = align(recorded["cached"])
    wrong = otherwise(aligned, (0, 2, "cond", 0), verdict="compute")

    def with_cache(cache: dict[str, Any] | None) -> Aligned:
        return replace(wrong, trace=replace(wrong.trace, manifest={**wrong.manifest, "cache": cache}))

    assert said(with_cache({"method": "magcache", "options": {}})) == []
    assert said(with_cache(None)) == []
    assert said(without(aligned, *aligned.decisions)) == []
    for method in METHODS:
        (says,) = said(with_cache({"method": method}))
        assert says.startswith(f"coverage: the whole run: {method} is named, but not by which options it decides")
