"""Checks of single option values. Each returns the value or raises a ValueError that names option, value, accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"seed={value!r} is not accepted: give an integer from 0 to 2**63 - 1.")
    return value


def check_count(option: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option}={value!r} is not accepted: give an integer of at least 1.")
    return value


def check_guidance(option: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{option}={value!r} is not accepted: give a finite number of at least 0 (up to 1 is guidance off)."
        )
    return float(value)


def check_boundary(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"boundary_ratio={value!r} is not accepted: give a number from 0 (high alone) to 1 (low alone)."
        )
    return float(value)


def check_choice(option: str, value: object, accepted: Sequence[str]) -> None:
    if value not in accepted:
        raise ValueError(f"{option}={value!r} is not accepted: give one of {', '.join(accepted)}.")


def check_flow_shift(option: str, value: object) -> float:
    """`value` as a float, if it is a finite number above 0; else a ValueError that names `option`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{option}={value!r} is not accepted: a flow shift is a finite number above 0.")
    return float(value)
