"""Collecting from native runs, held against what the cache itself sees, and the polynomials that are fitted to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oracle.campaign.collect import SIGNALS, Collected, check_track, collect
from oracle.campaign.fit import fit_all, fit_polynomial, teacache_options, transitions
from oracle.campaign.observing import observing
from oracle.campaign.refusal import CampaignError
from suites.cached import output_of
from suites.support import defaults, load_engine
from wanref.caching.registry import build_cache
from wanref.caching.spec import CacheSpec
from wanref.caching.teacache import Signal
from wanref.observe import Event, TensorEvent
from wanref.pipeline import WanReference
from wanref.request import Request
from wanref.topology import Topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle", steps=9, seed=3, output_type="latent")


@pytest.fixture(scope="module")
def engine(tiny: Callable[..., Path]) -> WanReference:
    return load_engine(tiny(layout="dual"), defaults=defaults())


@pytest.fixture(scope="module")
def run(engine: WanReference) -> Collected:
    return collect(engine, REQUEST, pp=2)


# Collecting.


@pytest.mark.parametrize("signal", SIGNALS)
def test_distances_are_those_that_a_cache_decides_by(engine: WanReference, signal: Signal) -> None:
    collected = collect(engine, REQUEST, pp=1)
    teacache = f"teacache:coefficients=1/0,coefficients_low=1/0,signal={signal},threshold=0,first=1,last=0,eps=0"
    decisions = output_of(engine, REQUEST, teacache).decisions
    track = collected.tracks[0]
    assert [(d.where.step.index, d.where.branch) for d in decisions] == [(c.step, c.branch) for c in track.calls]
    seen = 0
    for call, distance, decision in zip(track.calls, track.distances[signal], decisions, strict=True):
        if call.previous is None:
            assert (distance, decision.judgement.signal) == (0, None)
        else:
            assert distance == decision.judgement.signal
            seen += 1
    assert seen == 2 * (9 - 2), "each of two experts and branches has a first call"


def test_changes_and_products_are_those_of_the_residuals_between_blocks(engine: WanReference, run: Collected) -> None:
    outputs: dict[tuple[int, str | None, object], torch.Tensor] = {}

    def keep(event: Event) -> None:
        if isinstance(event, TensorEvent):
            outputs[event.key.step, event.key.branch, event.key.block] = event.tensor.clone()

    with observing(engine, keep):
        engine(REQUEST)
    for stage, (first, last) in enumerate([("embed", 1), (1, 3)]):
        track = run.tracks[stage]
        residuals = [outputs[c.step, c.branch, last] - outputs[c.step, c.branch, first] for c in track.calls]
        flat = torch.stack(residuals).flatten(1).double().numpy()
        assert track.products == pytest.approx(flat @ flat.T / flat.shape[1], rel=1e-9)
        for position, call in enumerate(track.calls):
            out = outputs[call.step, call.branch, last].double()
            assert track.outputs[position] == pytest.approx(float(out.square().mean()))
            if call.previous is not None:
                before = flat[call.previous]
                change = np.abs(flat[position] - before).mean() / np.abs(before).mean()
                assert track.changes[position] == pytest.approx(change, rel=1e-5)


def test_a_call_follows_the_last_of_its_own_expert_and_branch(run: Collected) -> None:
    experts = [step.expert for step in run.schedule]
    for track in run.tracks:
        for call in track.calls:
            if call.previous is None:
                assert call.step == experts.index(experts[call.step])
            else:
                before = track.calls[call.previous]
                assert (before.step, before.branch) == (call.step - 1, call.branch)


def test_collecting_changes_nothing(engine: WanReference) -> None:
    plain = engine(REQUEST).latents
    seen: list[Event] = []
    with observing(engine, seen.append):
        collect(engine, REQUEST, pp=2)
    assert seen, "what observed already still does"
    assert engine.observer is None
    assert torch.equal(engine(REQUEST).latents, plain)


@pytest.mark.parametrize("field", ["changes", "products", "outputs", "timestep_projection"])
def test_a_number_that_is_not_finite_is_refused_with_its_place(run: Collected, field: str) -> None:
    track = run.tracks[1]
    values = (track.distances[field] if field in SIGNALS else getattr(track, field)).copy()  # type: ignore[index]
    values[3] = np.nan
    broken = (
        replace(track, distances={**track.distances, field: values})  # type: ignore[dict-item]
        if field in SIGNALS
        else replace(track, **{field: values})
    )
    call = track.calls[3]
    with pytest.raises(CampaignError, match=f"is not finite at step {call.step}, {call.branch}, stage 1"):
        check_track(broken)


def test_a_render_that_is_not_finite_is_refused(engine: WanReference) -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, TensorEvent) and event.key.step == 2 and event.key.block == 3:
            event.tensor[0, 0, 0] = torch.inf

    with observing(engine, spoil), pytest.raises(CampaignError, match="at step 2, cond, stage 0"):
        collect(engine, REQUEST, pp=1)


def test_only_one_native_video_is_collected(engine: WanReference) -> None:
    with pytest.raises(CampaignError, match="2 videos in one request are not accepted"):
        collect(engine, replace(REQUEST, videos_per_prompt=2), pp=1)
    engine.mount(CacheSpec("fixed", {"steps": "*.*=1"}))
    try:
        with pytest.raises(CampaignError, match="cache='fixed' is mounted"):
            collect(engine, REQUEST, pp=1)
    finally:
        engine.unmount()


# Fitting.


def test_a_polynomial_is_found_again() -> None:
    x = np.linspace(0.05, 0.4, 60)
    coefficients = (3.0, -2.0, 0.5, 1.5, 0.01)
    fit = fit_polynomial(x, np.polyval(coefficients, x), 1, "high", "modulated_input")
    assert fit.coefficients == pytest.approx(coefficients, rel=1e-6)
    assert fit.rms_error < 1e-12
    assert fit.explained == pytest.approx(1)
    assert (fit.input_range, fit.pairs, fit.negative) == ((0.05, 0.4), 60, 0)


def test_a_fit_says_how_wrong_it_is() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0.1, 1, 4000)
    noise = 0.1 * rng.standard_normal(len(x))
    fit = fit_polynomial(x, 2 * x + noise, 0, "high", "modulated_input", degree=1)
    assert fit.rms_error == pytest.approx(0.1, rel=0.05)
    assert fit.explained == pytest.approx(1 - 0.01 / np.var(2 * x + noise), rel=0.01)
    # An independent least squares gives the same predictions.
    solution, *_ = np.linalg.lstsq(np.vander(x, 2), 2 * x + noise, rcond=None)
    assert fit.predict(x) == pytest.approx(np.vander(x, 2) @ solution)


def test_negative_predictions_are_counted() -> None:
    # No change is negative, but the line through a parabola, x - 1/6, is below the sixth.
    x = np.linspace(0, 1, 100)
    assert fit_polynomial(x, x**2, 0, "high", "modulated_input", degree=1).negative == pytest.approx(1 / 6, abs=0.01)


def test_pairs_that_are_not_finite_or_too_few_are_refused() -> None:
    x = np.linspace(0, 1, 9)
    for broken in (np.where(x == 0.5, np.nan, x), np.where(x == 0.5, np.inf, x)):
        with pytest.raises(
            CampaignError, match="stage 2, low-noise expert, modulated_input: 1 distances are not finite"
        ):
            fit_polynomial(broken, x, 2, "low", "modulated_input")
        with pytest.raises(CampaignError, match="1 changes are not finite"):
            fit_polynomial(x, broken, 2, "low", "modulated_input")
    with pytest.raises(CampaignError, match="degree=4 needs more than 4 distinct distances, not 4"):
        fit_polynomial(np.array([1, 2, 3, 4, 4.0]), np.ones(5), 0, "high", "modulated_input")
    with pytest.raises(CampaignError, match=r"runs=\[\]"):
        fit_all([], "modulated_input")


def test_every_transition_of_an_expert_is_fitted_and_no_other(run: Collected) -> None:
    split = run.schedule.split
    assert min(split.values()) > 1
    for expert, steps in split.items():
        distances, changes = transitions([run, run], 1, expert, "modulated_input")
        assert len(distances) == len(changes) == 2 * 2 * (steps - 1)
        assert (distances > 0).all()
        assert (changes > 0).all()
    fits = fit_all([run], "modulated_input", degree=1)
    assert [(fit.expert, fit.stage) for fit in fits] == [("high", 0), ("high", 1), ("low", 0), ("low", 1)]


def test_fits_make_a_cache_that_keeps_to_its_ranges(engine: WanReference, run: Collected) -> None:
    fits = fit_all([run], "timestep_projection", degree=1)
    spec = CacheSpec("teacache", teacache_options(fits, threshold=0.1, first=1, last=0, reuse="linear"))
    build_cache(spec, engine.checkpoint, Topology(pp=2))
    alone = fit_all([collect(engine, REQUEST, pp=1)], "timestep_projection", degree=1)
    options = teacache_options(alone, threshold=1e9, first=1, last=0)
    decisions = output_of(engine, REQUEST, CacheSpec("teacache", options)).decisions
    assert {d.verdict for d in decisions} == {"compute", "reuse"}
    assert not any(d.judgement.reason == "range_guard" for d in decisions), "the calibration's own run is in range"
    # Another schedule is not: its steps are larger.
    wider = output_of(engine, replace(REQUEST, steps=5), CacheSpec("teacache", options)).decisions
    assert any(d.judgement.reason == "range_guard" for d in wider)
