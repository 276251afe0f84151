"""The schedule of a request: its splits are the published ones, its rule is stock diffusers', its solver is fresh."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wanref import Checkpoint, CheckpointError, EngineDefaults, Request, open_checkpoint, resolve
from wanref.schedule import Schedule, build_schedule, make_solver

pytestmark = pytest.mark.cpu

GOLDENS = json.loads((Path(__file__).parents[2] / "fixtures/goldens/schedules.json").read_text())
SPLITS = [
    (name, row["steps"], row["flow_shift"], row["high"], row["low"])
    for name, rows in GOLDENS["splits"].items()
    for row in rows
]
SCHEDULERS = ["unipc", "euler", "dpm++"]


@pytest.fixture(scope="module")
def opened(tiny: Callable[..., Path]) -> dict[str, Checkpoint]:
    return {layout: open_checkpoint(tiny(layout=layout)) for layout in ("single", "dual", "high only", "low only")}


def solver_of(checkpoint: Checkpoint, **values: Any) -> Any:
    return make_solver(resolve(Request(prompt="a", **values), EngineDefaults(), checkpoint), checkpoint)


def schedule_of(checkpoint: Checkpoint, **values: Any) -> Schedule:
    resolved = resolve(Request(prompt="a", **values), EngineDefaults(), checkpoint)
    return build_schedule(resolved, checkpoint, make_solver(resolved, checkpoint))


def stock_solver(name: str, steps: int, shift: float) -> Any:
    """The scheduler as a user of stock diffusers builds it, not derived from a checkpoint."""
    if name == "euler":
        solver: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    else:
        classes = {"unipc": diffusers.UniPCMultistepScheduler, "dpm++": diffusers.DPMSolverMultistepScheduler}
        solver = classes[name](prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    solver.set_timesteps(steps)
    return solver


def stock_experts(solver: Any, boundary: float) -> list[str]:
    """The comparison of diffusers' WanPipeline, timestep by timestep."""
    boundary_timestep = boundary * solver.config.num_train_timesteps
    return ["high" if t >= boundary_timestep else "low" for t in solver.timesteps]


# Goldens.


@pytest.mark.parametrize(("scheduler", "steps", "shift", "high", "low"), SPLITS)
def test_splits_are_the_published_ones(
    opened: dict[str, Checkpoint], scheduler: Any, steps: int, shift: float, high: int, low: int
) -> None:
    schedule = schedule_of(opened["dual"], scheduler=scheduler, steps=steps, flow_shift=shift)
    assert GOLDENS["boundary_ratio"] == 0.875
    assert schedule.split == {"high": high, "low": low}


@pytest.mark.parametrize(
    "row", GOLDENS["timesteps"], ids=lambda row: f"{row['steps']} steps, shift {row['flow_shift']}"
)
def test_unipc_timesteps_are_the_golden_integers(opened: dict[str, Checkpoint], row: dict[str, Any]) -> None:
    schedule = schedule_of(opened["single"], steps=row["steps"], flow_shift=row["flow_shift"])
    assert [step.timestep for step in schedule] == row["unipc"]


@pytest.mark.parametrize(("steps", "shift"), [(8, 5.0), (40, 12.0)])
def test_the_shift_is_applied_exactly_once(opened: dict[str, Checkpoint], steps: int, shift: float) -> None:
    grid = np.linspace(1, 1 / 1000, steps + 1)[:-1]
    once = shift * grid / (1 + (shift - 1) * grid)
    sigmas = [step.sigma for step in schedule_of(opened["single"], steps=steps, flow_shift=shift)]
    np.testing.assert_allclose(sigmas, once, atol=2e-6)
    assert np.abs(shift * once / (1 + (shift - 1) * once) - once).max() > 1e-2  # twice would be seen


# The rule.

STEPS = st.integers(1, 60)
SHIFTS = st.floats(0.1, 40) | st.sampled_from([1.0, 3.0, 5.0, 12.0])
INNER = st.floats(0, 1, exclude_max=True) | st.integers(0, 999).map(lambda timestep: timestep / 1000)


