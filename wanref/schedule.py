"""The schedule of one request: which step runs at which timestep and sigma, by which expert, at which guidance scale.

The expert split, every cache's step budget and the denoise loop read this one object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wanref.checkpoint import EXPERT_FOLDERS, Checkpoint, CheckpointError, Expert
from wanref.request import SCHEDULER_CLASSES, ResolvedRequest

if TYPE_CHECKING:
    import torch

Solver = Any
"""A diffusers scheduler with its timesteps set. diffusers has no common base class for them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `timestep` is an int where the scheduler's are int64 (UniPC, DPM++), a float where they are float32."""

    index: int
    timestep: int | float
    sigma: float
    expert: Expert
    guidance_scale: float

    @property
    def guided(self) -> bool:
        """Whether the negative branch runs: exactly if this expert's own scale is above 1."""
        return self.guidance_scale > 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one request, in order."""

    steps: tuple[Step, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    @property
    def split(self) -> dict[Expert, int]:
        """How many steps each expert runs; a checkpoint's only expert counts as `high`."""
        return {expert: sum(step.expert == expert for step in self.steps) for expert in EXPERT_FOLDERS}

    @property
    def guided(self) -> bool:
        """Whether any step runs the negative branch."""
        return any(step.guided for step in self.steps)

    def digest(self) -> str:
        """SHA-256 over every step: equal for equal timesteps, sigmas, experts and guidance."""
        return hashlib.sha256(json.dumps([asdict(step) for step in self.steps]).encode()).hexdigest()


def make_solver(request: ResolvedRequest, checkpoint: Checkpoint, device: str | torch.device = "cpu") -> Solver:
    """A fresh diffusers scheduler for one request, with its timesteps set on `device`.

    Its config is the checkpoint's, as diffusers' `from_config` carries it over to another scheduler class; the flow
    shift is set once, in the config. Raises ValueError where the scheduler does not make the steps that were asked.
    """
    import diffusers

    own = getattr(diffusers, checkpoint.scheduler_class).from_config(dict(checkpoint.scheduler))
    solver_class = getattr(diffusers, SCHEDULER_CLASSES[request.scheduler])
    flow: dict[str, Any]
    if request.scheduler == "euler":
        flow = {"shift": request.flow_shift}
    else:
        flow = {"flow_shift": request.flow_shift, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    solver = solver_class.from_config(own.config, **flow)
    solver.set_timesteps(request.steps, device=device)
    if len(solver.timesteps) != request.steps:
        raise ValueError(
            f"steps={request.steps}: {request.scheduler} makes {len(solver.timesteps)} timesteps of them with this "
            "checkpoint's scheduler config. Give another step count or scheduler."
        )
    # As the stock pipeline does: the solver need not look its position up by timestep, which repeats at high shifts.
    solver.set_begin_index(0)
    return solver


def build_schedule(request: ResolvedRequest, checkpoint: Checkpoint, solver: Solver) -> Schedule:
    """The schedule that `solver`, fresh from `make_solver`, will run.

    Raises CheckpointError if a step needs an expert that the checkpoint lacks.
    """
    experts = _experts(request, checkpoint, solver)
    timesteps = solver.timesteps.tolist()
    sigmas = solver.sigmas.tolist()
    schedule = Schedule(
        tuple(
            Step(index, timestep, sigmas[index], expert, request.guidance(expert))
            for index, (timestep, expert) in enumerate(zip(timesteps, experts, strict=True))
        )
    )
    for expert, steps in schedule.split.items():
        if steps and expert not in checkpoint.experts:
            raise CheckpointError(
                f"boundary_ratio={request.boundary_ratio} gives the {expert}-noise expert {steps} of {len(schedule)} "
                f"steps, but {checkpoint.name} has no {EXPERT_FOLDERS[expert]!r}. "
                f"Give boundary_ratio={'1.0' if expert == 'high' else '0.0'} to run without it."
            )
    return schedule


def _experts(request: ResolvedRequest, checkpoint: Checkpoint, solver: Solver) -> list[Expert]:
    if request.boundary_ratio is None:
        return ["high"] * len(solver.timesteps)
    if request.boundary_ratio == 1.0:
        # Nothing is above the boundary. Stock diffusers runs the high-noise expert where Euler's first timestep is
        # exactly 1000, which is not what a boundary of 1 asks for.
        return ["low"] * len(solver.timesteps)
    # The very comparison of the stock pipeline, in the timesteps' dtype: borderline splits depend on it.
    high = solver.timesteps >= request.boundary_ratio * solver.config.num_train_timesteps
    return ["high" if is_high else "low" for is_high in high.tolist()]
