"""TeaCache judges as its options say: against an independent replay, for every dialect, signal and sign policy."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.verdict.decisions import CAPS, FORCED_ENDS, SIGNS, Ruling, TeaCacheTerms, replay_teacache, teacache_terms
from suites.scripted import DictatedStage, begin_of, schedule_of
from wanref.caching.base import Judgement
from wanref.caching.error import CacheError
from wanref.caching.registry import build_cache
from wanref.caching.spec import CacheSpec
from wanref.caching.teacache import DIALECTS, TeaCache, TeaCacheOptions, options_of
from wanref.checkpoint import open_checkpoint
from wanref.topology import Topology

pytestmark = pytest.mark.cpu

T2V_PROJECTION = (-52186.2437, 9230.41404, -528.275948, 13.6987616, -0.0499875664)
IDENTITY = (1.0, 0.0)


def judge(
    options: dict[tuple[int, str], TeaCacheOptions], signal: dict[str, list[float]]
) -> dict[int, list[Judgement]]:
    """The judgements of cond by stage, for experts whose timestep signals take these values in turn."""
    steps = [(expert, 1 - i / 64) for i, expert in enumerate(e for e, values in signal.items() for _ in values)]
    values = iter(value for values in signal.values() for value in values)
    schedule = schedule_of(*steps)
    embeddings = {float(step.timestep): (torch.tensor([next(values)]), torch.tensor([math.nan])) for step in schedule}
    stages = {expert: DictatedStage(embeddings) for expert in signal}
    topology = Topology(pp=len({stage for stage, _ in options}))
    plan = TeaCache(options)(begin_of(schedule, topology, stages=stages)).plan
    assert plan is not None
    for stage in range(topology.pp):
        assert plan[stage, "cond"] == plan[stage, "uncond"], "a timestep is the same for both branches"
    return {stage: list(plan[stage, "cond"].values()) for stage in range(topology.pp)}


def rule(**options: object) -> TeaCacheOptions:
    plain = {"signal": "timestep_embedding", "coefficients": IDENTITY, "threshold": 0.1, "eps": 0.0, "sign": "signed"}
    return TeaCacheOptions(**{**plain, "first": 1, "last": 0, **options})  # type: ignore[arg-type]


def rising(change: float, steps: int) -> list[float]:
    """Values of a signal each of which differs from the last by `change`, relatively."""
    return [(1 + change) ** i for i in range(steps)]


@st.composite
def rules(draw: st.DrawFn, eps: float) -> TeaCacheOptions:
    number = st.floats(-20, 20, allow_subnormal=False)
    ends = draw(st.lists(st.floats(0, 1, allow_subnormal=False), min_size=2, max_size=2))
    return rule(
        coefficients=tuple(draw(st.lists(number, min_size=1, max_size=5))),
        threshold=draw(st.floats(0, 2, allow_subnormal=False)),
        eps=eps,
        sign=draw(st.sampled_from(["signed", "abs", "clamp"])),
        first=draw(st.integers(0, 4)),
        last=draw(st.integers(0, 3)),
        cap=draw(st.none() | st.floats(0.25, 3)),
        input_range=draw(st.none() | st.just((min(ends), max(ends)))),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[tuple[int, str], TeaCacheOptions], dict[str, list[float]]]:
    experts = draw(st.sampled_from([("high",), ("low",), ("high", "low")]))
    values = st.lists(st.floats(0.25, 4, width=32), min_size=1, max_size=12)
    eps = draw(st.sampled_from([0.0, 1e-8, 0.5]))
    stages = range(draw(st.integers(1, 3)))
    return {(s, e): draw(rules(eps)) for s in stages for e in experts}, {e: draw(values) for e in experts}


def test_judgements_equal_the_independent_replay_by_decision_and_accumulator() -> None:
    seen = set()

    @settings(max_examples=400, deadline=None, derandomize=True)  # what is covered is asserted below
    @given(cases())
    def check(case: tuple[dict[tuple[int, str], TeaCacheOptions], dict[str, list[float]]]) -> None:
        options, signal = case
        for stage, judgements in judge(options, signal).items():
            rest = iter(judgements)
            for expert, values in signal.items():
                own, judged = options[stage, expert], [next(rest) for _ in values]
                ends = (own.first, own.last)
                terms = TeaCacheTerms(own.coefficients, own.threshold, own.sign, ends, own.cap, own.input_range)
                ruled = [Ruling(j.verdict == "reuse", j.accumulated_after or 0.0) for j in judged]
                assert ruled == replay_teacache(terms, [j.signal for j in judged])
                assert [j.signal for j in judged] == changes(values, own.eps)
                seen.update((own.sign, own.cap is not None, j.reason, j.verdict) for j in judged)

    check()
    for sign in ("signed", "abs", "clamp"):
        for capped in (False, True):
            for verdict in ("compute", "reuse"):
                assert (sign, capped, "threshold", verdict) in seen
    assert {reason for _, _, reason, _ in seen} == {"first", "warmup", "last", "range_guard", "threshold"}


def changes(values: list[float], eps: float) -> list[float | None]:
    """mean|x - prev| / (mean|prev| + eps) of single values, in float32 NumPy."""
    x = np.array(values, dtype=np.float32)
    return [None, *(np.abs(x[1:] - x[:-1]) / (np.abs(x[:-1]) + np.float32(eps))).tolist()]


def test_dialects_are_the_restated_tables_of_the_public_engines() -> None:
    assert {(name, signal) for name, dialect in DIALECTS.items() for signal in dialect.forced} == set(FORCED_ENDS)
    for dialect, signal in FORCED_ENDS:
        ours, theirs = options_of(dialect, signal, IDENTITY, 0.3), teacache_terms(dialect, signal, IDENTITY, 0.3)
        assert ((ours.first, ours.last), ours.sign, ours.cap) == (theirs.ends, theirs.sign, theirs.cap)
    assert SIGNS.keys() == DIALECTS.keys()
    assert {name: dialect.cap for name, dialect in DIALECTS.items() if dialect.cap is not None} == CAPS
    epsilons = {"teacache": 0.0, "vllm-omni": 1e-8, "sglang": 0.0, "trt-llm": 1e-8}
    assert {name: dialect.eps for name, dialect in DIALECTS.items()} == epsilons


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_dialect_refuses_a_signal_that_its_engine_does_not_have(dialect: str) -> None:
    foreign = "timestep_projection" if dialect == "vllm-omni" else "modulated_input"
    with pytest.raises(CacheError, match=f"{foreign}.*not one of dialect {dialect}"):
        options_of(dialect, foreign, IDENTITY, 0.3)


def test_a_negative_polynomial_skips_at_threshold_0_if_signed_and_not_if_clamped_or_absolute() -> None:
    for sign, expected in (("signed", "reuse"), ("clamp", "compute"), ("abs", "compute")):
        options = rule(coefficients=T2V_PROJECTION, threshold=0.0, sign=sign)
        (judgements,) = judge({(0, "high"): options}, {"high": rising(0.25, 4)}).values()
        assert [j.verdict for j in judgements[1:]] == [expected] * 3, sign
        assert all(j.rescaled is not None and (j.rescaled < 0) == (sign == "signed") for j in judgements[1:]), sign


def test_accumulator_is_the_sum_of_the_terms_of_its_hits_without_any_decay() -> None:
    options = rule(threshold=10.0)
    (judgements,) = judge({(0, "high"): options}, {"high": rising(0.3, 9)}).values()
    terms = [judgement.rescaled for judgement in judgements[1:]]
    assert [judgement.verdict for judgement in judgements[1:]] == ["reuse"] * 8
    assert judgements[-1].accumulated_after == sum(term for term in terms if term is not None) > 2.3


def test_cap_holds_the_accumulator_at_its_multiple_of_the_threshold() -> None:
    # A term far below 0 follows a term far above the threshold: what the cap forgets decides the next step.
    values = [1.0, 1.5, 1.5 * 1.02]
    for cap, after in ((0.9, 0.9 * 0.4), (None, 0.5)):
        options = rule(threshold=0.4, cap=cap)
        (judgements,) = judge({(0, "high"): options}, {"high": values}).values()
        assert judgements[1].rescaled == pytest.approx(0.5)
        assert judgements[1].verdict == ("reuse" if cap else "compute")
        assert judgements[1].accumulated_after == (after if cap else 0.0)


def test_a_change_outside_the_calibrated_range_computes_and_says_so() -> None:
    options = rule(threshold=9.0, input_range=(0.09, 0.21))
    (judgements,) = judge({(0, "high"): options}, {"high": [1, 1.1, 1.1 * 1.2, 1.1 * 1.2 * 1.3, 2.0, 2.02]}).values()
    assert [(j.verdict, j.reason) for j in judgements] == [
        ("compute", "first"),
        ("reuse", "threshold"),
        ("reuse", "threshold"),
        ("compute", "range_guard"),
        ("reuse", "threshold"),
        ("compute", "range_guard"),
    ]
    assert judgements[3].accumulated_after == 0.0, "a computed call empties the accumulator, whatever computed it"


@pytest.mark.parametrize("values", [[1.0, 1.1, math.nan], [1.0, 1.1, math.inf], [1.0, 0.0, 1.0], [0.0, 0.0]])
def test_a_change_that_is_not_finite_is_an_error_that_names_the_step_stage_and_expert(values: list[float]) -> None:
    step = len(values) - 1
    with pytest.raises(CacheError, match=rf"is (nan|inf) at step {step}, stage 0, low-noise expert \(both branches\)"):
        judge({(0, "low"): rule()}, {"low": values})


def test_every_stage_has_its_own_coefficients_and_its_own_decisions() -> None:
    options = {(0, "high"): rule(coefficients=(1.0, 0.0)), (1, "high"): rule(coefficients=(0.2, 0.0))}
    by_stage = judge(options, {"high": rising(0.15, 5)})
    assert [j.verdict for j in by_stage[0]] == ["compute"] * 5
    assert [j.verdict for j in by_stage[1]] == ["compute", "reuse", "reuse", "reuse", "compute"]


def test_stages_that_would_judge_by_different_signals_are_refused() -> None:
    options = {(0, "high"): rule(), (1, "high"): rule(signal="modulated_input")}
    with pytest.raises(CacheError, match="signal and eps must be the same"):
        judge(options, {"high": [1.0, 1.1]})


# What is refused before any work.


@pytest.mark.parametrize(
    ("layout", "options", "match"),
    [
        ("single", {}, r"no coefficients for the high-noise expert.*There is no default"),
        ("dual", {}, r"no coefficients for the high and low-noise expert.*coefficients=, coefficients_low="),
        ("dual", {"coefficients": "1/0"}, "no coefficients for the low-noise expert"),
        ("dual", {"coefficients_low": "1/0"}, "no coefficients for the high-noise expert"),
        ("low only", {}, "no coefficients for the low-noise expert.*coefficients_low="),
        ("low only", {"coefficients": "1/0"}, "'coefficients' is not known here"),
        ("single", {"coefficients": "1/0", "coefficients_low": "1/0"}, "'coefficients_low' is not known here"),
        ("single", {"coefficients": "1/0", "decay": 0.95}, "'decay' is not known here"),
        ("single", {"coefficients": "wan"}, "neither a published table .* nor numbers"),
        ("single", {"coefficients": "1/nan"}, "not a list of finite numbers"),
        ("single", {"coefficients": [[1.0, 0.0], [1.0, "0"]]}, "not a list of finite numbers"),
        ("single", {"coefficients": [[1.0, 0.0]]}, "not a list with an entry for stage 1"),
        ("single", {"coefficients": "1/0", "ranges": "0/1"}, "ranges='0/1' is not accepted"),
        ("single", {"coefficients": "1/0", "ranges": {"high": [[1, 0]]}}, "not the lower and the upper end"),
        ("single", {"coefficients": "1/0", "threshold": "nan"}, "threshold='nan' is not accepted"),
        ("single", {"coefficients": "1/0", "first": 1.5}, "first=1.5 is not int"),
        ("single", {"coefficients": "1/0", "sign": "positive"}, "sign='positive' is not accepted"),
        ("single", {"coefficients": "1/0", "dialect": "magcache"}, "dialect='magcache' is not accepted"),
        ("single", {"coefficients": "1/0", "dialect": "vllm-omni", "signal": "timestep_embedding"}, "say first="),
        ("single", {"coefficients": "t2v-1.3b", "dialect": "vllm-omni"}, "published for .* alone"),
    ],
)
def test_what_teacache_cannot_honour_is_refused_before_any_work(
    tiny: Callable[..., Path], layout: str, options: dict[str, object], match: str
) -> None:
    spec = CacheSpec("teacache", {"threshold": 0.1, **options})
    with pytest.raises(CacheError, match=match):
        build_cache(spec, open_checkpoint(tiny(layout=layout)), Topology(pp=2))


def test_threshold_has_no_default(tiny: Callable[..., Path]) -> None:
    with pytest.raises(CacheError, match="threshold= is missing"):
        build_cache(CacheSpec("teacache", {"coefficients": "1/0"}), open_checkpoint(tiny()), Topology())
