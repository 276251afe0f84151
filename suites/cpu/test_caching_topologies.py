"""Contracts 3 and 6, and cached runs across CFG: every cache, in every topology, on every layout, in both dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.evidence.ranks import RankPool
from suites.cached import BASE, LAYOUTS, MATRIX, CachedRun, cache_for, check_fired, key_of, run_all
from suites.support import first_difference, union
from wanref.caching.rule import RuleCache
from wanref.caching.spec import CacheSpec
from wanref.caching.teacache import DIALECTS
from wanref.request import Request
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

# Guidance for the high-noise expert alone, for the low-noise one alone, and for neither.
GUIDANCE = {
    "high guided": replace(BASE, guidance_scale_2=1.0),
    "low guided": replace(BASE, guidance_scale=1.0, guidance_scale_2=4.0),
    "unguided": replace(BASE, guidance_scale=1.0, guidance_scale_2=1.0),
}

Runs = dict[tuple[str, str], list[CachedRun]]
"""(cache, "cached" or "forced") to the runs of all ranks; the native run is ("none", "native")."""
Jobs = dict[tuple[str, str], tuple[Request, CacheSpec | None]]


def run(ranks: RankPool, folder: Path, topology: str, dtype: str, layout: str, jobs: Jobs) -> Runs:
    world = parse_topology(topology).world_size
    by_rank = ranks.run(world, run_all, folder, topology, dtype, layout, list(jobs.values()), timeout=300)
    return dict(zip(jobs, (list(of_job) for of_job in zip(*by_rank, strict=True)), strict=True))


def jobs_for(layout: str, stages: int, caches: dict[str, str] = MATRIX, request: Request = BASE) -> Jobs:
    jobs: Jobs = {("none", "native"): (request, None)}
    for name, text in caches.items():
        for kind in ("cached", "forced"):
            jobs[name, kind] = request, cache_for(text, layout, stages, kind == "forced")
    return jobs


MATRICES = [(pp, layout, dtype) for pp in (1, 2) for layout in LAYOUTS for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=MATRICES, ids=[f"pp{pp}-{layout}-{dtype}" for pp, layout, dtype in MATRICES])
def matrix(request: pytest.FixtureRequest, ranks: RankPool, tiny: Callable[..., Path]) -> tuple[Runs, Runs]:
    """Every cache, cached and forced, and the native run, at this pp: with both branches on one chain, and on two."""
    pp, layout, dtype = request.param
    one, two = (
        run(ranks, tiny(layout=layout), f"pp{pp}cfg{cfg}", dtype, layout, jobs_for(layout, pp)) for cfg in (1, 2)
    )
    return one, two


def check_forced(runs: Runs) -> None:
    native = runs["none", "native"]
    for (cache, kind), of_cache in runs.items():
        if kind == "forced":
            check_fired(of_cache)
            assert first_difference(union([r.run for r in native]), union([r.run for r in of_cache])) is None, cache
            assert {r.run.latents for r in of_cache} == {r.run.latents for r in native}, cache
            assert {d.verdict for r in of_cache for d in r.decisions} == {"compute"}, cache


def test_forced_is_native_at_every_key(matrix: tuple[Runs, Runs]) -> None:
    for runs in matrix:
        check_forced(runs)


def test_a_cached_run_differs_from_native_on_every_rank(matrix: tuple[Runs, Runs]) -> None:
    """So that the comparison of forced runs is not of a cache that does nothing."""
    for runs in matrix:
        for (cache, kind), of_cache in runs.items():
            if kind == "cached":
                check_fired(of_cache)
                assert runs["none", "native"][0].run.latents not in {r.run.latents for r in of_cache}, cache


def by_place(runs: list[CachedRun]) -> list[tuple[object, ...]]:
    return sorted((each for r in runs for each in r.verdicts()), key=lambda each: each[:4])


def check_across_cfg(one: Runs, two: Runs) -> None:
    for key, of_one in one.items():
        assert first_difference(union([r.run for r in of_one]), union([r.run for r in two[key]])) is None, key
        assert {r.run.latents for r in of_one} == {r.run.latents for r in two[key]}, key
        assert by_place(of_one) == by_place(two[key]), key


def test_at_equal_pp_runs_are_equal_across_cfg_and_decide_alike(matrix: tuple[Runs, Runs]) -> None:
    check_across_cfg(*matrix)


def shape_of_log(run: CachedRun) -> list[tuple[object, ...]]:
    """Kind, peers, shape and dtype of each exchange, numbered from the first."""
    log = run.run.log
    return [(e.sequence - log[0].sequence, e.kind, e.peers, e.shape, e.dtype, e.completed) for e in log]


def check_exchanges(runs: Runs) -> None:
    for (cache, kind), of_cache in runs.items():
        for native, cached in zip(runs["none", "native"], of_cache, strict=True):
            assert shape_of_log(cached) == shape_of_log(native), (cache, kind, cached.run.rank)
            for decision in cached.decisions:
                ran = {k for k in cached.run.tensors if (k.step, k.branch) == key_of(decision)[::2]}
                blocks = [k for k in ran if isinstance(k.block, int)]
                assert len(blocks) == decision.computed_blocks, (cache, kind, decision)
                place = decision.where.place
                assert ("embed" in {k.block for k in ran}) == place.is_first, (cache, decision)
                assert ("project" in {k.block for k in ran}) == place.is_last, (cache, decision)


def test_a_hit_receives_sends_and_projects_as_natively_and_runs_fewer_blocks(matrix: tuple[Runs, Runs]) -> None:
    for runs in matrix:
        check_exchanges(runs)
        for (cache, kind), of_cache in runs.items():
            hits = [d for r in of_cache for d in r.decisions if d.verdict == "reuse"]
            assert bool(hits) == (kind == "cached"), cache
            most = 4 if of_cache[0].run.topology.startswith("pp1") else 2
            assert all(d.computed_blocks == (1 if "cache-dit" in cache else 0) < most for d in hits), cache


# Every dialect with every signal that it knows; the matrix has those that differ most.

USUAL = {"timestep_projection": "0.6,first=1", "timestep_embedding": "1.5", "modulated_input": "0.2"}
PAIRS = {
    f"{dialect}, {signal}": f"teacache:coefficients=1/0,dialect={dialect},signal={signal},threshold={USUAL[signal]}"
    for dialect, rules in DIALECTS.items()
    for signal in rules.forced
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_dialect_forced_is_native_with_every_signal_it_knows(
    ranks: RankPool, tiny: Callable[..., Path], dtype: str
) -> None:
    assert len(PAIRS) == 7
    runs = run(ranks, tiny(layout="dual"), "pp2cfg2", dtype, "dual", jobs_for("dual", 2, PAIRS))
    check_forced(runs)
    for name in PAIRS:
        check_fired(runs[name, "cached"])
        assert runs["none", "native"][0].run.latents not in {r.run.latents for r in runs[name, "cached"]}, name


# Guidance on for one expert only, and off.


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("pp", [1, 2])
def test_with_guidance_for_one_expert_only_or_none_all_of_this_holds(
    ranks: RankPool, tiny: Callable[..., Path], pp: int, guidance: str
) -> None:
    caches = {name: MATRIX[name] for name in ("trt-llm, projection", "vllm-omni, modulated input", "cache-dit")}
    jobs = jobs_for("dual", pp, caches, GUIDANCE[guidance])
    folder = tiny(layout="dual")
    one, two = (run(ranks, folder, f"pp{pp}cfg{cfg}", "float32", "dual", jobs) for cfg in (1, 2))
    guided = {"high guided": {"high"}, "low guided": {"low"}, "unguided": set()}[guidance]
    for runs in (one, two):
        check_forced(runs)
        check_exchanges(runs)
        for (cache, kind), of_cache in runs.items():
            if kind == "native":
                continue
            keys = [key_of(d) for r in of_cache for d in r.decisions]
            assert {expert for _, expert, branch, _ in keys if branch == "uncond"} == guided, cache
            assert len(keys) == len(set(keys)), cache
            hit = {key_of(d)[1:3] for r in of_cache for d in r.decisions if d.judgement.verdict == "reuse"}
            assert {("high", "cond"), ("low", "cond"), *((e, "uncond") for e in guided)} == hit, cache
    check_across_cfg(one, two)


# The order of the branches on a chain.


def first_branches(run: CachedRun) -> list[str]:
    """The branch that each step began with."""
    order: dict[int, str] = {}
    for decision in run.decisions:
        order.setdefault(decision.where.step.index, decision.where.branch)
    return [order[step] for step in sorted(order)]


def run_in_given_order(folder: Path, cache: CacheSpec) -> CachedRun:
    """For ranks: the cache is not asked for an order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RuleCache, "order", lambda self, step, branches: branches)
        (ran,) = run_all(folder, "pp2cfg1", "float32", "single", [(BASE, cache)])
    return ran


def test_the_order_of_branches_is_chosen_by_who_reuses_and_changes_no_byte(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    """A lone hit of stage 0 saves time only if its branch runs first, one of stage 1 only if it runs last."""
    cache = CacheSpec("fixed", {"steps": "0.cond=4/0.uncond=1/1.cond=2/1.uncond=3"})
    (chosen,) = run(ranks, tiny(), "pp2cfg1", "float32", "single", {("fixed", "cached"): (BASE, cache)}).values()
    given = ranks.run(2, run_in_given_order, tiny(), cache)
    assert [first_branches(r) for r in chosen] == [["cond", "uncond", "uncond", "cond", "cond", "cond"]] * 2
    assert [first_branches(r) for r in given] == [["cond"] * 6] * 2
    check_fired(chosen)
    assert first_difference(union([r.run for r in given]), union([r.run for r in chosen])) is None
    assert by_place(chosen) == by_place(given)
    assert [shape_of_log(r) for r in chosen] == [shape_of_log(r) for r in given]
