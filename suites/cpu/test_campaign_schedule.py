"""Reuse errors against the residuals themselves, and the search of schedules against all schedules that there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import torch

from oracle.campaign.collect import SIGNALS, Array, Call, Collected, Track
from oracle.campaign.refusal import CampaignError
from oracle.campaign.reuse_error import ReuseErrors, Who, reuse_errors, step_sizes
from oracle.campaign.schedule_search import allocate, search_schedules
from suites.scripted import HERE, schedule_of
from wanref.caching.base import Where
from wanref.caching.residual import ResidualStore, Reuse
from wanref.schedule import Schedule

pytestmark = pytest.mark.cpu

SINGLE = schedule_of(*[("high", sigma) for sigma in (1.0, 0.9, 0.75, 0.7, 0.4, 0.1)])
DUAL = schedule_of(("high", 1.0), ("high", 0.9), ("high", 0.7), ("low", 0.6), ("low", 0.35), ("low", 0.1))
Residuals = dict[tuple[int, str], Array]
"""By step and branch, [elements]."""


def collected(schedule: Schedule, residuals: Residuals, outputs: Array) -> Collected:
    """A native request of one stage with these residuals, in the order of the loop."""
    last: dict[tuple[str, str], int] = {}
    calls: list[Call] = []
    experts = {step.index: step.expert for step in schedule}
    for step, branch in residuals:
        place = experts[step], branch
        calls.append(Call(step, branch, last.get(place)))  # type: ignore[arg-type]
        last[place] = len(calls) - 1
    flat = np.stack(list(residuals.values()))
    zeros = np.zeros(len(calls))
    products = flat @ flat.T / flat.shape[1]
    track = Track(0, tuple(calls), dict.fromkeys(SIGNALS, zeros), zeros, products, outputs)
    return Collected(schedule, (track,))


def drawn(schedule: Schedule, seed: int) -> tuple[Residuals, Array]:
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(8)
    residuals = {}
    for step in schedule:
        for branch in ("cond", "uncond") if step.guided else ("cond",):
            residuals[step.index, branch] = common + rng.standard_normal(8)
    return residuals, rng.random(len(residuals)) + 0.5


def reused_by_the_store(schedule: Schedule, residuals: Residuals, kept: Sequence[int], at: int, branch: str) -> Array:
    """What a cache's own store would reuse at step `at`, once the steps in `kept` have been computed."""
    store = ResidualStore("plain" if len(kept) == 1 else "linear")
    zero = torch.zeros(1, 8, 1, dtype=torch.float64)
    for index in kept:
        where = Where(0, schedule.steps[index], branch, HERE)  # type: ignore[arg-type]
        store.keep(where, zero, torch.from_numpy(residuals[index, branch]).reshape(1, 8, 1))
    output, _ = store.apply(Where(0, schedule.steps[at], branch, HERE), zero)  # type: ignore[arg-type]
    return output.numpy().reshape(8)


@pytest.mark.parametrize("who", ["cond", "uncond", "both"])
@pytest.mark.parametrize("schedule", [SINGLE, DUAL], ids=["single", "dual"])
def test_errors_are_those_of_what_the_store_of_a_cache_reuses(schedule: Schedule, who: Who) -> None:
    runs = [drawn(schedule, seed) for seed in range(3)]
    errors = reuse_errors([collected(schedule, *run) for run in runs], 0, who)
    branches = ("cond", "uncond") if who == "both" else (who,)
    scale = 5.0
    share = {"cond": scale, "uncond": 1 - scale}
    checked = 0
    for i in range(6):
        for kept in [*combinations(range(i), 1), *combinations(range(i), 2)]:
            if len({schedule.steps[step].expert for step in (*kept, i)}) > 1:
                continue
            squares = []
            for residuals, outputs in runs:
                error = sum(
                    share[b] * (residuals[i, b] - reused_by_the_store(schedule, residuals, kept, i, b))
                    for b in branches
                )
                squares.append(np.square(error).mean() / outputs[2 * i])
            table = errors.plain if len(kept) == 1 else errors.linear
            assert table[(*kept, i)] == pytest.approx(np.sqrt(np.mean(squares)), rel=1e-9)
            checked += 1
    assert checked == np.isfinite(errors.plain).sum() + np.isfinite(errors.linear).sum() > 0


def test_branches_that_reuse_together_leave_only_what_they_do_not_share() -> None:
    residuals, outputs = drawn(SINGLE, 0)
    for step in SINGLE:
        residuals[step.index, "uncond"] = residuals[step.index, "cond"] - 0.5
    run = collected(SINGLE, residuals, np.ones_like(outputs))
    both, cond = (reuse_errors([run], 0, who) for who in ("both", "cond"))
    # s (c - c') + (1 - s) (u - u') = c - c' where u = c - .5; alone, it is s (c - c').
    assert np.nanmax(np.abs(both.plain - cond.plain / 5)) < 1e-12


