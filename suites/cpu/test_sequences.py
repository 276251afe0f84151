"""Contract 4 on one engine: whatever came before a request, it is bitwise the request on a fresh engine."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from suites.sequence import BASE, REFUSED, REQUESTS, fresh, result
from suites.support import births, load_engine
from wanref.denoise import RequestAborted
from wanref.observe import Event, StepEvent, TensorEvent
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu


class Planted(Exception):
    """What the tests make an engine run into."""


def aborting(engine: WanReference, at: int) -> Callable[[Event], None]:
    """An observer that aborts while step `at` runs."""
    return lambda event: engine.abort() if isinstance(event, StepEvent) and event.step.index == at else None


def raising(at: int) -> Callable[[Event], None]:
    """An observer that raises at its event number `at`."""
    seen: list[Event] = []

    def observer(event: Event) -> None:
        seen.append(event)
        if len(seen) == at + 1:
            raise Planted(f"at event {at}")

    return observer


class AnySequence(RuleBasedStateMachine):
    """One engine; each rule disturbs it, or does not, and then asks for a request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.engine = load_engine(folder)

    @rule(request=st.sampled_from(REQUESTS))
    def run(self, request: Request) -> None:
        self.engine.observer = None
        assert result(self.engine, request) == fresh(self.folder, request)
        assert self.engine.exchange._sends == []

    @rule(request=st.sampled_from(REQUESTS), at=st.integers(0, 3), then=st.sampled_from(REQUESTS))
    def abort(self, request: Request, at: int, then: Request) -> None:
        self.engine.observer = aborting(self.engine, at)
        if at + 1 < request.steps:
            with pytest.raises(RequestAborted, match=f"before step {at + 1} of {request.steps}"):
                self.engine(request)
        else:  # nothing is left to abort
            assert result(self.engine, request) == fresh(self.folder, request)
        self.run(then)

    @rule(request=st.sampled_from(REQUESTS), at=st.integers(0, 40), then=st.sampled_from(REQUESTS))
    def observer_raises(self, request: Request, at: int, then: Request) -> None:
        self.engine.observer = raising(at)
        try:
            ran = result(self.engine, request)
        except Planted:
            pass
        else:  # the request had fewer events
            assert ran == fresh(self.folder, request)
        self.run(then)

    @rule(request=st.sampled_from([each for each in REQUESTS if each.frames > 1]), then=st.sampled_from(REQUESTS))
    def decoding_breaks_off(self, request: Request, then: Request) -> None:
        self.engine.observer = None
        with BreakingDecode(self.engine):
            if request.output_type == "video":
                with pytest.raises(Planted):
                    self.engine(request)
            else:
                assert result(self.engine, request) == fresh(self.folder, request)
        self.run(then)

    @rule(request=st.sampled_from(REFUSED), then=st.sampled_from(REQUESTS))
    def refuse(self, request: Request, then: Request) -> None:
        with pytest.raises(ValueError, match="="):
            self.engine(request)
        self.run(then)

    @rule(then=st.sampled_from(REQUESTS))
    def abort_without_a_request(self, then: Request) -> None:
        self.engine.abort()
        self.run(then)


class BreakingDecode:
    """The VAE raises at its second latent frame, when its causal feature cache is full."""

    def __init__(self, engine: WanReference) -> None:
        assert engine._decoder is not None
        self.decoder = engine._decoder.vae.decoder

    def __enter__(self) -> None:
        calls: list[None] = []

        def fail_the_second_time(*_: object) -> None:
            calls.append(None)
            if len(calls) == 2:
                raise Planted("while decoding")

        self.hook = self.decoder.register_forward_pre_hook(fail_the_second_time)

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def test_any_sequence_of_requests_and_mishaps_leaves_the_engine_as_fresh(tiny: Callable[..., Path]) -> None:
    folder = tiny(layout="dual")
    run_state_machine_as_test(
        lambda: AnySequence(folder),
        settings=settings(
            max_examples=12, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_fresh_results_differ_so_that_none_can_pass_for_another(tiny: Callable[..., Path]) -> None:
    results = [fresh(tiny(layout="dual"), request) for request in REQUESTS]
    assert len({latents for latents, _ in results}) == len(REQUESTS)


def test_abort_from_another_thread_stops_the_request(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(layout="dual"))
    started = threading.Event()
    aborter = threading.Thread(target=lambda: (started.wait(20), engine.abort()))

    def wait_in_step_1(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step.index == 1:
            started.set()
            aborter.join(20)

    engine.observer = wait_in_step_1
    aborter.start()
    with pytest.raises(RequestAborted, match="before step 2 of 4"):
        engine(BASE)
    engine.observer = None
    assert result(engine, BASE) == fresh(tiny(layout="dual"), BASE)


# Nothing of a request outlives it.


def abort_it(engine: WanReference) -> None:
    engine.observer = aborting(engine, 2)
    with pytest.raises(RequestAborted):
        engine(BASE)


def raise_in_project(engine: WanReference) -> None:
    def observer(event: Event) -> None:
        if isinstance(event, TensorEvent) and event.key.block == "project" and event.key.step == 2:
            raise Planted

    engine.observer = observer
    with pytest.raises(Planted):
        engine(BASE)


def break_decode(engine: WanReference) -> None:
    with BreakingDecode(engine), pytest.raises(Planted):
        engine(BASE)


def complete(engine: WanReference) -> None:
    engine(BASE)


@pytest.mark.parametrize("mishap", [complete, abort_it, raise_in_project, break_decode])
def test_no_tensor_of_a_request_outlives_it(tiny: Callable[..., Path], mishap: Callable[[WanReference], None]) -> None:
    engine = load_engine(tiny(layout="dual"))
    engine(BASE)  # what libraries build when they are first used
    with births() as born:
        mishap(engine)
        engine.observer = None
        assert born() == []
