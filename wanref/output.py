"""What a request leaves on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

    from wanref.caching.base import Decision
    from wanref.request import ResolvedRequest
    from wanref.schedule import Schedule
    from wanref.topology import Topology


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request, on one rank.

    video: float32 [batch, frames, height, width, 3] in [0, 1]; None if only latents were asked for, and on every rank
        but `owner`.
    latents: final latents [batch, channels, frames, height, width] float32, on every rank.
    idle_ranks: ranks that had no branch to run, because guidance is off.
    decisions: what this rank's cache decided, call by call.
    """

    video: np.ndarray | None
    latents: torch.Tensor
    request: ResolvedRequest
    schedule: Schedule
    topology: Topology
    rank: int
    owner: int
    idle_ranks: Sequence[int]
    decisions: Sequence[Decision] = ()

    @property
    def owns_video(self) -> bool:
        """Whether this rank is the one that decodes."""
        return self.rank == self.owner
