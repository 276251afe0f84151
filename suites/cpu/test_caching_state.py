"""What a cache remembers, as digests: alike on a used and a fresh engine at every call, and nothing after a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from suites.cached import BASE, MATRIX, cache_for
from suites.support import load_engine
from wanref.caching.base import Decision
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec
from wanref.caching.state import digest_of
from wanref.denoise import RequestAborted
from wanref.observe import Event, StateEvent, StepEvent
from wanref.pipeline import WanReference

pytestmark = pytest.mark.cpu

OTHER = replace(BASE, prompt="a blue circle", steps=8, width=48, guidance_scale_2=1.0)
REMEMBERING = {name: text for name, text in MATRIX.items() if name != "fixed"}
EACH = pytest.mark.parametrize("cache", REMEMBERING)


class Planted(Exception):
    """What the tests make an engine run into."""


@dataclass
class Watch:
    """An observer that keeps each state that is told, and looks at the state after every decision."""

    engine: WanReference
    act: Callable[[Event], None] | None = None
    told: list[StateEvent] = field(default_factory=list)
    after: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, StateEvent):
            self.told.append(event)
        if isinstance(event, Decision):
            assert self.engine._mounted is not None
            self.after.append(dict(self.engine._mounted[1].state()))
        if self.act is not None:
            self.act(event)


def watched(engine: WanReference, act: Callable[[Event], None] | None = None) -> Watch:
    watch = engine.observer = Watch(engine, act)
    return watch


def mounted_on(folder: Path, cache: str, forced: bool = False) -> WanReference:
    return load_engine(folder, cache=cache_for(MATRIX[cache], "dual", 1, forced))


@EACH
@pytest.mark.parametrize("forced", [False, True])
def test_a_used_engine_begins_and_goes_on_in_the_states_of_a_fresh_one(
    tiny: Callable[..., Path], cache: str, forced: bool
) -> None:
    used, fresh = (mounted_on(tiny(layout="dual"), cache, forced) for _ in range(2))
    used(BASE)
    used(OTHER)
    second, first = watched(used), watched(fresh)
    used(BASE)
    fresh(BASE)
    assert [(each.request, each.moment) for each in second.told] == [(2, "begin"), (2, "end")]
    assert [(each.request, each.moment) for each in first.told] == [(0, "begin"), (0, "end")]
    begin, end = (each.digests for each in first.told)
    assert second.told[0].digests == begin
    assert set(begin) == {"high.cond", "high.uncond", "low.cond", "low.uncond"}
    assert second.after == first.after
    assert second.told[1].digests == end == {}


@EACH
def test_a_state_changes_with_the_calls_of_its_own_expert_and_branch_alone(
    tiny: Callable[..., Path], cache: str
) -> None:
    engine = mounted_on(tiny(layout="dual"), cache)
    watch = watched(engine)
    decisions = engine(BASE).decisions
    before, changed = dict(watch.told[0].digests), set()
    for decision, after in zip(decisions, watch.after, strict=True):
        own = f"{decision.where.step.expert}.{decision.where.branch}"
        assert {key for key in after if after[key] != before[key]} <= {own}
        if decision.verdict == "compute":
            assert after[own] != before[own], f"{decision.where}: a residual was computed"
            changed.add(own)
        before = after
    assert changed == set(before)


@EACH
def test_another_request_or_other_options_leave_another_state(tiny: Callable[..., Path], cache: str) -> None:
    last = []
    spec = cache_for(MATRIX[cache], "dual", 1)
    names = [name for name in spec.options if name.endswith("threshold")]
    for tried in (spec, replace(spec, options={**spec.options, **dict.fromkeys(names, "0.01")})):
        for request in (BASE, replace(BASE, seed=8)):
            engine = load_engine(tiny(layout="dual"), cache=tried)
            watch = watched(engine)
            engine(request)
            last.append(tuple(watch.after[-1].items()))
    assert len(set(last)) == 4


def abort(engine: WanReference) -> Watch:
    watch = watched(engine, lambda event: engine.abort() if _is_step(event, 4) else None)
    with pytest.raises(RequestAborted):
        engine(BASE)
    return watch


def break_off(engine: WanReference) -> Watch:
    def act(event: Event) -> None:
        if _is_step(event, 4):
            raise Planted

    watch = watched(engine, act)
    with pytest.raises(Planted):
        engine(BASE)
    return watch


@EACH
@pytest.mark.parametrize("mishap", [abort, break_off])
def test_after_an_abort_or_an_exception_no_state_is_left(
    tiny: Callable[..., Path], cache: str, mishap: Callable[[WanReference], Watch]
) -> None:
    engine = mounted_on(tiny(layout="dual"), cache)
    watch = mishap(engine)
    assert len(set(watch.after[-1].values())) > 1, "there was something to forget"
    assert [(each.moment, bool(each.digests)) for each in watch.told] == [("begin", True), ("end", False)]
    again = watched(engine)
    engine(BASE)
    assert again.told[0].digests == watch.told[0].digests


def test_what_is_refused_begins_no_state_and_leaves_none(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(), cache="cache-dit:mask=111111")
    watch = watched(engine)
    with pytest.raises(CacheError):
        engine(replace(BASE, steps=5))
    assert watch.told == []
    assert engine._mounted is not None
    assert engine._mounted[1].state() == {}


def test_a_state_is_computed_for_an_observer_only_and_told_of_a_cache_only(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(tiny())
    watch = watched(engine)
    engine(BASE)
    assert watch.told == []
    engine.observer = None
    engine.mount(CacheSpec("fixed", {"steps": "*.*=2"}))
    assert engine._mounted is not None
    monkeypatch.setattr(engine._mounted[1], "state", lambda: pytest.fail("nobody is looking"))
    assert {d.verdict for d in engine(BASE).decisions} == {"compute", "reuse"}


def _is_step(event: Event, index: int) -> bool:
    return isinstance(event, StepEvent) and event.step.index == index


def test_a_digest_is_of_every_number_and_byte() -> None:
    values = [
        *(0.0, -0.0, 0, None, "0", (), [0.0], [[0.0]], {"a": 0}, {"b": 0}),
        *(torch.zeros(2), torch.zeros(2, 1), torch.zeros(2).half(), torch.zeros(2).neg(), torch.zeros(())),
        *((torch.zeros(2), 1), (1, torch.zeros(2))),
    ]
    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of({"a": (1, torch.ones(3, 2).t())}) == digest_of({"a": (1, torch.ones(2, 3))})
