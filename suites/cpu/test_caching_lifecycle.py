"""Contract 4 with caches: whatever came before on an engine, a request with a cache is the one on a fresh engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from suites.cached import BASE, check_fired, run_cached, verdicts
from suites.support import births, fingerprint, load_engine
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.denoise import RequestAborted
from wanref.observe import Event, StepEvent, TensorEvent
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu

REQUESTS = (
    BASE,
    replace(BASE, steps=8),
    replace(BASE, steps=4, height=16, width=48, frames=5),
    replace(BASE, guidance_scale=1.0, guidance_scale_2=1.0),
    replace(BASE, guidance_scale_2=1.0),
    replace(BASE, guidance_scale=1.0, guidance_scale_2=4.0, scheduler="euler"),
    replace(BASE, boundary_ratio=0.0, prompt="a blue circle"),
    replace(BASE, prompt=("a red square", "a blue circle"), seed=(1, 2), flow_shift=12.0),
)
BOTH = "coefficients=1/0,coefficients_low=1/0"
CACHES = [
    parse_cache(text, forced)
    for text in (
        f"teacache:{BOTH},dialect=teacache,signal=timestep_projection,threshold=0.6,first=1",
        f"teacache:{BOTH},dialect=trt-llm,signal=timestep_embedding,threshold=1.5,reuse=linear",
        f"teacache:{BOTH},dialect=vllm-omni,threshold=0.2",
        "fixed:steps=*.cond=1",
        "cache-dit:threshold=0.5,max_warmup_steps=1,low_threshold=0.5,low_max_warmup_steps=1",
        "cache-dit:threshold=0.5,max_warmup_steps=1,taylorseer_order=1,low_threshold=0.5,low_taylorseer_order=1",
    )
    for forced in (False, True)
]
Result = tuple[Any, list[tuple[Any, ...]]]


class Planted(Exception):
    """What the tests make an engine run into."""


def key(cache: CacheSpec | None) -> str:
    if cache is None:
        return "none"
    told = [str(cache.options[name]) for name in ("dialect", "taylorseer_order") if name in cache.options]
    return " ".join([cache.method, *told, *(["forced"] if cache.forced else [])])


def result(engine: WanReference, request: Request) -> Result:
    """Latents and decisions, of whatever is mounted."""
    output = engine(request)
    return fingerprint(output.latents), verdicts(output.decisions)


class AnySequence(RuleBasedStateMachine):
    """One engine; caches come and go, requests end well or badly, and each is held against a fresh engine's."""

    def __init__(self, folder: Path, memory: dict[tuple[str, Request], Result]) -> None:
        super().__init__()
        self.folder = folder
        self.memory = memory
        self.engine = load_engine(folder)

    def fresh(self, request: Request) -> Result:
        cache = self.engine.cache
        where = key(cache), request
        if where not in self.memory:
            self.memory[where] = result(load_engine(self.folder, cache=cache), request)
        return self.memory[where]

    @initialize(cache=st.sampled_from(CACHES))
    def begin_with(self, cache: CacheSpec) -> None:
        self.engine.mount(cache)
        self.run(BASE)

    @rule(cache=st.sampled_from(CACHES))
    def mount(self, cache: CacheSpec) -> None:
        """Also over another: taken off first, since two at once are refused."""
        if self.engine.cache is not None:
            with pytest.raises(CacheError, match="Unmount it first"):
                self.engine.mount(cache)
            self.engine.unmount()
        self.engine.mount(cache)

    @precondition(lambda self: self.engine.cache is not None)
    @rule()
    def unmount(self) -> None:
        self.engine.unmount()

    @rule(request=st.sampled_from(REQUESTS))
    def run(self, request: Request) -> None:
        self.engine.observer = None
        assert result(self.engine, request) == self.fresh(request)

    @rule(request=st.sampled_from(REQUESTS), at=st.integers(0, 2), then=st.sampled_from(REQUESTS))
    def abort(self, request: Request, at: int, then: Request) -> None:
        self.engine.observer = at_step(at, self.engine.abort)
        with pytest.raises(RequestAborted, match=f"before step {at + 1} of {request.steps}"):
            self.engine(request)
        self.run(then)

    @rule(request=st.sampled_from(REQUESTS), at=st.integers(0, 30), then=st.sampled_from(REQUESTS))
    def observer_raises(self, request: Request, at: int, then: Request) -> None:
        self.engine.observer = raising(at)
        with pytest.raises(Planted):
            self.engine(request)
        self.run(then)

    @rule(option=st.sampled_from(["teacache:tresh=1", "magcache:", "cache-dit:fn=4", "fixed:", "teacache:threshold=1"]))
    def refuse(self, option: str) -> None:
        before = self.engine.cache
        self.engine.unmount()
        with pytest.raises(CacheError):
            self.engine.mount(option)
        assert self.engine.cache is None
        if before is not None:
            self.engine.mount(before)

    @precondition(lambda self: self.engine.cache is not None)
    @rule()
    def what_a_cache_refuses_of_a_request(self) -> None:
        before = self.engine.cache
        self.engine.unmount()
        self.engine.mount("fixed:steps=0.cond=7")
        with pytest.raises(CacheError, match=r"does not run at steps \[7\]"):
            self.engine(BASE)
        self.engine.unmount()
        assert before is not None
        self.engine.mount(before)

    def teardown(self) -> None:
        """Whatever the rules were, each sequence ends in a plain and a cached request."""
        for cache in (None, CACHES[4]):
            self.engine.unmount()
            if cache is not None:
                self.engine.mount(cache)
            self.run(BASE)


