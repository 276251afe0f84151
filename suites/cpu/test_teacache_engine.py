"""TeaCache on real transformers: what an engine records replays equal, and the plan is the one of a live run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import wanref.pipeline
from oracle.evidence.ranks import RankPool
from oracle.verdict.decisions import TeaCacheTerms, replay_teacache, teacache_terms
from suites.cached import MICRO, MICRO_DUAL, decisions_on_rank, groups, hits_and_misses, output_of, rulings, signals
from suites.support import defaults, load_engine
from wanref.caching.base import Decision
from wanref.caching.error import CacheError
from wanref.caching.report import tally
from wanref.caching.spec import CacheSpec
from wanref.caching.teacache import DIALECTS
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red circle moving left over dots", steps=14, seed=3, output_type="latent")
# Timesteps change by .16 to .54 here, the modulated input by .08 to .18. These fall below 0 within reach.
POLYNOMIAL, THRESHOLD = (1.0, -0.2), 0.1
POLYNOMIAL_OF_INPUT, THRESHOLD_OF_INPUT = (1.0, -0.12), 0.02


@pytest.fixture(scope="module", params=[MICRO, MICRO_DUAL], ids=["micro", "micro-dual"])
def engine(request: pytest.FixtureRequest) -> WanReference:
    return load_engine(request.param, defaults=defaults())


@pytest.fixture(scope="module")
def micro() -> WanReference:
    return load_engine(MICRO, defaults=defaults())


def teacache(engine: WanReference, coefficients: Sequence[float] = POLYNOMIAL, **options: Any) -> CacheSpec:
    names = ("coefficients", "coefficients_low")[: len(engine.checkpoint.experts)]
    polynomials = dict.fromkeys(names, "/".join(map(str, coefficients)))
    return CacheSpec("teacache", {"threshold": THRESHOLD, **polynomials, **options})


def check_replay(decisions: Sequence[Decision], terms: TeaCacheTerms) -> None:
    for group in groups(decisions).values():
        assert rulings(group) == replay_teacache(terms, signals(group))


@pytest.mark.parametrize("sign", ["signed", "abs", "clamp"])
@pytest.mark.parametrize("signal", ["timestep_embedding", "timestep_projection", "modulated_input"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_an_engine_recorded_replays_equal(engine: WanReference, dialect: str, signal: str, sign: str) -> None:
    known = signal in DIALECTS[dialect].forced
    ends = (2, 1)
    polynomial, threshold = POLYNOMIAL, THRESHOLD
    if signal == "modulated_input":
        polynomial, threshold = POLYNOMIAL_OF_INPUT, THRESHOLD_OF_INPUT
    given = {} if known else {"first": ends[0], "last": ends[1]}
    spec = teacache(engine, polynomial, dialect=dialect, signal=signal, sign=sign, threshold=threshold, **given)
    decisions = output_of(engine, REQUEST, spec).decisions
    if known:
        ends = teacache_terms(dialect, signal, polynomial, threshold).ends
    check_replay(decisions, TeaCacheTerms(polynomial, threshold, sign, ends, DIALECTS[dialect].cap))
    hits, misses = hits_and_misses(decisions)
    assert hits > 0
    assert misses > len(groups(decisions)), "more than first steps were computed"


@pytest.mark.parametrize("dialect", ["teacache", "sglang", "trt-llm"])
@pytest.mark.parametrize("signal", ["timestep_embedding", "timestep_projection"])
def test_published_coefficients_decide_as_in_the_public_engines(micro: WanReference, dialect: str, signal: str) -> None:
    spec = CacheSpec(
        "teacache", {"dialect": dialect, "signal": signal, "threshold": "0.08", "coefficients": "t2v-1.3b"}
    )
    published = {
        "timestep_projection": [-52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664],
        "timestep_embedding": [2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774],
    }
    decisions = output_of(micro, REQUEST, spec).decisions
    check_replay(decisions, teacache_terms(dialect, signal, published[signal], 0.08))
    hits, misses = hits_and_misses(decisions)
    assert misses > 0
    # This polynomial falls far below 0 on this model's steps: signed it skips, absolute it always computes.
    never = (dialect, signal) == ("trt-llm", "timestep_projection")
    assert (hits == 0) == never
    assert not spec.qualified


@pytest.mark.parametrize("signal", ["timestep_embedding", "timestep_projection"])
def test_the_planned_changes_are_those_of_the_embeddings_of_the_loop(
    engine: WanReference, signal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two videos a prompt: a timestep is embedded for both at once, as in the loop.
    request = Request(prompt="dots", steps=14, seed=3, output_type="latent", videos_per_prompt=2)
    live: dict[str, list[torch.Tensor]] = {expert: [] for expert in engine.stages}
    denoise = wanref.pipeline.denoise

    def watched(job: Any, latents: torch.Tensor) -> torch.Tensor:
        for expert, stage in job.stages.items():
            embed = stage.time_embedding

            def keep(*args: Any, embed: Any = embed, expert: str = expert) -> Any:
                found = embed(*args)
                live[expert].append(found[signal == "timestep_projection"])
                return found

            monkeypatch.setattr(stage, "time_embedding", keep, raising=False)
        return denoise(job, latents)

    monkeypatch.setattr(wanref.pipeline, "denoise", watched)
    decisions = output_of(engine, request, teacache(engine, signal=signal)).decisions
    for (expert, _, _), group in groups(decisions).items():
        changes = [
            ((now - then).abs().mean() / then.abs().mean()).item()
            for then, now in zip(live[expert], live[expert][1:], strict=False)
        ]
        assert live[expert][0].shape[0] == 2
        assert signals(group) == [None, *changes]


class HostReads(TorchFunctionMode):
    """Counts what takes a tensor's values to the host."""

    NAMES = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(function, "__name__", "") in self.NAMES
        return function(*args, **(kwargs or {}))


