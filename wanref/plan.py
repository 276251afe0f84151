"""What a request will do, decided before any work: the resolved request, its schedule and its solver.

With several ranks, all of them go on only if all of them planned the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from wanref.checkpoint import Checkpoint
from wanref.exchange import Exchange
from wanref.request import ResolvedRequest
from wanref.schedule import Schedule, Solver


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, ready to run. The solver is fresh and belongs to this request alone."""

    request: ResolvedRequest
    schedule: Schedule
    solver: Solver


class Refused(Exception):
    """A refusal that every rank knows of; `cause` is what the caller gets."""

    def __init__(self, cause: ValueError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def agree_on_plan(make: Callable[[], Plan], exchange: Exchange) -> Plan:
    """Call `make` on every rank. Rank 0 draws the seeds that the request leaves open, for all.

    Raises Refused on every rank if one refuses with a ValueError, or if the ranks were given different requests.
    """
    refusal: ValueError | None = None
    try:
        plan = make()
        note = {"digest": plan.request.digest(), "seeds": _draw_seeds(plan.request)}
    except ValueError as error:
        refusal = error
        note = {"refusal": str(error)}
    notes = exchange.gather_notes(note)
    if refusal is not None:
        raise Refused(refusal)
    for rank, other in enumerate(notes):
        if "refusal" in other:
            raise Refused(ValueError(f"rank {rank} refuses the request: {other['refusal']}"))
        if other["digest"] != notes[0]["digest"]:
            raise Refused(ValueError(f"ranks 0 and {rank} were given different requests: give every rank the same."))
    return replace(plan, request=_with_seeds(plan.request, notes[0]["seeds"]))


def latents_shape(request: ResolvedRequest, checkpoint: Checkpoint) -> tuple[int, ...]:
    """[batch, channels, frames, height, width] of a request's latents."""
    frames_per_latent, pixels_per_latent = checkpoint.latent_scale
    return (
        request.videos,
        checkpoint.transformer["in_channels"],
        (request.frames - 1) // frames_per_latent + 1,
        request.height // pixels_per_latent,
        request.width // pixels_per_latent,
    )


def _draw_seeds(request: ResolvedRequest) -> list[int]:
    return [secrets.randbits(63) for noise in request.noise if noise.seed is None and noise.generator is None]


def _with_seeds(request: ResolvedRequest, seeds: Sequence[int]) -> ResolvedRequest:
    drawn = iter(seeds)
    return replace(
        request,
        noise=tuple(
            replace(noise, seed=next(drawn)) if noise.seed is None and noise.generator is None else noise
            for noise in request.noise
        ),
    )
