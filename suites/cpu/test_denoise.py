"""The denoise loop on scripted stages: which branch and expert run when, and what is made of their predictions."""

import pytest
import torch

from fixtures.fakes import ScriptedStage, scripted_job
from wanref.denoise import denoise
from wanref.observe import StepEvent, TensorEvent
from wanref.schedule import Schedule, Step

pytestmark = pytest.mark.cpu

LATENTS = torch.full((1, 1, 1, 2, 2), 0.5)


def schedule(*steps: tuple[str, float]) -> Schedule:
    total = len(steps)
    return Schedule(
        tuple(Step(i, 1000.0 - 10 * i, 1 - i / total, expert, scale) for i, (expert, scale) in enumerate(steps))
    )


def test_guidance_moves_from_uncond_towards_cond_by_the_scale_of_the_step() -> None:
    residual = {"cond": 3.0, "uncond": 1.0}
    stage = ScriptedStage(lambda _, branch, block: residual[branch] if block == 0 else 0.0)
    job, solver = scripted_job(schedule(("high", 4.0)), {"high": stage})
    denoise(job, LATENTS)
    assert torch.equal(solver.predictions[0], torch.full_like(LATENTS, 1.5 + 4.0 * (3.5 - 1.5)))


def test_each_expert_runs_its_own_steps_and_its_negative_branch_only_above_scale_1() -> None:
    stages = {expert: ScriptedStage(lambda *_: 0.0, range(1)) for expert in ("high", "low")}
    job, _ = scripted_job(schedule(("high", 1.0), ("high", 0.0), ("low", 1.5), ("low", 3.0)), stages)
    denoise(job, LATENTS)
    assert stages["high"].stack.calls == [(1000.0, "cond", 0), (990.0, "cond", 0)]
    assert stages["low"].stack.calls == [
        (timestep, branch, 0) for timestep in (980.0, 970.0) for branch in ("cond", "uncond")
    ]


def test_an_unguided_prediction_is_the_cond_branch_itself() -> None:
    stage = ScriptedStage(lambda timestep, _, block: timestep / 1000 if block == 1 else 0.25)
    job, solver = scripted_job(schedule(("high", 1.0)), {"high": stage})
    denoise(job, LATENTS)
    assert torch.equal(solver.predictions[0], LATENTS + 0.25 + 1.0)


def test_latents_of_a_step_are_what_the_solver_made_of_the_last_one() -> None:
    stage = ScriptedStage(lambda timestep, *_: timestep, range(1))
    job, solver = scripted_job(schedule(("high", 1.0), ("high", 1.0), ("high", 1.0)), {"high": stage})
    final = denoise(job, LATENTS)
    assert [float(p.flatten()[0]) for p in solver.predictions] == [1000.5, 1990.5, 2970.5]
    assert torch.equal(final, solver.predictions[-1])


def test_events_carry_the_logical_keys_of_the_step_in_order() -> None:
    events = []
    stage = ScriptedStage(lambda *_: 0.0)
    job, _ = scripted_job(schedule(("high", 2.0), ("high", 1.0)), {"high": stage}, events.append)
    denoise(job, LATENTS)
    assert [event.step.index for event in events if isinstance(event, StepEvent)] == [0, 1]
    keys = [event.key for event in events if isinstance(event, TensorEvent)]
    branch = [("embed", "{}"), (0, "{}"), (1, "{}"), ("project", "{}")]
    shared = [("combine", None), ("scheduler", None)]
    guided = [(block, name) for name in ("cond", "uncond") for block, _ in branch] + shared
    unguided = [(block, "cond") for block, _ in branch] + shared
    assert [(key.block, key.branch) for key in keys if key.step == 0] == guided
    assert [(key.block, key.branch) for key in keys if key.step == 1] == unguided
    assert {(key.request, key.expert, key.port, key.occurrence) for key in keys} == {(0, "high", "output", 0)}
