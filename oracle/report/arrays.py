"""Arrays held against each other as values: NumPy's, or torch tensors on any device, alone or by name.

T0 is by bytes, so that -0 is not 0; T1 is for one module's outputs in bf16 or fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.evidence.emitter import as_array
from oracle.evidence.reader import _widen
from oracle.verdict.finding import Finding, Spot
from oracle.verdict.tolerance import judge_t1, measure_t1, start_limits, unit_roundoff

Array = npt.NDArray[Any]
Named = Mapping[str, tuple[str, Array]]
"""By name: the dtype's name, and the values on the host, bfloat16 as its 16-bit words."""


def named_arrays(value: Any, name: str = "") -> dict[str, tuple[str, Array]]:
    """One array is called `output`; those of a sequence by their places, those of a mapping by their keys, and what is
    inside another by both. Raises TraceError for a dtype that is no number's."""
    if isinstance(value, (Mapping, list, tuple)):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        named: dict[str, tuple[str, Array]] = {}
        for key, each in parts:
            named |= named_arrays(each, f"{name}.{key}" if name else str(key))
        return named
    return {name or "output": as_array(value)}


def compare_arrays(reference: Named, candidate: Named) -> Iterator[Finding]:
    """T0, name by name. What one side alone has is missing evidence, and so are no value at all and only zeros."""
    for name in dict.fromkeys((*reference, *candidate)):
        if name not in reference or name not in candidate:
            side = "here" if name in candidate else "in the reference"
            yield Finding("coverage", "missing evidence", Spot(block=name), f"is {side} only")
        elif (says := _difference(reference[name], candidate[name])) is not None:
            yield Finding("output", "arithmetic", Spot(block=name), says)
    compared = [candidate[name][1] for name in reference.keys() & candidate.keys()]
    if not any(array.size for array in compared):
        yield Finding("coverage", "missing evidence", Spot(), "not one value was compared")
    elif not any(array.any() for array in compared):
        yield Finding("coverage", "missing evidence", Spot(), "every compared value is zero")


def measure_arrays(precise: Named, base: Named, candidate: Named) -> tuple[list[Finding], dict[str, float], int]:
    """T1, name by name: what is over its limit, the largest of each measure, and how many were measured."""
    findings: list[Finding] = []
    worst: dict[str, float] = {}
    names = precise.keys() & base.keys() & candidate.keys()
    for name in dict.fromkeys((*precise, *base, *candidate)):
        if name not in names:
            findings.append(Finding("coverage", "missing evidence", Spot(block=name), "is not on all three sides"))
            continue
        dtype = base[name][0]
        if candidate[name][0] != dtype:
            says = f"its dtype is {candidate[name][0]}, and {dtype} in the base"
            findings.append(Finding("tensors", "arithmetic", Spot(block=name), says))
            continue
        unit = unit_roundoff(dtype)
        # measure_t1 wants one dtype on all sides; float32 holds every value of bf16 and fp16.
        r, b, c = (_floats(*side[name]).astype(np.float32) for side in (precise, base, candidate))
        measure, limits = measure_t1(r, b, c, unit), start_limits(unit)
        for kind in ("rho", "token_rho", "beta", "mu"):
            worst[f"worst_{kind}"] = max(worst.get(f"worst_{kind}", 0.0), asdict(measure)[kind])
        for kind, value in judge_t1(measure, limits):
            says = f"{kind} is {value:.3g}, and at most {asdict(limits)[kind]:.3g} passes"
            findings.append(Finding("tensors", "arithmetic", Spot(block=name), says))
    if not names:
        findings.append(Finding("coverage", "missing evidence", Spot(), "not one value was compared"))
    return findings, worst, len(names)


def _difference(reference: tuple[str, Array], candidate: tuple[str, Array]) -> str | None:
    (kind, one), (other_kind, other) = reference, candidate
    if kind != other_kind:
        return f"its dtype is {other_kind}, and {kind} in the reference"
    if one.shape != other.shape:
        return f"its shape is {other.shape}, and {one.shape} in the reference"
    wanted, values = _floats(kind, one), _floats(other_kind, other)
    for side, held in (("", values), (" in the reference", wanted)):
        if not np.isfinite(held).all():
            return f"{np.isnan(held).sum()} NaN and {np.isinf(held).sum()} infinite elements{side}"
    width = one.itemsize
    differs = (_bytes(one).reshape(-1, width) != _bytes(other).reshape(-1, width)).any(axis=1)
    places = np.flatnonzero(differs)
    if not places.size:
        return None
    first = tuple(map(int, np.unravel_index(places[0], one.shape)))
    gap = np.abs(wanted.astype(np.float64) - values.astype(np.float64)).max()
    by = f"by {gap:.3g} at most" if gap > 0 else "in their bytes alone, as 0 and -0 do"
    return f"{places.size} of {one.size} elements differ, {by}, first at {first}"


def _floats(dtype: str, array: Array) -> Array:
    return _widen(array) if dtype == "bfloat16" else array


def _bytes(array: Array) -> npt.NDArray[np.uint8]:
    return np.frombuffer(array.tobytes(), np.uint8)
