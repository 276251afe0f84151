"""What a comparison finds, and the verdict that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Layer = Literal["configuration", "coverage", "decisions", "provenance", "tensors", "output"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
"""In the order in which they are compared: the first that fails is the verdict, later ones are still reported."""

Cause = Literal[
    "configuration", "missing evidence", "decision", "provenance", "exchange", "arithmetic", "state left over"
]


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a run, as far as it is known. Order is the order of execution."""

    request: int = 0
    step: int | None = None
    expert: str | None = None
    branch: str | None = None
    block: int | str | None = None
    stage: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        words = [
            f"request {self.request}" if self.request else "",
            "" if self.rank is None else f"rank {self.rank}",
            "" if self.stage is None else f"stage {self.stage}",
            "" if self.step is None else f"step {self.step}",
            self.branch or "",
            "" if self.block is None else f"block {self.block}" if isinstance(self.block, int) else f"`{self.block}`",
        ]
        return ", ".join(filter(None, words)) or "the whole run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference, or one piece of evidence that is missing. `says` is a sentence without its place."""

    layer: Layer
    cause: Cause
    spot: Spot
    says: str

    def __str__(self) -> str:
        return f"{self.spot}: {self.says}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparing two traces came to under a contract. It holds exactly if nothing was found.

    compared counts the keys at which both sides have a value: with none, nothing was shown.
    """

    contract: str
    findings: tuple[Finding, ...]
    compared: int
    hits: int = 0
    misses: int = 0

    @property
    def holds(self) -> bool:
        return not self.findings

    @property
    def first(self) -> Finding | None:
        """The first finding of the first layer that failed."""
        return self.findings[0] if self.findings else None

    @property
    def layer(self) -> Layer | None:
        return self.findings[0].layer if self.findings else None

    @property
    def sentence(self) -> str:
        """One sentence that a person can act on."""
        if self.first is None:
            cached = f", {self.hits} hits and {self.misses} misses" if self.hits or self.misses else ""
            return f"{self.contract}: holds at {self.compared} keys{cached}"
        return str(self.first)
