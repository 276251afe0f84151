"""T0 to T2 by their formulas: on arrays whose answers are known, and on what must be refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.verdict.tolerance import (
    T1Limits,
    T1Measure,
    ToleranceError,
    calibrate_t1,
    drift_limits,
    judge_t1,
    judge_t2,
    measure_t1,
    perturbation,
    relative_distance,
    same_bytes,
    start_limits,
    unit_roundoff,
)

pytestmark = pytest.mark.cpu

U = unit_roundoff("bfloat16")
PLAIN = T1Measure(rho=1.2, token_rho=1.6, channel_rho=3.0, beta=1e-4, mu=0.01, unit_roundoff=U)
NUMBERS = np.random.default_rng(0)
R = NUMBERS.standard_normal((2, 6, 8)).astype(np.float32)
B = (R + 0.01 * NUMBERS.standard_normal(R.shape)).astype(np.float32)


def put(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


def test_t0_is_of_bytes() -> None:
    zero = np.zeros(3, np.float32)
    assert same_bytes(zero, zero.copy())
    assert same_bytes(R.T, R.T.copy())
    assert not same_bytes(zero, -zero), "-0 is another value to the next division"
    for other in (zero.astype(np.float64), np.zeros(4, np.float32), put(zero, (1,), math.nan), zero[:0]):
        with pytest.raises(ToleranceError):
            same_bytes(zero, other)


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_rho_is_the_error_in_units_of_the_bases_own(times: float) -> None:
    r, b = R.astype(np.float64), B.astype(np.float64)
    measure = measure_t1(r, b, r + times * (b - r), U)
    assert (measure.rho, measure.token_rho, measure.channel_rho) == pytest.approx((times,) * 3)


def test_one_token_and_one_channel_are_seen_where_the_whole_is_not() -> None:
    for at, name in (((1, 3), "token_rho"), ((slice(None), slice(None), 5), "channel_rho")):
        c = B.copy()
        c[at] += 4 * (B - R)[at]
        measure = measure_t1(R, B, c, U)
        assert getattr(measure, name) == pytest.approx(5, rel=1e-3)
        assert measure.rho < 2.5


def test_one_rounding_is_granted_to_a_base_without_error() -> None:
    floor = U * float(np.sqrt(np.mean(R.astype(np.float64) ** 2))) / math.sqrt(3)
    measure = measure_t1(R.astype(np.float64), R.astype(np.float64), R.astype(np.float64) + floor, U)
    assert measure.rho == pytest.approx(1)
    assert measure.mu == pytest.approx(1)
    zeros = put(R, (0, 2), 0.0)
    assert measure_t1(zeros, zeros, zeros, U).token_rho == 0
    assert measure_t1(zeros, zeros, put(zeros, (0, 2, 1), 1e-9), U).token_rho == math.inf


@pytest.mark.parametrize("gain", [-0.02, 0.01])
def test_beta_is_the_gain_beyond_the_bases(gain: float) -> None:
    r = R.astype(np.float64)
    assert measure_t1(r, 1.005 * r, (1.005 + gain) * r, U).beta == pytest.approx(abs(gain))


@given(st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_a_scale_or_an_order_of_tokens_changes_nothing(scale: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    r = draw.standard_normal((6, 8))
    b, c = (r + 0.01 * draw.standard_normal(r.shape) for _ in range(2))
    order = draw.permutation(6)
    before, after = measure_t1(r, b, c, U), measure_t1(scale * r[order], scale * b[order], scale * c[order], U)
    for name in ("rho", "token_rho", "channel_rho", "beta", "mu"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-9, abs=1e-12)


@given(st.integers(0, 2), st.integers(0, R.size - 1), st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=40, deadline=None)
def test_what_is_not_finite_is_named(which: int, place: int, value: float) -> None:
    arrays = [R, B, B]
    arrays[which] = put(R, np.unravel_index(place, R.shape), value)  # type: ignore[arg-type]
    with pytest.raises(ToleranceError, match=f"{('reference', 'base', 'candidate')[which]} is not finite"):
        measure_t1(arrays[0], arrays[1], arrays[2], U)


def test_t1_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ToleranceError, match="For fp32 on the CPU the claim is T0"):
        unit_roundoff("float32")
    with pytest.raises(ToleranceError, match="For fp32 on the CPU the claim is T0"):
        measure_t1(R, B, B, 2.0**-24)
    for arrays, message in (
        ((R, B, B[:1]), r"candidate is float32\(1, 6, 8\)"),
        ((R, B.astype(np.float64), B), "base is float64"),
        ((R[:0], B[:0], B[:0]), "reference is not a floating array with something in it"),
        ((R.astype(np.int32),) * 3, "reference is not a floating"),
        ((R[0, 0], B[0, 0], B[0, 0]), "need two axes"),
        ((0 * R, B, B), "reference is zero everywhere"),
    ):
        with pytest.raises(ToleranceError, match=message):
            measure_t1(*arrays, U)


def test_a_judgement_names_what_failed() -> None:
    limits = T1Limits(rho=2, token_rho=2, beta=U)
    assert judge_t1(PLAIN, limits) == ()
    assert judge_t1(PLAIN, start_limits(U)) == ()
    assert judge_t1(replace(PLAIN, rho=2.5, beta=0.01), limits) == (("rho", 2.5), ("beta", 0.01))
    assert judge_t1(replace(PLAIN, token_rho=2.1), limits) == (("token_rho", 2.1),)
    assert judge_t1(replace(PLAIN, mu=0.26), limits) == (("mu", 0.26),)
    assert [name for name, _ in judge_t1(replace(PLAIN, mu=math.nan), limits)] == ["mu"]


def test_a_calibration_is_the_worst_times_its_margin() -> None:
    limits = calibrate_t1([PLAIN, PLAIN, PLAIN, replace(PLAIN, rho=2.0), replace(PLAIN, token_rho=2.4)])
    assert limits == T1Limits(rho=2.5, token_rho=3.0, beta=U, mu=0.25)


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ([PLAIN] * 4, "4 benign variants: a calibration needs at least 5"),
        ([PLAIN] * 4 + [replace(PLAIN, rho=2.01)], r"want rho\*=2.51, and more than 2.5 is refused"),
        ([PLAIN] * 4 + [replace(PLAIN, rho=math.nan)], r"want rho\*=nan"),
        ([PLAIN] * 4 + [replace(PLAIN, unit_roundoff=2.0**-11)], "several dtypes"),
        ([PLAIN] * 4 + [replace(PLAIN, beta=0.01)], "variant 4 is not benign: beta=0.01"),
        ([PLAIN] * 4 + [replace(PLAIN, mu=0.3)], "variant 4 is not benign: mu=0.3"),
    ],
)
def test_calibrations_that_are_refused(measures: list[T1Measure], message: str) -> None:
    with pytest.raises(ToleranceError, match=message):
        calibrate_t1(measures)


def test_t2_gives_the_first_step_outside() -> None:
    limits = drift_limits([(0.1, 0.2, 0.1), (0.2, 0.1, 0.1), (0.1, 0.1, 0.3)], kappa=2)
    assert limits == pytest.approx((0.4, 0.4, 0.6))
    assert judge_t2((0.4, 0.4, 0.6), limits) is None
    assert judge_t2((0.4, 0.41, 0.9), limits) == 1
    assert judge_t2((0.4, math.nan, 0.6), limits) == 1


@pytest.mark.parametrize(
    ("drifts", "kappa", "message"),
    [
        ([(0.1,)] * 3, 1.9, "kappa=1.9 is not accepted"),
        ([(0.1,)] * 3, 3.1, "kappa=3.1 is not accepted"),
        ([(0.1,)] * 3, math.nan, "kappa=nan is not accepted"),
        ([(0.1,)] * 2, 2, "2 perturbed runs: at least 3"),
        ([(0.1,), (0.1,), (0.1, 0.2)], 2, "perturbed run 2 has 2 steps"),
        ([()] * 3, 2, "perturbed run 0 has 0 steps"),
        ([(0.1,), (0.0,), (0.1,)], 2, "perturbed run 1 does not drift at all"),
        ([(0.1,), (0.1,), (math.inf,)], 2, "perturbed run 2 has a drift that is negative or not finite"),
    ],
)
def test_drifts_that_are_refused(drifts: list[tuple[float, ...]], kappa: float, message: str) -> None:
    with pytest.raises(ToleranceError, match=message):
        drift_limits(drifts, kappa)


def test_t2_of_unequal_or_no_steps_is_refused() -> None:
    for distances, limits in (((0.1,), (0.1, 0.2)), ((), ())):
        with pytest.raises(ToleranceError, match="steps against limits"):
            judge_t2(distances, limits)


def test_distance_and_perturbation() -> None:
    assert relative_distance(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(0.1)
    with pytest.raises(ToleranceError, match="base is zero"):
        relative_distance(np.zeros(2), np.ones(2))
    noise = perturbation((4, 50), U, seed=3)
    assert set(np.unique(noise)) == {np.float32(-U), np.float32(U)}
    assert noise.dtype == np.float32
    assert (noise == perturbation((4, 50), U, seed=3)).all()
    assert (noise != perturbation((4, 50), U, seed=4)).any()
