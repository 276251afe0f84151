"""Residuals of a block stack, kept with their provenance, and the two ways to reuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from wanref.caching.base import Origin, Where, check_provenance
from wanref.checkpoint import Expert
from wanref.topology import Branch

Reuse = Literal["plain", "linear"]
"""`plain`: the last computed residual. `linear`: the last two, extrapolated over sigma."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Output minus input of a stage's blocks, [batch, tokens, dim], at one step."""

    value: torch.Tensor
    sigma: float
    origin: Origin


class ResidualStore:
    """The last residuals of each (expert, branch) of one request on one stage."""

    def __init__(self, reuse: Reuse) -> None:
        self.reuse = reuse
        self._kept: dict[tuple[Expert, Branch], tuple[Residual, ...]] = {}

    def keep(self, where: Where, hidden: torch.Tensor, output: torch.Tensor) -> None:
        """Remember what the blocks have just added to `hidden`."""
        step = where.step
        origin = Origin(where.request, step.index, step.expert, where.branch, where.place.stage)
        key = (step.expert, where.branch)
        depth = 2 if self.reuse == "linear" else 1
        self._kept[key] = (*self._kept.get(key, ()), Residual(output - hidden, step.sigma, origin))[-depth:]

    def state(self, expert: Expert, branch: Branch) -> tuple[Any, ...]:
        """What is kept of one (expert, branch), without the number of the request."""
        return tuple((each.origin.step, each.sigma, each.value) for each in self._kept.get((expert, branch), ()))

    def has(self, where: Where) -> bool:
        return (where.step.expert, where.branch) in self._kept

    def apply(self, where: Where, hidden: torch.Tensor) -> tuple[torch.Tensor, tuple[Origin, ...]]:
        """`hidden` plus the reused residual, and where that comes from. Raises CacheError for a foreign residual.

        First order over sigma: R(s) = R1 + (R1 - R0) (s - s1) / (s1 - s0), from the last two computed steps; with one
        of them only, or none apart in sigma, it is the plain reuse.
        """
        kept = self._kept[where.step.expert, where.branch]
        for residual in kept:
            check_provenance(residual.origin, residual.value.shape, residual.value.dtype, where, hidden)
        last = kept[-1]
        if len(kept) == 2 and (span := last.sigma - kept[0].sigma) != 0:
            share = (where.step.sigma - last.sigma) / span
            reused = torch.lerp(kept[0].value, last.value, 1 + share)
        else:
            kept, reused = (last,), last.value
        return hidden + reused, tuple(residual.origin for residual in kept)
