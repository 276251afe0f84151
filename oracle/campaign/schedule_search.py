"""The best fixed schedule: which steps to compute, so that what is reused at all others costs least.

Dynamic programming over measured errors, exact for every budget of computed steps at once. It knows what a cache keeps:
the last computed residual of an expert, or the last two, and that an expert's first step computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from oracle.campaign.collect import Array
from oracle.campaign.refusal import CampaignError
from oracle.campaign.reuse_error import ReuseErrors
from wanref.caching.residual import Reuse


@dataclass(frozen=True, slots=True)
class ReuseSchedule:
    """computed, reused: indices of steps, all at which it runs. error: the weighted sum over what is reused."""

    computed: tuple[int, ...]
    reused: tuple[int, ...]
    error: float


def search_schedules(errors: ReuseErrors, reuse: Reuse, weights: Array | None = None) -> dict[int, ReuseSchedule]:
    """The best schedule by its number of computed steps, from the fewest that there can be to all.

    weights: [n] instead of |d sigma|, for who knows better what a step's error does. Raises CampaignError for weights
    that are not one finite number of at least 0 a step.
    """
    count = len(errors.steps)
    weights = errors.weights if weights is None else weights
    if weights.shape != (count,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise CampaignError(f"weights={weights.tolist()} is not accepted: give {count} finite numbers of at least 0.")
    between = _errors_between(errors, weights)
    alone = count  # in place of a k: nothing is kept beside j
    # rest[k, j, b]: the least error behind j, where b steps are still to be computed, and j and k are kept.
    rest = np.full((count + 1, count, count), np.inf)
    # following[k, j, b]: which step that computes next; `count` if none.
    following = np.full((count + 1, count, count), count)
    for j in reversed(range(count)):
        behind = np.full((count + 1, count), np.inf)
        behind[count, 0] = 0
        for m in range(j + 1, count):
            kept = alone if reuse == "plain" or m in errors.starts else j
            behind[m, 1:] = rest[kept, m, :-1]
        through = between[:, j, :, None] + behind
        rest[:, j], following[:, j] = through.min(axis=1), through.argmin(axis=1)
    return {
        budget: _walk(errors, following, budget, float(rest[alone, 0, budget - 1]), reuse)
        for budget in range(1, count + 1)
        if np.isfinite(rest[alone, 0, budget - 1])
    }


def _errors_between(errors: ReuseErrors, weights: Array) -> Array:
    """[k, j, m]: the error of reusing at every step between j and m, where j and k are kept; k = n, j alone."""
    count = len(errors.steps)
    single = np.concatenate([errors.linear, errors.plain[None]]) * weights
    single = np.where(np.isnan(single), np.inf, single)
    position = np.arange(count)
    # Nothing is reused up to j itself, so that the sum starts behind it.
    single = np.where(position[None, :, None] >= position, 0.0, single)
    between = np.concatenate([np.zeros((count + 1, count, 1)), np.cumsum(single, axis=2)], axis=2)
    between[:, position[:, None] >= np.arange(count + 1)] = np.inf
    return between


def _walk(errors: ReuseErrors, following: Array, budget: int, error: float, reuse: Reuse) -> ReuseSchedule:
    alone = len(errors.steps)
    kept, computed = alone, [0]
    for left in reversed(range(1, budget)):
        at = computed[-1]
        computed.append(int(following[kept, at, left]))
        kept = alone if reuse == "plain" or computed[-1] in errors.starts else at
    reused = [index for position, index in enumerate(errors.steps) if position not in computed]
    return ReuseSchedule(tuple(errors.steps[position] for position in computed), tuple(reused), error)


def allocate(
    searched: Mapping[str, Mapping[int, ReuseSchedule]], blocks: Mapping[str, int], budget: int
) -> dict[str, ReuseSchedule]:
    """Which budget each of several schedules gets (a stage and branch each), so that their errors add up to the least.

    blocks: what one computed step of each costs in block calls; budget: how many there may be in all. Raises
    CampaignError where not even the fewest fit.
    """
    # least[c]: the least error for c block calls at most, and the choices that make it.
    least: dict[int, tuple[float, dict[str, ReuseSchedule]]] = {0: (0.0, {})}
    for name, schedules in searched.items():
        extended: dict[int, tuple[float, dict[str, ReuseSchedule]]] = {}
        for spent, (error, chosen) in least.items():
            for steps, schedule in schedules.items():
                cost, total = spent + steps * blocks[name], error + schedule.error
                if cost <= budget and (cost not in extended or total < extended[cost][0]):
                    extended[cost] = total, {**chosen, name: schedule}
        least = extended
    if not least:
        fewest = sum(min(schedules) * blocks[name] for name, schedules in searched.items())
        raise CampaignError(f"budget={budget} is not accepted: the fewest block calls that there can be are {fewest}.")
    return min(least.values(), key=lambda each: each[0])[1]
