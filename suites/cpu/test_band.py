"""The band's rules: what it says of made-up runs, what it refuses, and what must not change its mind."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.verdict.band import BandError, BandVerdict, MappedRun, judge_band

pytestmark = pytest.mark.cpu

Run = MappedRun[str]
KEYS = [f"k{i}" for i in range(6)]
SEEDS = st.integers(0, 2**32 - 1)
NaN = np.float32("nan")


def runs_of(seed: int, count: int, noise: float = 1e-3, shift: float = 0.0, since: int = 2) -> list[Run]:
    """Runs around one centre that repeat at the first key; `shift` moves all of them from key `since` on."""
    draw, centre = np.random.default_rng(seed), np.random.default_rng(0).standard_normal((len(KEYS), 8, 4))

    def array(i: int) -> np.ndarray:
        jitter = noise * draw.standard_normal((8, 4)) if i else 0.0
        return (centre[i] + jitter + shift * (i >= since) * centre[-1 - i]).astype(np.float32)

    return [MappedRun({key: array(i) for i, key in enumerate(KEYS)}, {"d0": "reuse"}) for _ in range(count)]


def changed(run: Run, key: str, change: Callable[[np.ndarray], Any]) -> Run:
    return replace(run, arrays={**run.arrays, key: change(np.array(run.arrays[key]))})


def nudged(run: Run, key: str) -> Run:
    """One value one unit in the last place up."""

    def nudge(array: np.ndarray) -> np.ndarray:
        array[3, 2] = np.nextafter(array[3, 2], np.float32(math.inf))
        return array

    return changed(run, key, nudge)


def test_the_four_verdicts() -> None:
    base = runs_of(1, 5)
    same = judge_band(base, runs_of(2, 3))
    assert (same.kind, same.key) == ("same within noise", None)
    assert same.visible < 3e-3
    outside = judge_band(base, runs_of(2, 3, shift=0.01))
    assert str(outside).startswith("outside noise from k2 on (p=0.0179")
    decided = [replace(run, decisions={"d0": "compute"}) for run in runs_of(2, 3)]
    assert str(judge_band(base, decided)) == "decisions changed at d0 (head run 0: reuse became compute)"
    assert judge_band(base, runs_of(2, 3), must_see=1e-4).kind == "too noisy to say"


def test_decisions_are_judged_before_any_tensor_is_read() -> None:
    class Unreadable(dict[str, np.ndarray]):
        def __getitem__(self, key: str) -> np.ndarray:
            raise AssertionError("a tensor was read")

    base = [replace(run, arrays=Unreadable(run.arrays)) for run in runs_of(1, 5)]
    for decisions in ({"d0": "compute"}, {}, {"d0": "reuse", "d1": "reuse"}):
        head = [base[0], replace(base[0], decisions=decisions)]
        assert judge_band(base, head).kind == "decisions changed"
    with pytest.raises(BandError, match="base runs 0 and 4 decide differently at d0"):
        judge_band([*base[:4], replace(base[4], decisions={"d0": "compute"})], base[:1])


def test_arrays_of_one_key_are_let_go_before_the_next() -> None:
    read: list[str] = []

    class Lazy(dict[str, np.ndarray]):
        def __getitem__(self, key: str) -> np.ndarray:
            read.append(key)
            return super().__getitem__(key)

    lazy = [replace(run, arrays=Lazy(run.arrays)) for run in runs_of(1, 8)]
    judge_band(lazy[:5], lazy[5:])
    assert read == [key for key in KEYS for _ in range(8)]


@pytest.mark.parametrize(("heads", "needs"), [(1, "0.167 at best, not 0.05; 2 head runs do"), (2, None)])
def test_too_few_runs_for_the_rate_say_nothing(heads: int, needs: str | None) -> None:
    verdict = judge_band(runs_of(1, 5), runs_of(2, heads, shift=1.0))
    assert verdict.attainable == pytest.approx(1 / math.comb(5 + heads, heads))
    assert verdict.kind == ("too noisy to say" if needs else "outside noise")
    if needs is not None:
        assert needs in verdict.reason
        assert {band.visible for band in verdict.keys} == {verdict.visible} == {math.inf}


def test_where_the_base_repeats_bitwise_one_unit_in_the_last_place_is_outside() -> None:
    base, head = runs_of(1, 5), runs_of(2, 3)
    verdict = judge_band(base, [nudged(run, "k0") for run in head])
    assert (verdict.kind, verdict.key, verdict.statistic) == ("outside noise", "k0", math.inf)
    # In one run of three it may be the first of a rare flip: no alarm could keep the rate. It is never `same`.
    verdict = judge_band(base, [nudged(head[0], "k0"), *head[1:]])
    assert (verdict.kind, verdict.key) == ("too noisy to say", "k0")
    # And it hides no fault that comes later.
    later = runs_of(2, 3, shift=0.01)
    assert judge_band(base, [nudged(later[0], "k0"), *later[1:]]).key == "k2"


def test_runs_that_all_repeat_are_the_same() -> None:
    run = runs_of(1, 1)
    verdict = judge_band(run * 5, run * 3)
    assert (verdict.kind, verdict.statistic, verdict.visible) == ("same within noise", 0.0, 0.0)


def test_a_difference_too_small_to_be_squared_is_one() -> None:
    run: Run = MappedRun({"k": np.array([1e-200, 1.0])})
    assert judge_band([run] * 5, [changed(run, "k", lambda a: a * [2, 1])] * 3).kind == "outside noise"


@pytest.mark.parametrize("noise", [0.0, 1e-5, 5e-4])
def test_a_head_that_is_less_noisy_raises_no_alarm(noise: float) -> None:
    # Of 8, as with fewer base runs the true labels cannot stand out for quietness at all.
    kinds = [judge_band(runs_of(seed, 8), runs_of(seed + 1, 3, noise)).kind for seed in range(0, 60, 2)]
    assert kinds == ["same within noise"] * 30


def test_a_head_that_is_noisier_is_outside() -> None:
    assert judge_band(runs_of(1, 5), runs_of(2, 3, noise=1e-2)).key == "k1"


@pytest.mark.parametrize("bad", [NaN, np.float32(math.inf)])
@given(key=st.sampled_from(KEYS), run=st.integers(0, 7), place=st.integers(0, 31))
@settings(max_examples=30, deadline=None)
def test_what_is_not_finite_is_never_the_same(bad: np.float32, key: str, run: int, place: int) -> None:
    def spoil(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[place] = bad
        return array

    runs = runs_of(1, 8)
    runs[run] = changed(runs[run], key, spoil)
    if run < 5:
        with pytest.raises(BandError, match=f"base run {run}, {key}: not finite"):
            judge_band(runs[:5], runs[5:])
    else:
        verdict = judge_band(runs[:5], runs[5:])
        assert (verdict.kind, verdict.statistic, verdict.p_value) == ("outside noise", math.inf, 0.0)
        assert verdict.key is not None
        assert KEYS.index(verdict.key) <= KEYS.index(key)
        assert judge_band(runs[:5], [runs[run]]).key == key, "one run is enough to see that"


def core(verdict: BandVerdict[str]) -> tuple[object, ...]:
    return verdict.kind, verdict.key, verdict.p_value, round(verdict.statistic, 6)


@given(SEEDS, st.sampled_from([0.0, 1e-3, 1e-2]), st.randoms())
@settings(max_examples=25, deadline=None)
def test_the_order_of_the_runs_changes_nothing(seed: int, shift: float, draw: Any) -> None:
    base, head = runs_of(seed, 5), runs_of(seed ^ 1, 3, shift=shift)
    before = judge_band(base, head)
    draw.shuffle(base)
    draw.shuffle(head)
    assert core(judge_band(base, head)) == core(before)


@given(SEEDS, st.sampled_from([0.0, 1e-3, 1e-2]), st.integers(-40, 40))
@settings(max_examples=25, deadline=None)
def test_a_scale_of_all_arrays_changes_nothing(seed: int, shift: float, power: int) -> None:
    runs = runs_of(seed, 5) + runs_of(seed ^ 1, 3, shift=shift)
    scaled: list[Run] = [
        replace(run, arrays={k: a * np.float32(2.0) ** np.float32(power) for k, a in run.arrays.items()})
        for run in runs
    ]
    assert judge_band(scaled[:5], scaled[5:]) == judge_band(runs[:5], runs[5:])


def test_runs_equally_far_from_each_other_are_the_same() -> None:
    """Each run has flipped another place: what tells their ratios apart is rounding, and must count for nothing."""
    runs: list[Run] = [MappedRun({"k": 1 + np.eye(9)[i] * 1e-3}) for i in range(8)]
    verdict = judge_band(runs[:5], runs[5:])
    assert (verdict.kind, verdict.statistic, verdict.p_value) == ("same within noise", 0.0, 1.0)


def test_drawn_relabellings_judge_as_all_of_them_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oracle.verdict.band.MOST_RELABELLINGS", 400)
    assert judge_band(runs_of(1, 8), runs_of(2, 6, shift=0.01)).key == "k2"
    assert judge_band(runs_of(1, 8), runs_of(2, 6)).kind == "same within noise"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:4], r"head run 1, k3: float32\(4, 4\), not as base run 0"),
        (lambda a: a.astype(np.float64), r"head run 1, k3: float64\(8, 4\), not as"),
    ],
)
def test_arrays_unlike_the_base_are_refused(change: Callable[[np.ndarray], Any], message: str) -> None:
    head = runs_of(2, 3)
    with pytest.raises(BandError, match=message):
        judge_band(runs_of(1, 5), [head[0], changed(head[1], "k3", change), head[2]])


def test_what_is_no_evidence_is_refused() -> None:
    base, head = runs_of(1, 5), runs_of(2, 3)
    with pytest.raises(BandError, match="4 base and 3 head runs: at least 5 and 1"):
        judge_band(base[:4], head)
    with pytest.raises(BandError, match="5 base and 0 head"):
        judge_band(base, [])
    with pytest.raises(BandError, match="alarm_rate=0"):
        judge_band(base, head, alarm_rate=0)
    with pytest.raises(BandError, match="head run 0 has other keys than base run 0: k5"):
        judge_band(base, [replace(head[0], arrays={k: head[0].arrays[k] for k in KEYS[:5]})])
    for empty in (np.zeros(0, np.float32), np.zeros(3, np.int32)):
        with pytest.raises(BandError, match=r"base run 0, k: .* is empty or not floating"):
            judge_band([MappedRun({"k": empty})] * 5, [MappedRun({"k": empty})])
    with pytest.raises(BandError, match="without keys"):
        judge_band([MappedRun({})] * 5, [MappedRun({})])
    huge: Run = MappedRun({"k": np.array([1e300])})
    with pytest.raises(BandError, match="overflow"):
        judge_band([huge] * 5, [huge])