@given(steps=STEPS, shift=SHIFTS, scheduler=st.sampled_from(SCHEDULERS), boundary=INNER)
@settings(max_examples=250, deadline=None)
def test_steps_timesteps_and_experts_are_those_of_stock_diffusers(
    opened: dict[str, Checkpoint], steps: int, shift: float, scheduler: Any, boundary: float
) -> None:
    values = {"steps": steps, "flow_shift": shift, "boundary_ratio": boundary, "scheduler": scheduler}
    schedule, stock = schedule_of(opened["dual"], **values), stock_solver(scheduler, steps, shift)
    timesteps, experts = [step.timestep for step in schedule], [step.expert for step in schedule]
    assert len(schedule) == steps == sum(schedule.split.values())
    assert [step.index for step in schedule] == list(range(steps))
    assert timesteps == stock.timesteps.tolist()
    assert [step.sigma for step in schedule] == stock.sigmas.tolist()[:steps]
    assert timesteps == sorted(timesteps, reverse=True)
    assert experts == stock_experts(stock, boundary)
    assert experts == sorted(experts)  # "high" before "low": at most one switch


@given(steps=STEPS, shift=SHIFTS, scheduler=st.sampled_from(SCHEDULERS))
@settings(max_examples=100, deadline=None)
def test_boundary_1_runs_low_alone_as_stock_does_just_above_and_0_runs_high_alone(
    opened: dict[str, Checkpoint], steps: int, shift: float, scheduler: Any
) -> None:
    values = {"steps": steps, "flow_shift": shift, "scheduler": scheduler}
    low = schedule_of(opened["dual"], boundary_ratio=1.0, **values)
    assert [step.expert for step in low] == stock_experts(stock_solver(scheduler, steps, shift), 1.0001)
    assert low.split == {"high": 0, "low": steps}
    assert schedule_of(opened["dual"], boundary_ratio=0.0, **values).split == {"high": steps, "low": 0}


def test_stock_at_1_0_gives_eulers_first_step_to_the_expert_that_was_excluded(opened: dict[str, Checkpoint]) -> None:
    stock = stock_solver("euler", 8, 5.0)
    assert stock.timesteps[0] == 1000
    assert stock_experts(stock, 1.0) == ["high", *["low"] * 7]
    schedule = schedule_of(opened["dual"], scheduler="euler", steps=8, flow_shift=5.0, boundary_ratio=1.0)
    assert (schedule.steps[0].timestep, schedule.steps[0].expert) == (1000.0, "low")


def test_unipcs_whole_timesteps_decide_where_its_sigmas_would_say_otherwise(opened: dict[str, Checkpoint]) -> None:
    schedule = schedule_of(opened["dual"], steps=8, flow_shift=5.0, boundary_ratio=0.9721)
    second = schedule.steps[1]
    assert second.timestep < 972.1 < 1000 * second.sigma
    assert second.expert == "low"


def test_one_expert_has_no_boundary_and_runs_every_step(opened: dict[str, Checkpoint]) -> None:
    assert schedule_of(opened["single"], steps=9).split == {"high": 9, "low": 0}


@pytest.mark.parametrize(("scheduler", "kind"), [("unipc", int), ("dpm++", int), ("euler", float)])
def test_timesteps_keep_the_schedulers_own_kind(opened: dict[str, Checkpoint], scheduler: Any, kind: type) -> None:
    solver = solver_of(opened["single"], scheduler=scheduler, steps=5)
    assert solver.timesteps.dtype == (torch.int64 if kind is int else torch.float32)
    for step in schedule_of(opened["single"], scheduler=scheduler, steps=5):
        assert type(step.timestep) is kind


def test_each_expert_is_guided_exactly_if_its_own_scale_is_above_1(opened: dict[str, Checkpoint]) -> None:
    for high, low in [(4, 1), (1, 4), (0, 1.0001), (1, 1), (5, 6)]:
        schedule = schedule_of(opened["dual"], steps=8, flow_shift=5.0, guidance_scale=high, guidance_scale_2=low)
        assert [step.guidance_scale for step in schedule] == [high] * 4 + [low] * 4
        assert [step.guided for step in schedule] == [high > 1] * 4 + [low > 1] * 4
        assert schedule.guided == (high > 1 or low > 1)