def host_reads(engine: WanReference, spec: CacheSpec | None, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often values were read by the host while the cache began, and in the loop."""
    loop, begin = HostReads(), HostReads()
    denoise = wanref.pipeline.denoise

    def counted(job: Any, latents: torch.Tensor) -> torch.Tensor:
        with loop:
            return denoise(job, latents)

    with monkeypatch.context() as patch:
        patch.setattr(wanref.pipeline, "denoise", counted)
        if spec is None:
            engine(REQUEST)
            return 0, loop.count
        engine.mount(spec)
        assert engine._mounted is not None
        cache = engine._mounted[1]
        begins = cache.begin

        def counted_begin(request: Any) -> None:
            with begin:
                begins(request)

        patch.setattr(cache, "begin", counted_begin)
        try:
            engine(REQUEST)
        finally:
            engine.unmount()
    return begin.count, loop.count


def test_a_timestep_signal_costs_one_copy_to_the_host_before_the_loop_and_none_in_it(
    engine: WanReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, native = host_reads(engine, None, monkeypatch)
    for signal in ("timestep_embedding", "timestep_projection"):
        assert host_reads(engine, teacache(engine, signal=signal), monkeypatch) == (1, native)
    live = teacache(engine, dialect="vllm-omni")
    begun, looped = host_reads(engine, live, monkeypatch)
    assert (begun, looped) == (0, native + 2 * REQUEST.steps), "one a call"


def accumulators(decisions: Sequence[Decision]) -> list[float | None]:
    return [decision.judgement.accumulated_after for decision in decisions]


def test_p5_the_modulated_input_depends_on_the_prompt_and_a_timestep_does_not(micro: WanReference) -> None:
    other = Request(prompt="a blue square moving right over stripes", steps=14, seed=3, output_type="latent")
    for signal, same in (("modulated_input", False), ("timestep_embedding", True)):
        spec = teacache(micro, coefficients=(1, 0), signal=signal, threshold=0.3, first=1)
        one, two = (accumulators(output_of(micro, each, spec).decisions) for each in (REQUEST, other))
        assert any(one), "nothing was ever accumulated"
        assert (one == two) is same, signal


def test_the_modulated_input_is_that_of_the_first_local_block(ranks: RankPool) -> None:
    cache = "teacache:dialect=vllm-omni,threshold=0.3,coefficients=1/0"
    whole = ranks.run(1, decisions_on_rank, MICRO, "pp1cfg1", cache, REQUEST)[0]
    first, second = ranks.run(2, decisions_on_rank, MICRO, "pp2cfg1", cache, REQUEST)
    # At step 1 nothing has been reused yet: both layouts see the same hidden states.
    change = {
        (d.where.place.topology.pp, d.where.place.stage): d.judgement.signal for d in (whole[2], first[2], second[2])
    }
    assert [d.where.step.index for d in (whole[2], first[2], second[2])] == [1, 1, 1]
    assert change[1, 0] == change[2, 0] != change[2, 1]
    for decisions in (first, second):
        check_replay(decisions, teacache_terms("vllm-omni", "modulated_input", (1.0, 0.0), 0.3))
        assert min(hits_and_misses(decisions)) > 0


def test_guard_trips_are_counted_and_reported(micro: WanReference) -> None:
    decisions = output_of(micro, REQUEST, teacache(micro, ranges={"high": [[0.2, 0.3]]})).decisions
    trips = sum(d.judgement.reason == "range_guard" for d in decisions)
    assert 0 < trips < len(decisions)
    assert sum(row.guard_trips for row in tally(decisions, 6)) == trips
    terms = TeaCacheTerms(POLYNOMIAL, THRESHOLD, "signed", (5, 0), None, (0.2, 0.3))
    check_replay(decisions, terms)


def test_a_live_signal_that_is_not_finite_names_step_branch_and_stage(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(), defaults=defaults())
    prepare, calls = engine.stages["high"].prepare_step, []

    def prepare_step(*args: Any) -> Any:
        inputs = prepare(*args)
        calls.append(inputs)
        if len(calls) == 3:
            inputs.modulations[0].attn_shift.fill_(float("nan"))
        return inputs

    engine.stages["high"].prepare_step = prepare_step  # type: ignore[method-assign]
    with pytest.raises(CacheError, match="modulated_input signal is nan at step 2, cond, stage 0, high-noise expert"):
        output_of(engine, Request(prompt="dots", output_type="latent"), teacache(engine, dialect="vllm-omni"))
