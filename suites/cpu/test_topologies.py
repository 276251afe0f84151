"""Contract 2: every topology is bitwise pp1cfg1 at every logical key, and what each rank does is what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.support import Run, first_difference, load_engine, observed, run_on, serial, union
from wanref.observe import TensorKey
from wanref.request import Request

pytestmark = pytest.mark.cpu

GUIDED = Request(prompt="a red square", height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
UNGUIDED = replace(GUIDED, guidance_scale=1)
BATCH = replace(GUIDED, prompt=("a red square", "a blue circle"), negative_prompt=("stripes", "dots"), seed=(1, 2))
SINGLE = (GUIDED, UNGUIDED, BATCH, replace(GUIDED, scheduler="euler"), replace(GUIDED, scheduler="dpm++"))
DUAL = (
    replace(GUIDED, guidance_scale_2=2.0),
    UNGUIDED,
    replace(UNGUIDED, guidance_scale_2=3.0),
    replace(GUIDED, guidance_scale_2=1),
    replace(BATCH, guidance_scale_2=1, scheduler="euler"),
)
DEEPER = ("pp3cfg1", "pp4cfg2")


def check_equal(ranks: RankPool, folder: Path, topology: str, requests: tuple[Request, ...], dtype: str) -> None:
    references = serial(ranks, folder, requests, dtype)
    for request, reference, runs in zip(
        requests, references, run_on(ranks, folder, topology, requests, dtype), strict=True
    ):
        assert first_difference(reference.tensors, union(runs)) is None, request
        assert {each.latents for each in runs} == {reference.latents}, request
        assert [each.video for each in runs if each.rank == each.owner] == [reference.video], request
        assert all(each.video is None for each in runs if each.rank != each.owner), request


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "requests"), [("single", SINGLE), ("dual", DUAL)])
def test_equals_pp1cfg1_at_every_key(
    ranks: RankPool,
    tiny: Callable[..., Path],
    topology: str,
    layout: str,
    requests: tuple[Request, ...],
    dtype: str,
) -> None:
    check_equal(ranks, tiny(layout=layout), topology, requests, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "requests"), [("single", SINGLE[:2]), ("dual", DUAL[:4])])
@pytest.mark.parametrize("topology", DEEPER)
def test_uneven_and_deeper_pipelines_equal_pp1cfg1_at_every_key(
    ranks: RankPool,
    tiny: Callable[..., Path],
    topology: str,
    layout: str,
    requests: tuple[Request, ...],
    dtype: str,
) -> None:
    check_equal(ranks, tiny(layout=layout), topology, requests, dtype)


def test_the_keys_are_those_of_the_request_and_no_others(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    """So that equal key sets cannot be equally empty."""
    half_guided = DUAL[3]
    (of_serial,) = serial(ranks, tiny(layout="dual"), (half_guided,), "float32")
    (runs,) = run_on(ranks, tiny(layout="dual"), "pp2cfg2", (half_guided,))
    expected = set()
    for step in range(4):
        expert, branches = ("high", ("cond", "uncond")) if step < 2 else ("low", ("cond",))
        for branch in branches:
            expected |= {TensorKey(0, step, expert, branch, b) for b in ("embed", 0, 1, 2, 3, "project")}
        expected |= {TensorKey(0, step, expert, None, b) for b in ("combine", "scheduler")}
    assert set(of_serial.tensors) == expected
    assert set(union(runs)) == expected


def test_each_rank_runs_its_own_blocks_and_branch_only(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    (runs,) = run_on(ranks, tiny(), "pp2cfg2", (GUIDED,))
    for each in runs:
        chain, stage = divmod(each.rank, 2)
        keys = {key for key in each.tensors if key.branch is not None}
        assert {key.branch for key in keys} == {("cond", "uncond")[chain]}
        assert {key.block for key in keys} == ({"embed", 0, 1}, {2, 3, "project"})[stage]
        assert {key.block for key in each.tensors if key.branch is None} == (set(), {"combine", "scheduler"})[stage]


@pytest.mark.parametrize(
    ("topology", "idle", "owner"), [("pp1cfg2", (1,), 0), ("pp2cfg2", (2, 3), 1), ("pp2cfg1", (), 1)]
)
def test_without_guidance_the_uncond_chain_is_reported_idle_and_does_nothing(
    ranks: RankPool, tiny: Callable[..., Path], topology: str, idle: tuple[int, ...], owner: int
) -> None:
    unguided, guided = run_on(ranks, tiny(), topology, (UNGUIDED, GUIDED))
    assert {each.idle_ranks for each in unguided} == {idle}
    assert {each.rank for each in unguided if not each.tensors} == set(idle)
    assert {each.idle_ranks for each in guided} == {()}
    assert all(each.tensors for each in guided)
    assert {each.owner for each in unguided + guided} == {owner}


# Noise.


def test_without_a_seed_all_ranks_share_the_noise_and_runs_differ_and_the_drawn_seed_repeats_one(
    ranks: RankPool, tiny: Callable[..., Path], topology: str
) -> None:
    unseeded = replace(GUIDED, seed=None)
    first, second = run_on(ranks, tiny(), topology, (unseeded, unseeded))
    assert len({each.latents for each in first}) == len({each.latents for each in second}) == 1
    assert first[0].latents != second[0].latents
    (seeds,) = {each.seeds for each in first}
    ((again,),) = run_on(ranks, tiny(), "pp1cfg1", (replace(GUIDED, seed=seeds[0]),))
    assert again.latents == first[0].latents


def run_own_generator(folder: Path, topology: str) -> Run:
    engine = load_engine(folder, topology)
    generator = torch.Generator().manual_seed(100 + engine.place.rank)
    return observed(engine, replace(GUIDED, seed=None, generator=generator))


def test_of_the_generators_that_ranks_were_given_rank_0s_counts(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    runs = ranks.run(4, run_own_generator, tiny(), "pp2cfg2")
    ((serial_run,),) = run_on(ranks, tiny(), "pp1cfg1", (replace(GUIDED, seed=100),))
    assert {each.latents for each in runs} == {serial_run.latents}
