"""The denoise loop: step, branch, stage, combine, scheduler step, on the part of the grid that one rank owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from wanref.block import TextKV
from wanref.caching.base import BlockCache, Decision, StackCall, Where
from wanref.checkpoint import Expert
from wanref.exchange import Exchange
from wanref.observe import Observer, StepEvent, TensorEvent, TensorKey, TensorSource
from wanref.schedule import Schedule, Solver, Step
from wanref.stage import Stage, StepInputs
from wanref.topology import Branch

Texts = Mapping[tuple[Expert, Branch], tuple[TextKV, ...]]


class RequestAborted(Exception):
    """The request was aborted, on every rank before the same step. The engine goes on."""

    def __init__(self, step: int, steps: int) -> None:
        super().__init__(f"aborted before step {step} of {steps}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Job:
    """One request on one rank. `solver` is used by last stages only; each has its own. `decisions` grows as it runs."""

    ordinal: int
    schedule: Schedule
    solver: Solver
    stages: Mapping[Expert, Stage]
    texts: Texts
    dtype: torch.dtype
    exchange: Exchange
    observer: Observer | None
    aborting: Callable[[], bool]
    cache: BlockCache | None = None
    decisions: list[Decision] = field(default_factory=list)


@torch.no_grad()
def denoise(job: Job, latents: torch.Tensor) -> torch.Tensor:
    """Initial latents [batch, channels, frames, height, width] float32, equal on every rank, to final ones likewise.

    Every rank returns the final latents. Raises RequestAborted, on every rank at the same step.
    """
    place = job.exchange.place
    rotary = {expert: stage.prepare_rotary(latents) for expert, stage in job.stages.items()}
    takes_part = place.chain == 0 or job.schedule.guided
    for step in job.schedule:
        if job.exchange.agree(job.aborting()):
            raise RequestAborted(step.index, len(job.schedule))
        if not takes_part:
            continue
        if job.observer is not None:
            job.observer(StepEvent(job.ordinal, step))
        latents = _run_step(job, step, rotary[step.expert], latents)
    return job.exchange.broadcast(latents.float(), latents.shape, torch.float32, place.topology.pp - 1)


def _run_step(job: Job, step: Step, rotary: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    exchange, place = job.exchange, job.exchange.place
    stage = job.stages[step.expert]
    timesteps = torch.tensor(step.timestep, device=latents.device).expand(latents.shape[0])
    inputs = stage.prepare_step(timesteps, rotary, job.dtype)
    predictions: dict[Branch, torch.Tensor] = {}
    embedded = stage.embed(latents.to(job.dtype)) if place.is_first else None
    branches = place.branches(step.guided)
    for branch in branches if job.cache is None else job.cache.order(step.index, branches):
        hidden = _run_stage(job, step, branch, inputs, embedded, latents)
        if place.is_last:
            predictions[branch] = stage.project(hidden, inputs, latents.shape)
            _tap(job, step, branch, "project", predictions[branch])
    if place.is_last:
        prediction = _combine(job, step, predictions, latents.shape)
        _tap(job, step, None, "combine", prediction)
        # Euler and DPM++ hand back latents in the dtype of the prediction; float32 holds them exactly.
        latents = job.solver.step(prediction, job.solver.timesteps[step.index], latents, return_dict=False)[0].float()
        _tap(job, step, None, "scheduler", latents)
    if not place.is_first and place.is_last:
        exchange.send(latents, latents.shape, torch.float32, place.first)
    if place.is_first and not place.is_last:
        latents = exchange.receive(latents.shape, torch.float32, place.last)
        _tap(job, step, None, "scheduler", latents, "received")
    # Stages work on one branch while their neighbours work on the other: deliveries are waited for only here.
    exchange.drain()
    return latents


def _run_stage(
    job: Job, step: Step, branch: Branch, inputs: StepInputs, embedded: torch.Tensor | None, latents: torch.Tensor
) -> torch.Tensor:
    exchange, place = job.exchange, job.exchange.place
    stage = job.stages[step.expert]
    shape = (latents.shape[0], stage.tokens(latents.shape), stage.dim)
    if embedded is None:
        hidden = exchange.receive(shape, job.dtype, place.previous)
        _tap(job, step, branch, stage.stack.first - 1, hidden, "received")
    else:
        hidden = embedded
        _tap(job, step, branch, "embed", hidden)
    tapped: list[int] = []

    def tap(block: int, output: torch.Tensor) -> None:
        tapped.append(block)
        _tap(job, step, branch, block, output)

    tap_or_none = None if job.observer is None else tap
    text = job.texts[step.expert, branch]
    if job.cache is None:
        hidden = stage.stack(hidden, text, inputs, tap_or_none)
    else:
        where = Where(job.ordinal, step, branch, place)
        hidden, decision = job.cache.run(StackCall(where, stage.stack, hidden, text, inputs, tap_or_none))
        job.decisions.append(decision)
        if job.observer is not None:
            job.observer(decision)
        if stage.stack.last not in tapped:
            _tap(job, step, branch, stage.stack.last, hidden, "reused")
    if not place.is_last:
        exchange.send(hidden, shape, job.dtype, place.next)
    return hidden


def _combine(job: Job, step: Step, predictions: Mapping[Branch, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Classifier-free guidance, by the serial expression on every last stage: another form rounds otherwise."""
    exchange = job.exchange
    if exchange.place.topology.cfg == 2 and step.guided:
        ((branch, own),) = predictions.items()
        cond, uncond = exchange.gather_branches(own, shape, job.dtype)
        other: tuple[Branch, torch.Tensor] = ("uncond", uncond) if branch == "cond" else ("cond", cond)
        _tap(job, step, other[0], "project", other[1], "received")
    elif step.guided:
        cond, uncond = predictions["cond"], predictions["uncond"]
    elif exchange.place.topology.cfg == 2 and job.schedule.guided:
        shared = exchange.share_prediction(predictions.get("cond"), shape, job.dtype)
        if not predictions:
            _tap(job, step, "cond", "project", shared, "received")
        return shared
    else:
        return predictions["cond"]
    return uncond + step.guidance_scale * (cond - uncond)


def _tap(
    job: Job,
    step: Step,
    branch: Branch | None,
    block: int | str,
    tensor: torch.Tensor,
    source: TensorSource = "computed",
) -> None:
    if job.observer is not None:
        job.observer(TensorEvent(TensorKey(job.ordinal, step.index, step.expert, branch, block), tensor, source))
