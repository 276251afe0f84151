"""Two outputs beside each other: of two layouts of one checkpoint, say, or of a cached run and the native one."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PEAK = 1.0
"""Of PSNR: frames are in [0, 1]. Of latents there is no peak, and none is stated."""


@dataclass(frozen=True, slots=True)
class Difference:
    """mae, rmse: mean absolute and root mean square difference. largest: of one element. psnr: in dB, infinite for
    equal frames, None for latents. relative: rmse over the rms of the reference, None where that is 0."""

    digests: tuple[str, str]
    elements: int
    differing: int
    mae: float
    rmse: float
    largest: float
    relative: float | None
    psnr: float | None

    @property
    def same(self) -> bool:
        return self.digests[0] == self.digests[1]


def compare_outputs(reference: Array, candidate: Array) -> Difference:
    """Frames [frames, height, width, 3] in [0, 1], or latents of any shape; both float32.

    Raises ValueError for other shapes than each other's, none at all, or values that are not finite.
    """
    if reference.shape != candidate.shape or not reference.size:
        raise ValueError(f"shapes {reference.shape} and {candidate.shape} are no pair.")
    for name, array in (("reference", reference), ("candidate", candidate)):
        wrong = int(array.size - np.isfinite(array).sum())
        if wrong:
            raise ValueError(f"the {name} has {wrong} values that are not finite.")
    one, gap = reference.astype(np.float64), candidate.astype(np.float64) - reference.astype(np.float64)
    rmse, size = math.sqrt(float(np.square(gap).mean())), math.sqrt(float(np.square(one).mean()))
    psnr = None if not is_frames(reference) else math.inf if rmse == 0 else 20 * math.log10(PEAK / rmse)
    return Difference(
        digests=(_digest(reference), _digest(candidate)),
        elements=gap.size,
        differing=int((gap != 0).sum()),
        mae=float(np.abs(gap).mean()),
        rmse=rmse,
        largest=float(np.abs(gap).max()),
        relative=rmse / size if size else None,
        psnr=psnr,
    )


def is_frames(array: Array) -> bool:
    return array.ndim == 4 and array.shape[-1] == 3


def _digest(array: Array) -> str:
    """Of its shape, dtype and bytes."""
    told = f"{array.dtype} {array.shape}".encode()
    return hashlib.sha256(told + np.ascontiguousarray(array).tobytes()).hexdigest()