def at_step(at: int, act: Callable[[], None]) -> Callable[[Event], None]:
    return lambda event: act() if isinstance(event, StepEvent) and event.step.index == at else None


def raising(at: int) -> Callable[[Event], None]:
    """An observer that raises at its event number `at`."""
    seen: list[Event] = []

    def observer(event: Event) -> None:
        seen.append(event)
        if len(seen) > at:
            raise Planted(f"at event {at}")

    return observer


def test_any_sequence_of_caches_requests_and_mishaps_leaves_the_engine_as_fresh(tiny: Callable[..., Path]) -> None:
    folder, memory = tiny(layout="dual"), {}
    run_state_machine_as_test(
        lambda: AnySequence(folder, memory),
        settings=settings(
            max_examples=10, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    verdicts = {decided[-1] for _, decisions in memory.values() for decided in decisions}
    assert verdicts == {"compute", "reuse"}


@pytest.mark.parametrize("cache", CACHES, ids=key)
def test_each_cache_of_the_sequences_hits_and_misses(tiny: Callable[..., Path], cache: CacheSpec) -> None:
    check_fired([run_cached(load_engine(tiny(layout="dual")), BASE, cache)])


# Nothing of a request outlives it.


def complete(engine: WanReference) -> None:
    engine(BASE)


def abort_it(engine: WanReference) -> None:
    engine.observer = at_step(4, engine.abort)
    with pytest.raises(RequestAborted):
        engine(BASE)


def raise_in_last_step(engine: WanReference) -> None:
    def observer(event: Event) -> None:
        if isinstance(event, TensorEvent) and (event.key.step, event.key.block) == (5, "project"):
            raise Planted

    engine.observer = observer
    with pytest.raises(Planted):
        engine(BASE)


@pytest.mark.parametrize("cache", [*CACHES[::2], CACHES[-1]], ids=key)
def test_no_tensor_of_a_request_outlives_it_though_the_cache_stays_mounted(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, cache: CacheSpec
) -> None:
    engine = load_engine(tiny(layout="dual"), cache=cache)
    assert engine._mounted is not None
    mounted = engine._mounted[1]
    engine(BASE)  # what libraries build when they are first used
    end, held = mounted.end, []

    with births() as born:

        def ending() -> None:
            held.append(len(born()))
            end()
            held.append(len(born()))

        with monkeypatch.context() as patch:
            patch.setattr(mounted, "end", ending)
            engine(BASE)
        assert held[0] > held[1], "the cache held nothing: this test would see nothing"
        for mishap in (complete, abort_it, raise_in_last_step):
            mishap(engine)
            engine.observer = None
            assert born() == [], mishap
