"""The rank grid: PP stages x CFG branches, and who owns what in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Branch = Literal["cond", "uncond"]
BRANCHES: tuple[Branch, Branch] = ("cond", "uncond")

_NAME = re.compile(r"pp([1-9]\d*)cfg([12])")


@dataclass(frozen=True, slots=True)
class Topology:
    """`pp` pipeline stages times `cfg` branch chains. Rank = chain * pp + stage, as in a mesh of shape (cfg, pp).

    With cfg=2 chain 0 runs `cond` and chain 1 `uncond`; with cfg=1 the only chain runs both.
    """

    pp: int = 1
    cfg: int = 1

    def __post_init__(self) -> None:
        if type(self.pp) is not int or type(self.cfg) is not int or self.pp < 1 or self.cfg not in (1, 2):
            raise ValueError(
                f"topology: pp={self.pp!r}, cfg={self.cfg!r} is not accepted: pp is at least 1, cfg is 1 or 2."
            )

    def __str__(self) -> str:
        return f"pp{self.pp}cfg{self.cfg}"

    @property
    def world_size(self) -> int:
        return self.pp * self.cfg

    def place(self, rank: int) -> Place:
        """Where `rank` stands in the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not in topology {self}, which has ranks 0 to {self.world_size - 1}.")
        chain, stage = divmod(rank, self.pp)
        return Place(self, chain, stage)

    def blocks(self, stage: int, layers: int) -> range:
        """The transformer blocks of a stage: as even as can be, earlier stages taking the remainder."""
        if self.pp > layers:
            raise ValueError(
                f"topology={self} is not accepted: {self.pp} stages for {layers} blocks. Give at most pp{layers}."
            )
        size, remainder = divmod(layers, self.pp)
        start = stage * size + min(stage, remainder)
        return range(start, start + size + (stage < remainder))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates in the grid, and what follows from them alone."""

    topology: Topology
    chain: int
    stage: int

    @property
    def rank(self) -> int:
        return self.chain * self.topology.pp + self.stage

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Last stages run the solver, each on its own chain: its latents need not travel between chains."""
        return self.stage == self.topology.pp - 1

    @property
    def encodes_text(self) -> bool:
        return self.rank == 0

    @property
    def decodes(self) -> bool:
        """The last stage of the cond chain holds the final latents whether or not guidance is on."""
        return self.chain == 0 and self.is_last

    @property
    def previous(self) -> int:
        """The rank of the stage before, on the same chain."""
        return self.rank - 1

    @property
    def next(self) -> int:
        """The rank of the stage behind, on the same chain."""
        return self.rank + 1

    @property
    def first(self) -> int:
        """The rank of this chain's first stage."""
        return self.chain * self.topology.pp

    @property
    def last(self) -> int:
        """The rank of this chain's last stage."""
        return self.first + self.topology.pp - 1

    def branches(self, guided: bool) -> tuple[Branch, ...]:
        """The branches that this rank runs at a step, in order."""
        active = BRANCHES if guided else BRANCHES[:1]
        return active if self.topology.cfg == 1 else active[self.chain : self.chain + 1]


def parse_topology(name: str) -> Topology:
    """`"pp2cfg1"` to a Topology. Raises ValueError for any other form."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"topology={name!r} is not accepted: give ppNcfgM with N of at least 1 and M of 1 or 2, as 'pp2cfg1'."
        )
    return Topology(int(match[1]), int(match[2]))


def idle_ranks(topology: Topology, guided: bool) -> Sequence[int]:
    """Ranks that have nothing to do in a request without guidance: the uncond chain."""
    return () if guided or topology.cfg == 1 else range(topology.pp, 2 * topology.pp)
