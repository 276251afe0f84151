"""A pair: one prompt and seed, rendered natively and with a cache; and the row of what came of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from oracle.campaign.metrics import Metrics
from oracle.campaign.refusal import CampaignError


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """What is rendered twice."""

    prompt: str
    seed: int

    def __str__(self) -> str:
        return f"{self.prompt!r}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Calls:
    """What a cache did with the calls of one stage's blocks, for one expert and branch, in one request.

    computed + reused calls; blocks: block calls that ran, of the whole that a native run makes.
    """

    expert: str
    branch: str
    stage: int
    computed: int
    reused: int
    blocks: int
    whole: int

    @property
    def place(self) -> str:
        return f"stage {self.stage}, {self.branch}, {self.expert}-noise expert"


@dataclass(frozen=True, slots=True)
class Row:
    """One pair's outcome. calls: of a cache; without one (the control) a single entry for each place, with no reuse.

    begun, ended: digests of what the cache remembered at the two ends of the request, over all ranks.
    native, cached: digests of the two renders' latents and frames.
    """

    pair: Pair
    metrics: Metrics
    calls: tuple[Calls, ...]
    begun: str
    ended: str
    native: str
    cached: str

    @property
    def blocks(self) -> int:
        """Block calls that ran."""
        return sum(calls.blocks for calls in self.calls)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def row_of(content: Mapping[str, Any]) -> Row:
    """From `as_json`. Raises CampaignError for anything else."""
    try:
        parts = dict(content)
        parts["pair"], parts["metrics"] = Pair(**parts["pair"]), Metrics(**parts["metrics"])
        parts["calls"] = tuple(Calls(**calls) for calls in parts["calls"])
        return Row(**parts)
    except (KeyError, TypeError) as error:
        raise CampaignError(f"row: {dict(content)!r} is not one of {[f.name for f in fields(Row)]}: {error}.") from None


def pairs_of(prompts: Sequence[str], seeds: Sequence[int]) -> tuple[Pair, ...]:
    """Every prompt with every seed, a prompt's together. Raises CampaignError for an empty or repeated list."""
    for name, values in (("prompts", prompts), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise CampaignError(f"{name}={list(values)!r} is not accepted: give at least one, each once.")
    return tuple(Pair(prompt, seed) for prompt in prompts for seed in seeds)


def total_calls(rows: Iterable[Row]) -> tuple[Calls, ...]:
    """The calls of all rows added up, a place each, in order of place."""
    totals: dict[tuple[str, str, int], list[int]] = {}
    for calls in (calls for row in rows for calls in row.calls):
        counts = totals.setdefault((calls.expert, calls.branch, calls.stage), [0, 0, 0, 0])
        for index, count in enumerate((calls.computed, calls.reused, calls.blocks, calls.whole)):
            counts[index] += count
    return tuple(Calls(*place, *counts) for place, counts in sorted(totals.items()))


def prompt_digest(prompt: str) -> str:
    """SHA-256 of a prompt, whatever its case and blanks: what a text encoder hardly tells apart is not disjoint."""
    return hashlib.sha256(" ".join(prompt.casefold().split()).encode()).hexdigest()
