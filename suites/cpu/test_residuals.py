"""Reuse of residuals: the arithmetic, whose residual it may be, and in which order a chain runs its branches."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.fakes import ScriptedStack
from suites.scripted import begin_of, call_of, schedule_of
from wanref.caching.base import Where
from wanref.caching.error import CacheError
from wanref.caching.fixed import FixedSchedule
from wanref.caching.residual import ResidualStore, Reuse
from wanref.caching.rule import RuleCache
from wanref.request import Request
from wanref.topology import BRANCHES, Branch, Topology

pytestmark = pytest.mark.cpu

PLACE = Topology().place(0)
REQUEST = Request(prompt="a red circle", steps=8, seed=3, output_type="latent")


def where(index: int, sigma: float, branch: Branch = "cond") -> Where:
    (step,) = schedule_of(("high", sigma)).steps
    return Where(0, replace(step, index=index), branch, PLACE)


def kept(reuse: Reuse, *residuals: tuple[float, torch.Tensor]) -> ResidualStore:
    """A store that has seen blocks add these residuals, by sigma, to some hidden states."""
    store = ResidualStore(reuse)
    hidden = torch.full((1, 3, 2), 0.5)
    for index, (sigma, residual) in enumerate(residuals):
        store.keep(where(index, sigma), hidden, hidden + residual)
    return store


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, 3, 2)


R0, R1, R2 = tensor(1, 2, 3, 4, 5, 6), tensor(2, 2, 1, 0, 8, 4), tensor(4, 1, 2, 2, 2, 2)
HIDDEN = tensor(0, 1, 0, 1, 0, 1)


def test_plain_reuse_adds_the_last_computed_residual() -> None:
    output, origins = kept("plain", (0.9, R0), (0.7, R1)).apply(where(2, 0.4), HIDDEN)
    assert torch.equal(output, HIDDEN + R1)
    assert [origin.step for origin in origins] == [1]


sigmas = st.floats(0.0625, 1, width=16)
residuals = st.lists(st.floats(-4, 4, width=16), min_size=6, max_size=6)


@given(sigmas, sigmas, sigmas, residuals, residuals)
def test_linear_reuse_is_the_line_through_the_last_two_residuals_over_sigma(
    s0: float, s1: float, s: float, r0: list[float], r1: list[float]
) -> None:
    output, origins = kept("linear", (s0, tensor(*r0)), (s1, tensor(*r1))).apply(where(2, s), HIDDEN)
    one, two = np.array(r0), np.array(r1)
    line = two if s0 == s1 else two + (two - one) * (s - s1) / (s1 - s0)
    largest = np.abs([one, two]).max() * (1 + abs((s - s1) / (s1 - s0) if s0 != s1 else 0))
    np.testing.assert_allclose((output - HIDDEN).flatten().numpy(), line, rtol=0, atol=1e-6 * (1 + largest))
    assert [origin.step for origin in origins] == ([1] if s0 == s1 else [0, 1])


def test_linear_reuse_keeps_the_last_two_of_three_and_takes_one_alone_as_it_is() -> None:
    output, origins = kept("linear", (0.9, R0), (0.8, R1), (0.7, R2)).apply(where(3, 0.6), HIDDEN)
    torch.testing.assert_close(output, HIDDEN + R2 + (R2 - R1))
    assert [origin.step for origin in origins] == [1, 2]
    output, origins = kept("linear", (0.9, R0)).apply(where(1, 0.6), HIDDEN)
    assert torch.equal(output, HIDDEN + R0)
    assert [origin.step for origin in origins] == [0]


def test_a_branch_does_not_see_the_residual_of_the_other() -> None:
    store = kept("plain", (0.9, R0))
    assert store.has(where(1, 0.8))
    assert not store.has(where(1, 0.8, "uncond"))


@pytest.mark.parametrize("field", ["request", "expert", "branch", "stage", "shape", "dtype"])
def test_a_residual_is_refused_wherever_it_is_foreign(field: str) -> None:
    store = kept("plain", (0.9, R0))
    here, hidden = where(1, 0.8), HIDDEN
    foreign: dict[str, Callable[[], Where]] = {
        "request": lambda: replace(here, request=1),
        "expert": lambda: replace(here, step=replace(here.step, expert="low")),
        "branch": lambda: replace(here, branch="uncond"),
        "stage": lambda: replace(here, place=Topology(pp=2).place(1)),
    }
    store.apply(here, hidden)
    there = foreign[field]() if field in foreign else here
    # What a slip in the keys would do: the state of another request, expert, branch or stage is found here.
    store._kept[there.step.expert, there.branch] = store._kept["high", "cond"]
    if field == "shape":
        hidden = HIDDEN[:, :2]
    if field == "dtype":
        hidden = HIDDEN.to(torch.bfloat16)
    with pytest.raises(CacheError, match="must not be reused"):
        store.apply(there, hidden)


# A rule cache over scripted blocks.


def reuse_at(steps: set[int], stages: int = 1, branches: tuple[Branch, ...] = BRANCHES) -> FixedSchedule:
    return FixedSchedule({(stage, branch): frozenset(steps) for stage in range(stages) for branch in branches})


def test_k1_a_hit_over_six_blocks_adds_their_residual_once() -> None:
    schedule = schedule_of(*[("high", 1 - i / 8) for i in range(4)])
    stack = ScriptedStack(lambda timestep, branch, block: float(2**block), range(6))
    cache = RuleCache(reuse_at({1, 2}))
    cache.begin(begin_of(schedule))
    for step in schedule:
        hidden = HIDDEN + step.index
        output, decision = cache.run(call_of(stack, step, hidden))
        assert torch.equal(output, hidden + 63.0)
        assert decision.computed_blocks == (0 if step.index in (1, 2) else 6)
        assert [origin.step for origin in decision.origins] == ([0] if step.index in (1, 2) else [])
    assert len(stack.calls) == 12, "two of four steps ran their six blocks"


def test_a_forced_run_keeps_no_residual_and_computes_what_the_rule_would_reuse() -> None:
    schedule = schedule_of(*[("high", 1 - i / 8) for i in range(3)])
    stack = ScriptedStack(lambda timestep, branch, block: timestep, range(2))
    cache = RuleCache(reuse_at({1, 2}), forced=True)
    cache.begin(begin_of(schedule))
    for step in schedule:
        output, decision = cache.run(call_of(stack, step, HIDDEN))
        assert torch.equal(output, HIDDEN + 2 * step.timestep)
        assert (decision.verdict, decision.judgement.verdict) == ("compute", "reuse" if step.index else "compute")
    assert not cache._store.has(where(3, 0.1))


# The order of the branches (trap 26).


def ordered(hits: set[tuple[int, Branch]], stages: int, forced: bool = False) -> tuple[Branch, ...]:
    """The order at a step at which these (stage, branch) reuse, on every stage alike."""
    schedule = schedule_of(("high", 1.0), ("high", 0.5))
    orders = set()
    for rank in range(stages):
        cache = RuleCache(FixedSchedule({hit: frozenset({1}) for hit in hits}), forced=forced)
        cache.begin(begin_of(schedule, Topology(pp=stages), rank))
        assert cache.order(0, BRANCHES) == BRANCHES, "nothing is reused at the first step"
        assert cache.order(1, ("uncond",)) == ("uncond",)
        orders.add(cache.order(1, BRANCHES))
    (order,) = orders
    return order


def span(order: tuple[Branch, ...], hits: set[tuple[int, Branch]], stages: int) -> int:
    """Units until the last stage is done, by walking every stage and branch through a clock."""
    free = [0] * stages
    for branch in order:
        at = 0
        for stage in range(stages):
            free[stage] = at = max(at, free[stage]) + (0 if (stage, branch) in hits else 1)
    return free[-1]


def test_a_lone_hit_that_would_save_nothing_is_run_where_it_saves_a_unit() -> None:
    # Two stages, two branches: 3 units. A reuse at stage 0 has to come first, one at stage 1 last.
    for hit, best in (
        ((0, "uncond"), ("uncond", "cond")),
        ((0, "cond"), ("cond", "uncond")),
        ((1, "cond"), ("uncond", "cond")),
        ((1, "uncond"), ("cond", "uncond")),
    ):
        assert ordered({hit}, 2) == best
        assert (span(best, {hit}, 2), span(best[::-1], {hit}, 2)) == (2, 3)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_of_both_orders_the_shorter_is_run_and_the_given_one_where_they_are_equal(stages: int) -> None:
    cells = list(product(range(stages), BRANCHES))
    reordered = 0
    for chosen in product([False, True], repeat=len(cells)):
        hits = {cell for cell, hit in zip(cells, chosen, strict=True) if hit}
        spans = {order: span(order, hits, stages) for order in (BRANCHES, BRANCHES[::-1])}
        order = ordered(hits, stages)
        assert order == (BRANCHES if spans[BRANCHES] <= spans[BRANCHES[::-1]] else BRANCHES[::-1])
        reordered += order != BRANCHES
    assert reordered > 0


def test_a_forced_run_keeps_the_given_order() -> None:
    assert ordered({(0, "uncond")}, 2) != BRANCHES
    assert ordered({(0, "uncond")}, 2, forced=True) == BRANCHES
