"""Benign variants: runs that differ from their reference as the contracts allow, and in which nothing must be found.

All are bitwise by contract, so that no tolerance is calibrated on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from oracle.faults import disturbance
from oracle.faults.plant import Plant, nothing
from oracle.faults.scenario import (
    DBCACHE,
    FIXED,
    LIVE,
    LIVE_DUAL,
    OTHER,
    PLANNED,
    REQUEST,
    Past,
    Run,
    Scenario,
    cached,
    rerun,
    topology,
    used,
)
from wanref.request import Request

REQUESTS = (
    REQUEST,
    replace(OTHER, frames=1, steps=5),
    replace(REQUEST, prompt="a green triangle moving right over dots", height=32, width=48, seed=3, guidance_scale=2.5),
    replace(OTHER, guidance_scale=7.0, scheduler="euler", seed=11),
    replace(REQUEST, negative_prompt="stripes", scheduler="dpm++", flow_shift=5.0, frames=9, seed=5),
)
UNGUIDED = replace(REQUEST, guidance_scale=1.0, seed=13)
PARALLEL = ("pp1cfg2", "pp2cfg1", "pp2cfg2", "pp3cfg1")
TOPOLOGIES = ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")
CACHES = (LIVE.replace("0.25", "0.6"), PLANNED, FIXED.replace("5", "4"), DBCACHE.replace("0.4", "0.8"))
"""Each hits and misses in every request above: a step that reuses must be one of the five that the shortest has."""

Draw = Callable[[random.Random], tuple[Scenario, Plant]]


@dataclass(frozen=True, slots=True)
class Benign:
    """A kind of variants, from which one is drawn."""

    kind: str
    draw: Draw


@dataclass(frozen=True, slots=True)
class Variant:
    """One drawn."""

    id: str
    kind: str
    scenario: Scenario
    plant: Plant


def draw_variants(count: int, seed: int) -> Iterator[Variant]:
    """`count` variants, of every kind in turn."""
    chance = random.Random(seed)
    for index in range(count):
        benign = BENIGN[index % len(BENIGN)]
        scenario, plant = benign.draw(chance)
        yield Variant(f"benign-{index:04d}", benign.kind, scenario, plant)


def _request(chance: random.Random) -> Request:
    return chance.choice(REQUESTS)


def _native(chance: random.Random, *names: str) -> Run:
    return Run(topology=chance.choice(names or TOPOLOGIES), request=_request(chance))


def _cached(chance: random.Random, *names: str) -> Run:
    return cached(chance.choice(names or TOPOLOGIES), chance.choice(CACHES), request=_request(chance))


def _any(chance: random.Random, *names: str) -> Run:
    return chance.choice((_native, _cached))(chance, *names)


def _parallel(chance: random.Random, dtype: str = "float32") -> Scenario:
    return topology(chance.choice(PARALLEL), dtype=dtype, request=chance.choice((*REQUESTS, UNGUIDED)))


def _dual(chance: random.Random) -> Scenario:
    request = replace(_request(chance), guidance_scale_2=chance.choice((None, 1.0, 3.0)))
    return topology(chance.choice(PARALLEL), "dual", request=request)


def _forced(chance: random.Random) -> Scenario:
    native = _native(chance)
    return Scenario("forced", native, replace(native, cache=chance.choice(CACHES), forced=True))


def _never_hits(chance: random.Random) -> Scenario:
    native = _native(chance)
    return Scenario("forced", native, replace(native, cache="cache-dit:threshold=0,max_warmup_steps=1"))


def _across_cfg(chance: random.Random) -> Scenario:
    run = _cached(chance, "pp1cfg1", "pp2cfg1")
    return Scenario("cfg", run, replace(run, topology=run.topology.replace("cfg1", "cfg2")))


def _dual_across_cfg(chance: random.Random) -> Scenario:
    run = cached(chance.choice(("pp1cfg1", "pp2cfg1")), LIVE_DUAL.replace("0.25", "0.8"), "dual")
    run = replace(run, request=replace(REQUEST, seed=chance.randrange(9), prompt=_request(chance).prompt))
    return Scenario("cfg", run, replace(run, topology=run.topology.replace("cfg1", "cfg2")))


def _respelled(chance: random.Random) -> Scenario:
    run = cached(chance.choice(("pp1cfg1", "pp1cfg2")), FIXED, request=REQUEST)
    spelled = "fixed:steps=0.cond=2+3+5/0.uncond=2-3+5"
    return Scenario("replay", run, replace(run, cache=spelled))


def _others_before(chance: random.Random) -> Scenario:
    return used(_any(chance), *(Past(_request(chance)) for _ in range(chance.randint(1, 3))))


def _aborted_before(chance: random.Random) -> Scenario:
    return used(_any(chance), Past(_request(chance), "aborted"))


def _failed_before(chance: random.Random) -> Scenario:
    return used(_any(chance, "pp1cfg1"), Past(_request(chance), "failed"))


def _refused_before(chance: random.Random) -> Scenario:
    return used(_any(chance), Past(replace(REQUEST, height=33), "refused"))


def _unmounted_before(chance: random.Random) -> Scenario:
    return used(_cached(chance), Past(_request(chance), "unmounted"))


def _explicit(chance: random.Random) -> Scenario:
    run = _native(chance)
    request = replace(run.request, negative_prompt=run.request.negative_prompt or "", videos_per_prompt=1)
    request = replace(request, scheduler=request.scheduler or "unipc", flow_shift=request.flow_shift or 3.0)
    return Scenario("rerun", run, replace(run, request=request))


def _explicit_dual(chance: random.Random) -> Scenario:
    run = Run("dual", chance.choice(TOPOLOGIES), request=REQUEST)
    request = replace(REQUEST, boundary_ratio=0.875, guidance_scale_2=REQUEST.guidance_scale)
    return Scenario("rerun", run, replace(run, request=request))


def _integer_guidance(chance: random.Random) -> Scenario:
    run = Run(topology=chance.choice(TOPOLOGIES), request=REQUEST)
    return Scenario("rerun", run, replace(run, request=replace(REQUEST, guidance_scale=4)))


def _level(chance: random.Random) -> Scenario:
    run = _native(chance)
    return Scenario("rerun", run, replace(run, level=chance.choice(("digest", "tensor"))))


def _disturbed(plant: Callable[[random.Random], Plant], *names: str) -> Draw:
    return lambda chance: (rerun(_any(chance, *names)), plant(chance))


def _calm(scenario: Callable[[random.Random], Scenario]) -> Draw:
    return lambda chance: (scenario(chance), nothing)


def _rank(chance: random.Random) -> int:
    return chance.randrange(2)


BENIGN: tuple[Benign, ...] = (
    Benign("another topology", _calm(_parallel)),
    Benign("another topology, bfloat16", _calm(partial(_parallel, dtype="bfloat16"))),
    Benign("another topology, two experts", _calm(_dual)),
    Benign("a forced cache", _calm(_forced)),
    Benign("a cache that never hits", _calm(_never_hits)),
    Benign("a cached run on two chains", _calm(_across_cfg)),
    Benign("a cached run of two experts on two chains", _calm(_dual_across_cfg)),
    Benign("the same schedule of reuse, written otherwise", _calm(_respelled)),
    Benign("run again", _calm(lambda chance: rerun(_any(chance)))),
    Benign("other requests before", _calm(_others_before)),
    Benign("an aborted request before", _calm(_aborted_before)),
    Benign("a failed request before", _calm(_failed_before)),
    Benign("a refused request before", _calm(_refused_before)),
    Benign("the cache off and on again before", _calm(_unmounted_before)),
    Benign("defaults given explicitly", _calm(_explicit)),
    Benign("defaults of two experts given explicitly", _calm(_explicit_dual)),
    Benign("an integer where a float is meant", _calm(_integer_guidance)),
    Benign("another level of recording", _calm(_level)),
    Benign("a slow rank", _disturbed(lambda c: partial(disturbance.slow_rank, _rank(c), c.uniform(0.01, 0.05)))),
    Benign("slow sends", _disturbed(lambda c: partial(disturbance.slow_send, _rank(c), 0.02), "pp2cfg1", "pp2cfg2")),
    Benign("global generators seeded again", _disturbed(lambda c: partial(disturbance.reseeded, c.randrange(99)))),
    Benign("garbage collected in between", _disturbed(lambda c: disturbance.collected)),
    Benign("memory full of NaN", _disturbed(lambda c: partial(disturbance.memory_churned, c.choice((5000, 20000))))),
    Benign("sends waited for at once", _disturbed(lambda c: disturbance.sends_waited_for, "pp2cfg1", "pp2cfg2")),
    Benign("copies of each block's input", _disturbed(lambda c: disturbance.copies)),
    Benign("copies of what is received", _disturbed(lambda c: disturbance.received_copies, "pp2cfg1", "pp2cfg2")),
    Benign("a second observer", _disturbed(lambda c: disturbance.second_observer)),
    Benign("a second engine in the process", _disturbed(lambda c: disturbance.second_engine, "pp1cfg1")),
    Benign(
        "branches in another agreed order",
        lambda chance: (
            rerun(cached(chance.choice(("pp1cfg1", "pp2cfg1")), LIVE, request=_request(chance))),
            disturbance.branches_reversed,
        ),
    ),
)
