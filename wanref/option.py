"""Checks of single option values. Each returns the value or raises a ValueError that names option, value, accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import torch


DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")


def check_seed(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"seed={value!r} is not accepted: give an integer from 0 to 2**63 - 1.")
    return value


def check_count(option: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option}={value!r} is not accepted: give an integer of at least 1.")
    return value


def check_guidance(option: str, value: object) -> float:
    if not _is_finite(value) or value < 0:
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
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{option}={value!r} is not accepted: a flow shift is a finite number above 0.")
    return float(value)


def check_generator(value: Any) -> torch.Generator:
    import torch  # only here: whoever has a generator has imported it

    if not isinstance(value, torch.Generator):
        raise ValueError(f"generator={value!r} is not accepted: give a torch.Generator, or one a video.")
    return value


def check_texts(option: str, value: object) -> tuple[str, ...]:
    """One text or a sequence of them, as a tuple."""
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{option}={value!r} is not accepted: give a text, or a sequence of at least one text.")
    return texts


def check_side(option: str, value: int, multiple: int) -> None:
    """Height or width in pixels."""
    if value % multiple:
        below = value // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        raise ValueError(
            f"{option}={value} is not a multiple of {multiple}, which this checkpoint's VAE and patches "
            f"need: give {nearest}."
        )


def check_frames(value: int, frames_per_latent: int) -> None:
    if (value - 1) % frames_per_latent:
        below = (value - 1) // frames_per_latent * frames_per_latent + 1
        raise ValueError(
            f"frames={value} is not accepted: this checkpoint's VAE needs {frames_per_latent}n + 1 frames, "
            f"for instance {below} or {below + frames_per_latent}."
        )


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number. A bool is not, nor is an integer that no float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
