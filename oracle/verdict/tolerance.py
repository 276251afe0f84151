"""The tolerances T0 to T2, as pure functions on arrays.

NumPy has no bfloat16: such tensors come as float32 that the trace's reader has already widened. Everything is computed
in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
START_RHO = 2.0
LARGEST_RHO = 2.5
MARGIN = 1.25
MOST_BIAS = 0.25
FEWEST_VARIANTS = 5
FEWEST_PERTURBED = 3
KAPPA = (2.0, 3.0)


class ToleranceError(ValueError):
    """A tolerance was asked of what it cannot judge, or calibrated on what cannot calibrate it."""


def unit_roundoff(dtype: str) -> float:
    """u of a working dtype. Raises ToleranceError for float32 and all others: T1 is for bf16 and fp16."""
    if dtype not in UNIT_ROUNDOFF:
        hint = " For fp32 on the CPU the claim is T0." if dtype == "float32" else ""
        raise ToleranceError(f"dtype={dtype!r} has no T1: give one of {', '.join(UNIT_ROUNDOFF)}.{hint}")
    return UNIT_ROUNDOFF[dtype]


def same_bytes(a: Array, b: Array) -> bool:
    """T0: whether two arrays have the same bytes, so that -0 is not 0.

    Another dtype or shape is an error, not a difference; so are NaN and Inf, which agree whatever was computed.
    """
    _alike(a=a, b=b)
    return np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


@dataclass(frozen=True, slots=True)
class T1Measure:
    """One module's error against the higher precision, in units of the base's own error.

    `rho` is of the whole tensor, `token_rho` of the worst token (a place in all axes but the last), `channel_rho` of
    the worst channel (a place in the last axis). `beta` is a gain, `mu` a share of the candidate's error; none has a
    unit.
    """

    rho: float
    token_rho: float
    channel_rho: float
    beta: float
    mu: float
    unit_roundoff: float


@dataclass(frozen=True, slots=True)
class T1Limits:
    """The largest values that pass, for one dtype. Channels are measured and shown, and have no limit."""

    rho: float
    token_rho: float
    beta: float
    mu: float = MOST_BIAS


def start_limits(unit_roundoff: float) -> T1Limits:
    """The limits before any calibration: rho* = 2 everywhere, beta* = u."""
    return T1Limits(START_RHO, START_RHO, unit_roundoff)


def measure_t1(reference: Array, base: Array, candidate: Array, unit_roundoff: float) -> T1Measure:
    """T1, module-locked: all three are outputs of one module for the reference's inputs; (..., tokens, channels).

    With r the higher precision, b the base in the working dtype, c the candidate, e_x = x - r (design, equivalence.md):
    rho = rms(e_c) / max(rms(e_b), u * rms(r) / sqrt(3)); beta = |<e_c, r> - <e_b, r>| / <r, r>;
    mu = |mean(e_c)| / rms(e_c). The floor in rho is the error of one rounding: of a base without error, nothing
    smaller is asked. It cannot tell a fault from one within the noise of the base's own arithmetic, nor judge a module
    whose inputs were not locked: there the errors of all that came before drown it.

    Raises ToleranceError for a u that is not bf16's or fp16's, NaN or Inf, an empty or constant-zero reference, fewer
    than two axes, and shapes or dtypes that differ.
    """
    _check_roundoff(unit_roundoff)
    _alike(reference=reference, base=base, candidate=candidate)
    if reference.ndim < 2:
        raise ToleranceError(f"reference has shape {reference.shape}: tokens and channels need two axes.")
    r = reference.astype(np.float64)
    power = float(np.square(r).sum())
    if power == 0:
        raise ToleranceError("reference is zero everywhere: nothing can be measured against it.")
    e_b, e_c = base.astype(np.float64) - r, candidate.astype(np.float64) - r
    size = _rms(e_c, None)
    return T1Measure(
        rho=_worst_rho(r, e_b, e_c, unit_roundoff, None),
        token_rho=_worst_rho(r, e_b, e_c, unit_roundoff, -1),
        channel_rho=_worst_rho(r, e_b, e_c, unit_roundoff, tuple(range(r.ndim - 1))),
        beta=abs(float((e_c * r).sum()) - float((e_b * r).sum())) / power,
        mu=abs(float(e_c.mean())) / float(size) if size > 0 else 0.0,
        unit_roundoff=unit_roundoff,
    )


def calibrate_t1(measures: Sequence[T1Measure]) -> T1Limits:
    """Limits from benign variants: the worst rho times 1.25, tokens likewise; beta* = u and mu* = 0.25 stay.

    Raises ToleranceError for fewer than 5 variants, variants of several dtypes, a rho* above 2.5 (then the base is no
    measure for its variants), or a variant outside beta* or mu* (then it is not benign).
    """
    if len(measures) < FEWEST_VARIANTS:
        raise ToleranceError(f"{len(measures)} benign variants: a calibration needs at least {FEWEST_VARIANTS}.")
    if len({measure.unit_roundoff for measure in measures}) > 1:
        raise ToleranceError("the benign variants are of several dtypes: calibrate each by itself.")
    # NumPy's, as Python's max() loses a NaN that is not the first.
    rho = float(np.max([measure.rho for measure in measures])) * MARGIN
    if not rho <= LARGEST_RHO:
        raise ToleranceError(f"the benign variants want rho*={rho:.3g}, and more than {LARGEST_RHO} is refused.")
    token_rho = float(np.max([measure.token_rho for measure in measures])) * MARGIN
    limits = T1Limits(rho, token_rho, measures[0].unit_roundoff)
    for number, measure in enumerate(measures):
        if failed := judge_t1(measure, limits):
            what = ", ".join(f"{name}={value:.3g}" for name, value in failed)
            raise ToleranceError(f"variant {number} is not benign: {what}.")
    return limits


def judge_t1(measure: T1Measure, limits: T1Limits) -> tuple[tuple[str, float], ...]:
    """The names and values that are over their limits; empty where all pass."""
    names = [limit.name for limit in fields(limits)]
    # Not `>`: a NaN is over every limit.
    return tuple((n, getattr(measure, n)) for n in names if not getattr(measure, n) <= getattr(limits, n))


def perturbation(shape: tuple[int, ...], unit_roundoff: float, seed: int) -> npt.NDArray[np.float32]:
    """+u or -u at each place, to be added to initial latents (of variance 1) for one perturbed run of T2."""
    signs = np.random.default_rng(seed).integers(0, 2, shape) * 2 - 1
    return (signs * unit_roundoff).astype(np.float32)


def relative_distance(base: Array, candidate: Array) -> float:
    """|c - b| / |b|, Euclidean. Raises ToleranceError for NaN, Inf, a zero base, other shapes or dtypes."""
    _alike(base=base, candidate=candidate)
    b = base.astype(np.float64)
    if not b.any():
        raise ToleranceError("base is zero everywhere: no distance is relative to it.")
    return float(np.linalg.norm(candidate.astype(np.float64) - b) / np.linalg.norm(b))


def drift_limits(drifts: Sequence[Sequence[float]], kappa: float) -> tuple[float, ...]:
    """T2's limit at each step: kappa * max delta_s over perturbed runs. drifts: (runs, steps) relative distances.

    Raises ToleranceError for fewer than 3 runs, a kappa outside 2..3, and runs of no or unequal steps, without any
    drift (then nothing was perturbed), or with a value that is negative or not finite.
    """
    if not KAPPA[0] <= kappa <= KAPPA[1]:
        raise ToleranceError(f"kappa={kappa} is not accepted: give one within {KAPPA[0]:g} to {KAPPA[1]:g}.")
    if len(drifts) < FEWEST_PERTURBED:
        raise ToleranceError(f"{len(drifts)} perturbed runs: at least {FEWEST_PERTURBED} are needed.")
    for number, drift in enumerate(drifts):
        if not drift or len(drift) != len(drifts[0]):
            raise ToleranceError(f"perturbed run {number} has {len(drift)} steps, and run 0 {len(drifts[0])}.")
        if not all(math.isfinite(delta) and delta >= 0 for delta in drift):
            raise ToleranceError(f"perturbed run {number} has a drift that is negative or not finite.")
        if not any(drift):
            raise ToleranceError(f"perturbed run {number} does not drift at all: it was not perturbed.")
    return tuple(kappa * max(step) for step in zip(*drifts, strict=True))


def judge_t2(distances: Sequence[float], limits: Sequence[float]) -> int | None:
    """T2, free-running: the first step at which |c - b| / |b| is over its limit, or None.

    Weak on purpose, and never alone: a fault smaller than what one rounding of the latents grows into passes (a stale
    residual does). Raises ToleranceError where the steps are none or not as many as the limits'.
    """
    if not distances or len(distances) != len(limits):
        raise ToleranceError(f"{len(distances)} steps against limits for {len(limits)}.")
    return next((s for s, (d, most) in enumerate(zip(distances, limits, strict=True)) if not d <= most), None)


def _check_roundoff(u: float) -> None:
    if u not in UNIT_ROUNDOFF.values():
        hint = " For fp32 on the CPU the claim is T0." if u == 2.0**-24 else ""
        raise ToleranceError(f"unit_roundoff={u!r} is not one of bfloat16's or float16's.{hint}")


def _alike(**arrays: Array) -> None:
    first, *_ = arrays
    for name, array in arrays.items():
        if array.dtype.kind != "f" or not array.size:
            raise ToleranceError(f"{name} is not a floating array with something in it: {array!r:.80}")
        if (array.shape, array.dtype) != (arrays[first].shape, arrays[first].dtype):
            wanted = f"{first} is {arrays[first].dtype}{arrays[first].shape}"
            raise ToleranceError(f"{name} is {array.dtype}{array.shape}, and {wanted}.")
        if not np.isfinite(array).all():
            raise ToleranceError(f"{name} is not finite everywhere.")


def _rms(values: Floats, axes: int | tuple[int, ...] | None) -> Floats:
    return np.asarray(np.sqrt(np.square(values).mean(axis=axes)))


def _worst_rho(r: Floats, e_b: Floats, e_c: Floats, u: float, axes: int | tuple[int, ...] | None) -> float:
    error = _rms(e_c, axes)
    own = np.maximum(_rms(e_b, axes), u * _rms(r, axes) / math.sqrt(3))
    # Where the reference is zero and the base is exact, any error at all is beyond every limit.
    exact = np.where(error > 0, np.inf, 0.0)
    return float(np.max(np.where(own > 0, error / np.where(own > 0, own, 1.0), exact)))
