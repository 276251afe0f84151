"""Runs that may be right, and records of them that are not."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from oracle.evidence.probe import Probe
from oracle.evidence.trace import StepRecord
from oracle.evidence.writer import TraceWriter
from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around
from oracle.faults.scenario import FIXED, LIVE, cached, rerun, topology, twin
from oracle.verdict.finding import Cause
from wanref.caching.base import Decision, StackCall
from wanref.caching.teacache import LiveRule

Planted = AbstractContextManager[None]
MISSING: Cause = "missing evidence"


def _all_warmup() -> Planted:
    def judge(original: Any, rule: Any, call: Any) -> Any:
        return replace(original(rule, call), verdict="compute", reason="warmup", accumulated_after=0.0)

    return around(LiveRule, "judge", judge)


def _blocks_miscounted() -> Planted:
    def decided(original: Any, call: Any, *args: Any) -> Any:
        decision = original(call, *args)
        return replace(decision, computed_blocks=3) if call.where.step.index == 2 else decision

    return around(StackCall, "decided", decided)


def _rank_writes_nothing() -> Planted:
    return around(TraceWriter, "write", lambda original, *args: None if HERE.at(rank=1) else original(*args))


def _recording_ends_early() -> Planted:
    full: list[bool] = []

    def write(original: Any, writer: Any, record: Any) -> None:
        if isinstance(record, StepRecord) and record.step == 4 and HERE.at(rank=1):
            full.append(True)
        if not full:
            original(writer, record)

    return around(TraceWriter, "write", write)


def _decision_lost() -> Planted:
    def see(original: Any, probe: Any, event: Any) -> None:
        if not (isinstance(event, Decision) and HERE.at(rank=1, step=2, branch="uncond")):
            original(probe, event)

    return around(Probe, "__call__", see)


def _value_of_the_wrong_time() -> Planted:
    seen: list[Any] = []

    def tensor(original: Any, probe: Any, key: Any, value: Any, *args: Any) -> None:
        if key.block == 1:
            seen.append(value.clone())
        late = key.block == 1 and key.step == 2 and key.branch == "uncond"
        original(probe, key, seen[0] if late else value, *args)

    return around(Probe, "tensor", tensor)


FAULTS = (
    Fault(
        "record-cache-disconnected",
        "measurement",
        "M1: omni#4868",
        "all steps are warm-up: a test of a cache passes without a hit",
        twin(cached("pp1cfg1", LIVE)),
        Points(MISSING),
        _all_warmup,
        caught_by="test_caching_lifecycle.py",
    ),
    Fault(
        "record-blocks-miscounted",
        "measurement",
        "M3: cdit#370, cdit#358",
        "the report counts other blocks than those that ran",
        rerun(cached("pp1cfg1", FIXED)),
        Points(MISSING, rank=0, step=2, branch="cond"),
        _blocks_miscounted,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "record-rank-writes-nothing",
        "measurement",
        "M3: sgl#36767",
        "one rank's record is lost",
        topology("pp2cfg1"),
        Points(MISSING, rank=1, step=0, branch="cond", block=3),
        _rank_writes_nothing,
    ),
    Fault(
        "record-ends-early",
        "measurement",
        "M3: sgl#36767",
        "one rank's record ends before its request does",
        topology("pp2cfg1"),
        Points(MISSING, rank=1, step=4, branch="cond", block=3),
        _recording_ends_early,
    ),
    Fault(
        "record-decision-lost",
        "measurement",
        "M3: cdit#370",
        "one decision of one stage and branch is in no record",
        rerun(cached("pp2cfg1", FIXED)),
        Points(MISSING, rank=1, step=2, branch="uncond"),
        _decision_lost,
    ),
    Fault(
        "record-value-of-another-time",
        "measurement",
        "M2: omni#5676",
        "a value is read from a buffer that holds another call's",
        topology("pp2cfg1"),
        Points("arithmetic", rank=0, step=2, branch="uncond", block=1),
        _value_of_the_wrong_time,
    ),
)