def test_extrapolation_has_no_error_on_a_line() -> None:
    slope, start = np.random.default_rng(0).standard_normal((2, 8))
    residuals = {(step.index, branch): start + step.sigma * slope for step in SINGLE for branch in ("cond", "uncond")}
    errors = reuse_errors([collected(SINGLE, residuals, np.ones(12))], 0, "cond")
    assert np.nanmax(errors.linear) < 1e-6
    assert np.nanmin(errors.plain) > 1e-3


def test_two_kept_steps_of_one_sigma_are_reused_plainly() -> None:
    level = schedule_of(("high", 1.0), ("high", 1.0), ("high", 0.5))
    residuals, outputs = drawn(level, 0)
    errors = reuse_errors([collected(level, residuals, outputs)], 0, "cond")
    assert errors.linear[0, 1, 2] == pytest.approx(errors.plain[1, 2])


def test_a_branch_that_does_not_run_is_refused() -> None:
    alone = schedule_of(("high", 1.0), ("high", 0.5), scale=1.0)
    run = collected(alone, *drawn(alone, 0))
    assert reuse_errors([run], 0, "both").steps == (0, 1)
    with pytest.raises(CampaignError, match="branch='uncond' runs at no step"):
        reuse_errors([run], 0, "uncond")
    with pytest.raises(CampaignError, match="runs of one schedule"):
        reuse_errors([run, collected(SINGLE, *drawn(SINGLE, 0))], 0, "cond")


def test_weights_are_how_far_a_step_moves_the_latents() -> None:
    assert step_sizes(SINGLE) == pytest.approx([0.1, 0.15, 0.05, 0.3, 0.3, 0.1])


# The search.


def error_of(errors: ReuseErrors, reuse: Reuse, computed: Sequence[int], weights: Array) -> float:
    """The weighted error of one schedule, step by step as a cache would go; infinite where a start is not computed."""
    kept: list[int] = []
    total = 0.0
    for i in range(len(errors.steps)):
        if i in errors.starts:
            kept = []
        if i in computed:
            kept = [*kept, i][-2:]
        elif not kept:
            return np.inf
        elif reuse == "linear" and len(kept) == 2:
            total += weights[i] * errors.linear[kept[0], kept[1], i]
        else:
            total += weights[i] * errors.plain[kept[-1], i]
    return total


def table(starts: tuple[int, ...], count: int, seed: int) -> ReuseErrors:
    """Errors without any order in them, so that no greedy choice is the best one by luck."""
    rng = np.random.default_rng(seed)
    expert = np.array([sum(start <= i for start in starts) for i in range(count)])
    follows = np.less.outer(np.arange(count), np.arange(count)) & np.equal.outer(expert, expert)
    return ReuseErrors(
        stage=0,
        who="both",
        steps=tuple(range(10, 10 + count)),
        starts=starts,
        plain=np.where(follows, rng.random((count, count)), np.nan),
        linear=np.where(follows[:, :, None] & follows, rng.random((count,) * 3), np.nan),
        weights=rng.random(count),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("starts", [(0,), (0, 3), (0, 4, 5), (0, 7)])
@pytest.mark.parametrize("reuse", ["plain", "linear"])
def test_the_search_is_exact_for_every_budget(reuse: Reuse, starts: tuple[int, ...], seed: int) -> None:
    count = 8
    errors = table(starts, count, seed)
    own_weights = np.random.default_rng(seed + 100).random(count)
    for weights, given in ((errors.weights, None), (own_weights, own_weights)):
        found = search_schedules(errors, reuse, given)
        assert list(found) == list(range(len(starts), count + 1))
        for budget, schedule in found.items():
            least = min(error_of(errors, reuse, each, weights) for each in combinations(range(count), budget))
            assert schedule.error == pytest.approx(least, abs=1e-12)
            positions = [step - 10 for step in schedule.computed]
            assert error_of(errors, reuse, positions, weights) == pytest.approx(least, abs=1e-12)
            assert len(positions) == budget
            assert sorted((*schedule.computed, *schedule.reused)) == list(errors.steps)


def test_weights_that_are_none_are_refused() -> None:
    errors = table((0,), 4, 0)
    for weights in (np.ones(3), np.array([1, 1, np.nan, 1]), np.array([1, 1, -1, 1])):
        with pytest.raises(CampaignError, match="give 4 finite numbers of at least 0"):
            search_schedules(errors, "plain", weights)


def test_a_budget_is_shared_so_that_the_errors_add_up_to_the_least() -> None:
    searched = {name: search_schedules(table((0,), 5, seed), "linear") for seed, name in enumerate(("a", "b"))}
    blocks = {"a": 3, "b": 2}
    for budget in range(5, 26):
        chosen = allocate(searched, blocks, budget)
        assert sum(len(schedule.computed) * blocks[name] for name, schedule in chosen.items()) <= budget
        pairs = [
            one.error + two.error
            for steps, one in searched["a"].items()
            for more, two in searched["b"].items()
            if steps * 3 + more * 2 <= budget
        ]
        assert sum(schedule.error for schedule in chosen.values()) == pytest.approx(min(pairs))
    with pytest.raises(CampaignError, match="budget=4 is not accepted: the fewest block calls that there can be are 5"):
        allocate(searched, blocks, 4)
