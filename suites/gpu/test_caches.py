"""Contract 3 on a real checkpoint: every cache, forced, is native bit for bit, and cached it has hits and misses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.cached import CachedRun, cache_for, check_fired, run_cached
from suites.support import first_difference, load_engine, union
from wanref.request import Request
from wanref.topology import parse_topology

pytestmark = pytest.mark.gpu

REQUEST = Request(
    prompt="a red circle moving left", frames=5, steps=8, guidance_scale=4.0, seed=7, output_type="latent"
)
CACHES = {
    "teacache, projection": "teacache:dialect=teacache,coefficients=1/0,threshold=0.3,first=2",
    "sglang, embedding": "teacache:dialect=sglang,signal=timestep_embedding,coefficients=1/0,threshold=0.8",
    "trt-llm, projection": "teacache:dialect=trt-llm,coefficients=1/0,threshold=0.3,first=2",
    "vllm-omni, modulated input": "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.3",
    "linear reuse": "teacache:dialect=vllm-omni,coefficients=1/0,threshold=0.3,first=2,reuse=linear",
    "fixed": "fixed:steps=*.cond=1+2/*.uncond=1",
    "cache-dit": "cache-dit:threshold=0.3,max_warmup_steps=2",
    "cache-dit, TaylorSeer": "cache-dit:threshold=0.3,max_warmup_steps=2,taylorseer_order=1",
}


def native_forced_cached(checkpoint: Path | str, topology: str, dtype: str, device: str) -> dict[str, list[CachedRun]]:
    """For ranks: the native run, and each cache forced and then cached."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    os.environ["LOCAL_RANK"] = str(rank)
    engine = load_engine(checkpoint, topology, dtype, device=device)
    kind = engine.checkpoint.kind
    runs = {"native": [run_cached(engine, REQUEST, None)]}
    for name, text in CACHES.items():
        forced, cached = (cache_for(text, kind, engine.topology.pp, on) for on in (True, False))
        runs[name] = [run_cached(engine, REQUEST, cache) for cache in (forced, cached)]
    return runs


@pytest.fixture(scope="session")
def runs(
    topology: str, checkpoint: Path | str, ranks: RankPool, pytestconfig: pytest.Config
) -> list[dict[str, list[CachedRun]]]:
    """By rank."""
    device = "cpu" if pytestconfig.getoption("--rehearse") else "cuda"
    dtype = "float32" if device == "cpu" else "bfloat16"
    world = parse_topology(topology).world_size
    return ranks.run(world, native_forced_cached, checkpoint, topology, dtype, device, timeout=1800)


@pytest.mark.parametrize("cache", CACHES)
def test_forced_is_native_and_cached_has_hits_and_misses(
    runs: list[dict[str, list[CachedRun]]], topology: str, cache: str
) -> None:
    native = union([of_rank["native"][0].run for of_rank in runs])
    forced, cached = ([of_rank[cache][which] for of_rank in runs] for which in (0, 1))
    assert native
    assert first_difference(native, union([ran.run for ran in forced])) is None
    for of_cache in (forced, cached):
        for ran in of_cache:
            check_fired([ran])
    assert {d.verdict for ran in forced for d in ran.decisions} == {"compute"}
    assert {ran.run.latents for ran in cached} != {runs[0]["native"][0].run.latents}
