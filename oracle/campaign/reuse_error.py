"""What reusing a residual costs, measured: the error of each reuse that a schedule could make.

Nothing is rendered for it. From the products of all residuals of native runs follows the size of the error of any
combination of them: |R_i - a R_j - b R_k|^2 is a quadratic form in those products.

The unit is the error of what guidance makes of the branches, u + s (c - u), at the stage's output and relative to it.
A branch that reuses alone leaves its own error, times s or s - 1. Branches that reuse together leave the error of their
combination, which is much smaller: most of what changes between steps is common to both, and cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from oracle.campaign.collect import Array, Collected, Track
from oracle.campaign.refusal import CampaignError
from wanref.schedule import Schedule, Step
from wanref.topology import Branch

Who = Branch | Literal["both"]
"""Whose calls reuse: one branch's, while the other computes, or both at the same steps."""


@dataclass(frozen=True, slots=True)
class ReuseErrors:
    """Mean relative error (rms over videos) of each reuse, of one stage; n steps at which `who` runs.

    steps: their indices in the schedule. starts: positions at which an expert runs first, which must compute.
    plain: [j, i], reusing at position i what j computed. linear: [k, j, i], what k and j computed, extrapolated over
    sigma to i. NaN where there is no such reuse: not k < j < i, or not all of one expert.
    weights: [n], |d sigma| of each step: how far its prediction moves the latents.
    """

    stage: int
    who: Who
    steps: tuple[int, ...]
    starts: tuple[int, ...]
    plain: Array
    linear: Array
    weights: Array


def reuse_errors(runs: Sequence[Collected], stage: int, who: Who) -> ReuseErrors:
    """Measured over native runs. Raises CampaignError without a run, or where `who` does not run."""
    if not runs or len({run.schedule.digest() for run in runs}) > 1:
        raise CampaignError(f"reuse: {len(runs)} runs of one schedule are needed: at least one.")
    schedule = runs[0].schedule
    steps = [step for step in schedule if who != "uncond" or step.guided]
    if not steps:
        raise CampaignError(f"reuse: branch={who!r} runs at no step: guidance is off.")
    sigmas, experts = np.array([step.sigma for step in steps]), np.array([step.expert for step in steps])
    plain_squares = np.zeros((len(steps),) * 2)
    linear_squares = np.zeros((len(steps),) * 3)
    for run in runs:
        products, outputs = _guided(run.tracks[stage], steps, who)
        plain_squares += _plain(products) / outputs
        linear_squares += _linear(products, sigmas) / outputs
    # Rounding can leave the square of no error just below 0.
    plain = np.sqrt(np.maximum(plain_squares / len(runs), 0))
    linear = np.sqrt(np.maximum(linear_squares / len(runs), 0))
    position = np.arange(len(steps))
    follows = (position[:, None] < position) & (experts[:, None] == experts)
    return ReuseErrors(
        stage=stage,
        who=who,
        steps=tuple(step.index for step in steps),
        starts=tuple(i for i, step in enumerate(steps) if i == 0 or steps[i - 1].expert != step.expert),
        plain=np.where(follows, plain, np.nan),
        linear=np.where(follows[:, :, None] & follows[None, :, :], linear, np.nan),
        weights=np.array([step_sizes(schedule)[step.index] for step in steps]),
    )


def step_sizes(schedule: Schedule) -> Array:
    """|d sigma| of each step; the last one goes to 0."""
    sigmas = np.array([*(step.sigma for step in schedule), 0.0])
    return np.abs(np.diff(sigmas))


def _guided(track: Track, steps: Sequence[Step], who: Who) -> tuple[Array, Array]:
    """Products [n, n] of what guidance makes of `who`'s residuals, and the mean square of cond's output [n]."""
    position = {(call.step, call.branch): index for index, call in enumerate(track.calls)}
    shares = np.zeros((len(steps), len(track.calls)))
    for row, step in enumerate(steps):
        scale = step.guidance_scale if step.guided else 1.0
        if who != "uncond":
            shares[row, position[step.index, "cond"]] = scale
        if who != "cond" and step.guided:
            shares[row, position[step.index, "uncond"]] = 1 - scale
    outputs = np.array([track.outputs[position[step.index, "cond"]] for step in steps])
    return shares @ track.products @ shares.T, outputs


def _plain(products: Array) -> Array:
    """|R_i - R_j|^2 at [j, i]."""
    own = np.diag(products)
    return own[None, :] + own[:, None] - 2 * products


def _linear(products: Array, sigmas: Array) -> Array:
    """|R_i - (1 - a) R_k - a R_j|^2 at [k, j, i], a = (s_i - s_k) / (s_j - s_k); a = 1, plain reuse, if s_j = s_k."""
    own = np.diag(products)
    span = sigmas[None, :] - sigmas[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (sigmas[None, None, :] - sigmas[:, None, None]) / span[:, :, None]
    a = np.where(span[:, :, None] == 0, 1.0, share)
    b = 1 - a
    squares: Array = (
        own[None, None, :]
        + b**2 * own[:, None, None]
        + a**2 * own[None, :, None]
        - 2 * b * products[:, None, :]
        - 2 * a * products[None, :, :]
        + 2 * a * b * products[:, :, None]
    )
    return squares
