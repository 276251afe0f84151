"""Schedules and solvers that are not the ones asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around
from oracle.faults.scenario import OTHER, REQUEST, Past, Run, rerun, topology, used
from wanref import pipeline
from wanref.schedule import Schedule

Planted = AbstractContextManager[None]


def _asked_otherwise(change: Any) -> Planted:
    """The solver is made for another request than the resolved one."""

    def make(original: Any, request: Any, *args: Any) -> Any:
        return original(change(request), *args)

    return around(pipeline, "make_solver", make)


def _shifted_twice() -> Planted:
    return _asked_otherwise(lambda request: replace(request, flow_shift=request.flow_shift**2))


def _shift_not_forwarded() -> Planted:
    return _asked_otherwise(lambda request: replace(request, flow_shift=3.0))


def _shift_of_first_request() -> Planted:
    first: list[float] = []

    def stale(request: Any) -> Any:
        first.append(request.flow_shift)
        return replace(request, flow_shift=first[0])

    return _asked_otherwise(stale)


def _wrong_solver() -> Planted:
    return _asked_otherwise(lambda request: replace(request, scheduler="euler"))


def _one_step_less() -> Planted:
    return around(pipeline, "build_schedule", lambda original, *args: Schedule(original(*args).steps[:-1]))


def _last_order_not_lowered() -> Planted:
    def make(original: Any, *args: Any) -> Any:
        solver = original(*args)
        solver.register_to_config(lower_order_final=False)
        return solver

    return around(pipeline, "make_solver", make)


def _corrector_off_on_one_rank() -> Planted:
    def make(original: Any, *args: Any) -> Any:
        solver = original(*args)
        step = solver.step

        def step_without(*values: Any, **options: Any) -> Any:
            solver.disable_corrector = [HERE.step - 1] if HERE.at(rank=0, step=3) else []
            return step(*values, **options)

        solver.step = step_without
        return solver

    return around(pipeline, "make_solver", make)


NATIVE = Run(request=REQUEST)

FAULTS = (
    Fault(
        "schedule-shifted-twice",
        "scheduler",
        "S1: omni#7576",
        "the flow shift is applied in the constructor and again when the timesteps are set",
        rerun(NATIVE),
        Points("configuration", step=1),
        _shifted_twice,
        caught_by="test_stock_differences.py",
    ),
    Fault(
        "schedule-shift-not-forwarded",
        "scheduler",
        "S1: omni#7576 (its first fix), dfs#13243",
        "the request's flow shift does not reach the scheduler",
        rerun(replace(NATIVE, request=replace(REQUEST, flow_shift=7.0))),
        Points("configuration", step=1),
        _shift_not_forwarded,
        caught_by="test_profile.py",
    ),
    Fault(
        "schedule-shift-of-first-request",
        "scheduler",
        "S1: omni#7576",
        "the scheduler keeps the flow shift of the engine's first request",
        used(NATIVE, Past(replace(OTHER, flow_shift=12.0))),
        Points("configuration", step=1),
        _shift_of_first_request,
        caught_by="test_profile.py",
    ),
    Fault(
        "schedule-one-step-less",
        "scheduler",
        "S3: omni#7197",
        "one step less than was asked is run",
        rerun(NATIVE),
        Points("configuration"),
        _one_step_less,
        caught_by="test_stock_differences.py",
    ),
    Fault(
        "schedule-wrong-solver",
        "scheduler",
        "S3: omni#5882, omni#804",
        "another solver than the checkpoint's runs by default",
        rerun(NATIVE),
        Points("configuration", step=0),
        _wrong_solver,
        caught_by="test_stock_differences.py",
    ),
    Fault(
        "schedule-last-order-not-lowered",
        "scheduler",
        "S3: omni#804",
        "the solver's last step is taken at second order: the solver's config is not the checkpoint's",
        topology("pp2cfg1"),
        Points("arithmetic", rank=1, step=5, block="scheduler"),
        _last_order_not_lowered,
        caught_by="test_stock.py",
    ),
    Fault(
        "schedule-corrector-off-on-one-rank",
        "scheduler",
        "L9: sgl#23716",
        "one of the two solvers skips its corrector at one step: the chains' latents part",
        topology("pp1cfg2"),
        Points("arithmetic", rank=0, step=3, block="scheduler"),
        _corrector_off_on_one_rank,
        caught_by="test_stock.py",
    ),
)
