"""A stage's polynomial: from the change of a TeaCache signal to the change of the stage's residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oracle.campaign.collect import Array, Collected
from oracle.campaign.refusal import CampaignError
from wanref.caching.teacache import Signal
from wanref.checkpoint import Expert

DEGREE = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """Of one stage, expert and signal, over both branches.

    coefficients: highest degree first. input_range: of the calibrated distances; outside it a cache computes.
    rms_error: of prediction minus change. explained: share of the changes' variance that the polynomial accounts for.
    negative: share of the pairs with a negative prediction, which a sign policy has to say something about.
    """

    stage: int
    expert: Expert
    signal: Signal
    coefficients: tuple[float, ...]
    input_range: tuple[float, float]
    pairs: int
    rms_error: float
    explained: float
    negative: float

    def predict(self, distances: Array) -> Array:
        """By Horner's rule, in the order of operations in which a cache evaluates it."""
        return _horner(self.coefficients, distances)


def transitions(runs: Sequence[Collected], stage: int, expert: Expert, signal: Signal) -> tuple[Array, Array]:
    """Distance of the signal and change of the residual at each transition between successive steps of an expert."""
    distances, changes = [], []
    for run in runs:
        track = run.tracks[stage]
        experts = {step.index: step.expert for step in run.schedule}
        for position, call in enumerate(track.calls):
            if call.previous is not None and experts[call.step] == expert:
                distances.append(track.distances[signal][position])
                changes.append(track.changes[position])
    return np.array(distances), np.array(changes)


def fit_polynomial(
    distances: Array, changes: Array, stage: int, expert: Expert, signal: Signal, degree: int = DEGREE
) -> Fit:
    """Least squares. Raises CampaignError for what is not finite, or for too few distinct distances to fix it."""
    where = f"fit: stage {stage}, {expert}-noise expert, {signal}"
    for name, values in (("distances", distances), ("changes", changes)):
        if not np.isfinite(values).all():
            raise CampaignError(f"{where}: {np.count_nonzero(~np.isfinite(values))} {name} are not finite.")
    distinct = len(np.unique(distances))
    if distinct <= degree:
        raise CampaignError(f"{where}: degree={degree} needs more than {degree} distinct distances, not {distinct}.")
    # In a variable scaled to -1..1: powers of small distances alone are close to dependent.
    scaled = np.polynomial.Polynomial.fit(distances, changes, degree)
    ascending = scaled.convert().coef
    coefficients = tuple(float(c) for c in np.pad(ascending, (0, degree + 1 - len(ascending)))[::-1])
    predicted = _horner(coefficients, distances)
    variance = float(np.var(changes))
    return Fit(
        stage=stage,
        expert=expert,
        signal=signal,
        coefficients=coefficients,
        input_range=(float(distances.min()), float(distances.max())),
        pairs=len(distances),
        rms_error=float(np.sqrt(np.square(predicted - changes).mean())),
        explained=1 - float(np.square(predicted - changes).mean()) / variance if variance else 0.0,
        negative=float((predicted < 0).mean()),
    )


def fit_all(runs: Sequence[Collected], signal: Signal, degree: int = DEGREE) -> tuple[Fit, ...]:
    """For each stage and each expert that ran. Raises CampaignError without a run, or for runs that do not match."""
    if not runs:
        raise CampaignError("fit: runs=[] is not accepted: give at least one.")
    if len({(run.schedule.digest(), len(run.tracks)) for run in runs}) > 1:
        raise CampaignError("fit: the runs are not of one schedule and one number of stages.")
    experts: list[Expert] = [expert for expert, steps in runs[0].schedule.split.items() if steps > 1]
    return tuple(
        fit_polynomial(*transitions(runs, stage, expert, signal), stage, expert, signal, degree)
        for expert in experts
        for stage in range(len(runs[0].tracks))
    )


def teacache_options(fits: Sequence[Fit], threshold: float, **options: Any) -> dict[str, Any]:
    """Options of `teacache` from the fits of one signal, each stage with its own polynomial and range.

    Where the checkpoint has two experts, so do the fits. `sign` is `clamp` unless given: a change is not negative.
    """
    by_expert: dict[Expert, list[Fit]] = {}
    for fit in sorted(fits, key=lambda fit: fit.stage):
        by_expert.setdefault(fit.expert, []).append(fit)
    names = {"high": "coefficients", "low": "coefficients_low"}
    return {
        "signal": fits[0].signal,
        "threshold": threshold,
        "eps": 0.0,
        "sign": "clamp",
        **{names[expert]: [list(fit.coefficients) for fit in own] for expert, own in by_expert.items()},
        "ranges": {expert: [list(fit.input_range) for fit in own] for expert, own in by_expert.items()},
        **options,
    }


def _horner(coefficients: Sequence[float], x: Array) -> Array:
    value = np.zeros_like(x)
    for coefficient in coefficients:
        value = value * x + coefficient
    return value
