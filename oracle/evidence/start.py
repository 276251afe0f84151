"""Requests that start from other latents than their seeds', for runs that are perturbed on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from wanref import WanReference
from wanref.request import ResolvedRequest

Shift = Callable[[tuple[int, ...]], npt.NDArray[Any]]
"""For a shape, [batch, channels, frames, height, width], what is added to initial latents; the same on every rank."""


@contextmanager
def shifted_start(engine: WanReference, shift: Shift) -> Iterator[None]:
    """Each request of `engine` starts from its own initial latents plus `shift`, for as long as the block lasts.

    With several ranks, on all of them. T2's shift is `partial(perturbation, unit_roundoff=u, seed=n)`.
    """
    draw = engine._draw_latents

    def draw_shifted(request: ResolvedRequest) -> torch.Tensor:
        latents = draw(request)
        return latents + torch.from_numpy(shift(tuple(latents.shape))).to(latents)

    engine._draw_latents = draw_shifted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine._draw_latents  # the method of its class comes back
