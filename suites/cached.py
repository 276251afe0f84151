"""What tests of caches in the pipeline share: the matrix of caches, runs that keep their decisions, and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oracle.verdict.decisions import Ruling
from suites.support import Run, defaults, load_engine, observed
from wanref.caching.base import Decision
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.observe import Event
from wanref.output import Output
from wanref.pipeline import WanReference
from wanref.request import Request

MICRO = Path(__file__).parents[1] / "fixtures" / "micro"
MICRO_DUAL = Path(__file__).parents[1] / "fixtures" / "micro-dual"

BASE = Request(
    prompt="a red square",
    height=32,
    width=32,
    frames=1,
    steps=6,
    guidance_scale=4.0,
    seed=7,
    max_sequence_length=16,
    output_type="latent",
)
# The polynomial x, so that what is accumulated is the signal's own change. `first`: of the six steps of these tests a
# dual checkpoint gives two to one expert, and five forced ones would leave none to reuse.
_TEACACHE = "teacache:coefficients=1/0,dialect={},signal={},threshold={}"
MATRIX = {
    "teacache, projection": _TEACACHE.format("teacache", "timestep_projection", 0.6) + ",first=1",
    "teacache, embedding, linear": _TEACACHE.format("teacache", "timestep_embedding", 1.5) + ",reuse=linear",
    "sglang, embedding": _TEACACHE.format("sglang", "timestep_embedding", 1.5),
    "trt-llm, projection": _TEACACHE.format("trt-llm", "timestep_projection", 0.6) + ",first=1",
    "vllm-omni, modulated input": _TEACACHE.format("vllm-omni", "modulated_input", 0.2),
    "fixed": "fixed:steps=0.cond=1+4-5/0.uncond=1+3/1.cond=5/1.uncond=1+3-4",
    "cache-dit": "cache-dit:threshold=0.5,max_warmup_steps=1",
    "cache-dit, TaylorSeer": "cache-dit:threshold=0.5,max_warmup_steps=2,taylorseer_order=1",
}
LAYOUTS = {
    "single": {},
    "dual": {},
    "high only": {"defaults": defaults(boundary_ratio=0.0)},
    "low only": {"defaults": defaults(boundary_ratio=1.0)},
}
"""Layouts of a tiny checkpoint, and how an engine is built on one."""

Group = tuple[str, str, int]
"""(expert, branch, stage): what one state of a rule belongs to."""


def cache_for(text: str, layout: str, stages: int, forced: bool = False) -> CacheSpec:
    """The cache with its options for whatever experts and stages there are."""
    spec = parse_cache(text, forced)
    options = dict(spec.options)
    if spec.method == "teacache" and layout in ("dual", "low only"):
        options["coefficients_low"] = options["coefficients"]
    if spec.method == "teacache" and layout == "low only":
        del options["coefficients"]
    if spec.method == "cache-dit" and layout in ("dual", "low only"):
        lows = {f"low_{name}": value for name, value in options.items()}
        options = options | lows if layout == "dual" else lows
    if spec.method == "fixed":
        given = options["steps"].split("/")
        options["steps"] = "/".join(entry for entry in given if entry[0] == "*" or int(entry[0]) < stages)
    return replace(spec, options=options)


# Runs.


@dataclass(frozen=True, slots=True)
class CachedRun:
    """One request on one rank, and what its cache decided there."""

    run: Run
    decisions: tuple[Decision, ...]

    @property
    def hits(self) -> int:
        """Calls that the rule would reuse: with `forced`, of its shadow."""
        return sum(decision.judgement.verdict == "reuse" for decision in self.decisions)

    @property
    def misses(self) -> int:
        return len(self.decisions) - self.hits

    def verdicts(self) -> list[tuple[Any, ...]]:
        return verdicts(self.decisions)


@contextmanager
def mounted(engine: WanReference, cache: CacheSpec | str | None) -> Iterator[None]:
    """`cache`, if any, is on the engine in here, and off again however this ends."""
    if cache is not None:
        engine.mount(cache)
    try:
        yield
    finally:
        engine.unmount()


def output_of(engine: WanReference, request: Request, cache: CacheSpec | str) -> Output:
    """One request with this cache mounted for it alone."""
    with mounted(engine, cache):
        return engine(request)


def run_cached(
    engine: WanReference, request: Request, cache: CacheSpec | str | None, hook: Callable[[Event], None] | None = None
) -> CachedRun:
    """The same, recorded."""
    with mounted(engine, cache):
        return run_mounted(engine, request, hook)


def run_mounted(engine: WanReference, request: Request, hook: Callable[[Event], None] | None = None) -> CachedRun:
    """The same with whatever is mounted, which stays: a cache that is mounted anew has nothing left of a request."""
    decisions: list[Decision] = []

    def keep(event: Event) -> None:
        if isinstance(event, Decision):
            decisions.append(event)
        if hook is not None:
            hook(event)

    try:
        return CachedRun(observed(engine, request, keep), tuple(decisions))
    finally:
        engine.observer = None


def run_all(
    folder: Path,
    topology: str,
    dtype: str,
    layout: str,
    jobs: Sequence[tuple[Request, CacheSpec | None]],
) -> list[CachedRun]:
    """For ranks: one engine, these requests in turn, each with its cache."""
    engine = load_engine(folder, topology, dtype, **LAYOUTS[layout])
    return [run_cached(engine, request, cache) for request, cache in jobs]


def decisions_on_rank(folder: Path, topology: str, cache: str, request: Request) -> tuple[Decision, ...]:
    """For ranks: one engine of the usual defaults, one request."""
    return tuple(output_of(load_engine(folder, topology, defaults=defaults()), request, cache).decisions)


# Decisions.


def key_of(decision: Decision) -> tuple[int, str, str, int]:
    """(step, expert, branch, stage)."""
    where = decision.where
    return where.step.index, where.step.expert, where.branch, where.place.stage


def verdicts(decisions: Sequence[Decision]) -> list[tuple[Any, ...]]:
    """What was decided at each logical place and by which numbers, whatever rank and request it was on."""
    return [(*key_of(decision), decision.judgement, decision.verdict) for decision in decisions]


def groups(decisions: Iterable[Decision]) -> dict[Group, list[Decision]]:
    """The decisions of each rule state, in order."""
    grouped: dict[Group, list[Decision]] = {}
    for decision in decisions:
        grouped.setdefault(key_of(decision)[1:], []).append(decision)
    return grouped


def rulings(decisions: Iterable[Decision]) -> list[Ruling]:
    """What the rule said, to be held against its replay: under `forced`, the shadow."""
    judgements = [decision.judgement for decision in decisions]
    assert all(judgement.accumulated_after is not None for judgement in judgements)
    return [Ruling(j.verdict == "reuse", float(j.accumulated_after or 0.0)) for j in judgements]


def signals(decisions: Iterable[Decision]) -> list[float | None]:
    return [decision.judgement.signal for decision in decisions]


def hits_and_misses(decisions: Sequence[Decision]) -> tuple[int, int]:
    """How many calls reused and how many computed. A test that claims a cache asserts that neither is 0."""
    hits = sum(decision.verdict == "reuse" for decision in decisions)
    return hits, len(decisions) - hits


def check_fired(runs: Sequence[CachedRun]) -> None:
    """Fail unless there is a hit and a miss: a test of a cache that did nothing proves nothing."""
    hits, misses = sum(run.hits for run in runs), sum(run.misses for run in runs)
    assert hits > 0, f"no hit in {misses} decisions: this run says nothing about a cache"
    assert misses > 0, f"no miss in {hits} decisions: this run says nothing about a cache"
