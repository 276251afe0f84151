"""Options that are changed, dropped or replaced on their way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import around
from oracle.faults.scenario import LIVE, REQUEST, Run, cached, rerun, topology
from wanref import pipeline, resolver
from wanref.caching.teacache import TeaCache

Planted = AbstractContextManager[None]


def _resolved_to(**values: Any) -> Planted:
    return around(resolver, "_resolve_one", lambda original, *args: replace(original(*args), **values))


def _height_rounded() -> Planted:
    return _resolved_to(height=32)


def _frames_padded() -> Planted:
    return _resolved_to(frames=9)


def _boundary_ignored() -> Planted:
    return _resolved_to(boundary_ratio=0.875)


def _zero_is_unset() -> Planted:
    def guidance(original: Any, request: Any, *args: Any) -> Any:
        scale, second = original(request, *args)
        return scale or 5.0, second

    return around(resolver, "_guidance", guidance)


def _seed_ignored() -> Planted:
    def draw(original: Any, noise: Any, *args: Any) -> Any:
        return original([replace(each, seed=0) for each in noise], *args)

    return around(pipeline, "draw_noise", draw)


def _one_table_for_both_experts() -> Planted:
    def make(original: Any, maker: Any, begin: Any) -> Any:
        options = {(stage, expert): maker.options[stage, "high"] for stage, expert in maker.options}
        return original(replace(maker, options=options), begin)

    return around(TeaCache, "__call__", make)


NATIVE = Run(request=REQUEST)
CENTRED = replace(REQUEST, boundary_ratio=0.5)

FAULTS = (
    Fault(
        "option-height-rounded",
        "configuration",
        "V1: dfs#11167, wan21#229, omni#1279",
        "a height of 48 is rounded to 32",
        rerun(replace(NATIVE, request=replace(REQUEST, height=48))),
        Points("configuration"),
        _height_rounded,
        caught_by="test_cases_configuration.py",
    ),
    Fault(
        "option-frames-grow-with-ranks",
        "configuration",
        "V1: omni#1280, sgl#19311",
        "frames are padded to suit the topology",
        topology("pp2cfg1"),
        Points("configuration"),
        _frames_padded,
        caught_by="test_request.py",
    ),
    Fault(
        "option-zero-guidance-is-unset",
        "configuration",
        "C7: omni#922, omni#4998",
        "a guidance scale of 0 is taken for none given",
        rerun(replace(NATIVE, request=replace(REQUEST, guidance_scale=0.0))),
        Points("configuration"),
        _zero_is_unset,
        caught_by="test_request.py",
    ),
    Fault(
        "option-boundary-ignored",
        "configuration",
        "E4: dsyn#806, fv#804",
        "the request's boundary is replaced by the checkpoint's",
        rerun(Run("dual", request=CENTRED)),
        Points("configuration"),
        _boundary_ignored,
        caught_by="test_request.py",
    ),
    Fault(
        "option-seed-ignored",
        "configuration",
        "T4: omni#5176, omni#2218",
        "the seed is reported and not used",
        rerun(NATIVE),
        Points("arithmetic", rank=0, step=0, branch="cond", block="embed"),
        _seed_ignored,
        caught_by="test_stock.py",
    ),
    Fault(
        "option-one-table-for-both-experts",
        "configuration",
        "V3: trt#13170, trt#14157",
        "the low-noise expert rescales by the high-noise expert's coefficients",
        rerun(cached("pp1cfg1", LIVE + ",coefficients_low=2/0", "dual")),
        Points("decision", rank=0, step=3, branch="cond"),
        _one_table_for_both_experts,
        caught_by="test_caching_finite.py",
    ),
)