# Experts that are not there.


@pytest.mark.parametrize(
    ("layout", "lacks", "remedy"),
    [("high only", "low", "boundary_ratio=0.0"), ("low only", "high", "boundary_ratio=1.0")],
)
def test_an_expert_that_is_needed_and_missing_is_an_error_with_its_remedy(
    opened: dict[str, Checkpoint], layout: str, lacks: str, remedy: str
) -> None:
    folder = {"low": "transformer_2", "high": "transformer"}[lacks]
    with pytest.raises(CheckpointError, match=f"{lacks}-noise expert 4 of 8 steps.*no '{folder}'.*Give {remedy} "):
        schedule_of(opened[layout], steps=8, flow_shift=5.0)
    alone = schedule_of(opened[layout], steps=8, flow_shift=5.0, boundary_ratio=float(remedy[-3:]))
    assert alone.split[lacks] == 0


def test_a_missing_expert_that_no_step_needs_is_no_error(opened: dict[str, Checkpoint]) -> None:
    assert schedule_of(opened["high only"], steps=2, flow_shift=12.0).split == {"high": 2, "low": 0}


# Solvers.


def state_of(solver: Any) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else list(value) if isinstance(value, list) else value
        for name, value in vars(solver).items()
    }


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_two_solvers_of_one_request_share_no_state(opened: dict[str, Checkpoint], scheduler: Any) -> None:
    one, other = (solver_of(opened["single"], scheduler=scheduler, steps=4, flow_shift=5.0) for _ in range(2))
    fresh = state_of(other)
    assert state_of(one) == fresh
    for timestep in one.timesteps[:2]:
        one.step(torch.ones(1, 4, 1, 2, 2), timestep, torch.ones(1, 4, 1, 2, 2))
    one.timesteps[:], one.sigmas[:] = -1, -1
    assert state_of(one) != fresh
    assert state_of(other) == fresh


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_shift_neither_accumulates_nor_outlives_its_request(opened: dict[str, Checkpoint], scheduler: Any) -> None:
    values = {"scheduler": scheduler, "steps": 8}
    default = schedule_of(opened["single"], **values)
    shifted = [schedule_of(opened["single"], flow_shift=12.0, **values) for _ in range(2)]
    assert shifted[0] == shifted[1] != default
    assert schedule_of(opened["single"], **values) == default
    solver = solver_of(opened["single"], flow_shift=12.0, **values)
    solver.set_timesteps(8)
    assert solver.timesteps.tolist() == [step.timestep for step in shifted[0]]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_another_shift_gives_other_timesteps_under_every_scheduler(
    opened: dict[str, Checkpoint], scheduler: Any
) -> None:
    three, five = (
        [step.timestep for step in schedule_of(opened["single"], scheduler=scheduler, steps=8, flow_shift=shift)]
        for shift in (3.0, 5.0)
    )
    assert all(a < b for a, b in zip(three[1:], five[1:], strict=True))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_checkpoint_of_another_scheduler_class_gives_the_same_schedule(
    opened: dict[str, Checkpoint], scheduler: Any
) -> None:
    own = {"num_train_timesteps": 1000, "shift": 12.0}
    euler = replace(opened["single"], scheduler_class="FlowMatchEulerDiscreteScheduler", scheduler=own)
    timesteps = [step.timestep for step in schedule_of(euler, scheduler=scheduler, steps=8)]
    assert timesteps == stock_solver(scheduler, 8, 12.0).timesteps.tolist()


def test_a_solver_that_makes_other_steps_than_were_asked_is_refused(
    opened: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    solver_class = diffusers.UniPCMultistepScheduler
    original = solver_class.set_timesteps
    monkeypatch.setattr(solver_class, "set_timesteps", lambda self, steps, device: original(self, steps - 1, device))
    with pytest.raises(ValueError, match="steps=8: unipc makes 7 timesteps"):
        solver_of(opened["single"], steps=8)
