"""Sums that a cache does wrong."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import around
from oracle.faults.scenario import FIXED, LIVE, PLANNED, cached, rerun, twin
from wanref.caching import teacache
from wanref.caching.residual import ResidualStore

Planted = AbstractContextManager[None]


def _added_once_per_block() -> Planted:
    def apply(original: Any, store: Any, where: Any, hidden: Any) -> Any:
        output, origins = original(store, where, hidden)
        return (hidden + 3 * (output - hidden), origins) if where.place.rank == 1 else (output, origins)

    return around(ResidualStore, "apply", apply)


def _residual_of_another_input() -> Planted:
    def keep(original: Any, store: Any, where: Any, hidden: Any, output: Any) -> None:
        original(store, where, hidden.roll(1, dims=1) if where.place.rank == 1 else hidden, output)

    return around(ResidualStore, "keep", keep)


def _not_kept_once() -> Planted:
    def keep(original: Any, store: Any, where: Any, *tensors: Any) -> None:
        if where.step.index != 4:
            original(store, where, *tensors)

    return around(ResidualStore, "keep", keep)


def _residual_written_to() -> Planted:
    def apply(original: Any, store: Any, where: Any, hidden: Any) -> Any:
        output, origins = original(store, where, hidden)
        store._kept[where.step.expert, where.branch][-1].value.add_(hidden)
        return output, origins

    return around(ResidualStore, "apply", apply)


def _scaled_sum(factor: float) -> Planted:
    def judge(
        original: Any, options: Any, position: int, count: int, distance: Any, accumulated: float, where: str
    ) -> Any:
        return original(options, position, count, distance, accumulated * factor, where)

    return around(teacache, "_judge", judge)


def _sum_counted_twice() -> Planted:
    return _scaled_sum(2.0)


def _sum_decays() -> Planted:
    return _scaled_sum(0.95)


def _relative_to_the_new() -> Planted:
    return around(
        teacache,
        "_relative_change",
        lambda original, current, previous, eps: original(previous, current, eps),
    )


def _sign_dropped() -> Planted:
    return around(teacache, "_signed", lambda original, value, sign: abs(value))


def _extrapolated_from_the_wrong_end() -> Planted:
    return around(torch, "lerp", lambda original, start, end, weight: original(start, end, weight - 1))


FAULTS = (
    Fault(
        "sum-residual-once-per-block",
        "cache arithmetic",
        "K1: omni#5561",
        "one stage adds the residual once for each of its blocks",
        twin(cached("pp2cfg1", FIXED)),
        Points("arithmetic", rank=1, step=2, branch="cond"),
        _added_once_per_block,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "sum-residual-of-another-input",
        "cache arithmetic",
        "T5: cdit#1113, omni#3927, omni#4814",
        "one stage's residual is taken against another input than the blocks had",
        twin(cached("pp2cfg1", FIXED)),
        Points("arithmetic", rank=1, step=2, branch="cond"),
        _residual_of_another_input,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "sum-residual-not-renewed",
        "cache arithmetic",
        "K1: sgl#18498",
        "a computed step does not renew the residual: the next reuse takes an older one",
        twin(cached("pp1cfg1", FIXED)),
        Points("provenance", rank=0, step=5, branch="cond"),
        _not_kept_once,
        caught_by="test_fixed_schedule.py",
    ),
    Fault(
        "sum-residual-written-to",
        "cache arithmetic",
        "K1: omni#5561",
        "a reuse writes into the residual: the second in a row is wrong",
        twin(cached("pp1cfg1", FIXED)),
        Points("arithmetic", rank=0, step=3, branch="cond"),
        _residual_written_to,
        caught_by="test_residuals.py",
    ),
    Fault(
        "sum-counted-twice",
        "cache arithmetic",
        "K1: MagCache-Comfy#17",
        "the accumulator doubles at each step: 1, 3, 7, 15",
        rerun(cached("pp1cfg1", LIVE.replace("0.25", "0.7"))),
        Points("decision", rank=0, step=2, branch="cond"),
        _sum_counted_twice,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "sum-decays",
        "cache arithmetic",
        "P5: omni#2682",
        "the accumulator decays by 0.95 a step",
        rerun(cached("pp2cfg1", LIVE.replace("0.25", "0.7"))),
        Points("decision", rank=0, step=2, branch="cond"),
        _sum_decays,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "sum-relative-to-the-new",
        "cache arithmetic",
        "P5: trt#11868",
        "a change is measured against the new signal, not the old one",
        rerun(cached("pp1cfg1", LIVE)),
        Points("decision", rank=0, step=1, branch="cond"),
        _relative_to_the_new,
        caught_by="test_teacache.py",
    ),
    Fault(
        "sum-sign-dropped",
        "cache arithmetic",
        "K1: sgl#18498",
        "a negative rescaled change counts as a positive one",
        rerun(cached("pp1cfg1", PLANNED.replace("1/0", "-1/0"))),
        Points("decision", rank=0, step=1, branch="cond"),
        _sign_dropped,
        caught_by="test_cases_caching_arithmetic.py",
    ),
    Fault(
        "sum-extrapolated-from-the-wrong-end",
        "cache arithmetic",
        "K1: MagCache-Comfy#17",
        "the linear extrapolation starts from the older residual",
        rerun(cached("pp1cfg1", "fixed:steps=*.*=3+5,reuse=linear")),
        Points("arithmetic", rank=0, step=3, branch="cond", block=5),
        _extrapolated_from_the_wrong_end,
        caught_by="test_residuals.py",
    ),
)
