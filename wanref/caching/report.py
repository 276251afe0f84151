"""What a cache did in one request, a row for each expert x branch x stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from wanref.caching.spec import CacheSpec

if TYPE_CHECKING:
    from wanref.caching.base import Decision


@dataclass(frozen=True, slots=True)
class Tally:
    """calls = computed + reused. shadow: calls that the rule would have reused, had it not been overridden.

    saved: share of the block calls that did not run. over_ideal: host time of the calls over that of the blocks in
    them, which is all that a cache without any cost of its own would take; None if no block ran.
    """

    expert: str
    branch: str
    stage: int
    computed: int
    reused: int
    shadow: int
    guard_trips: int
    saved: float
    over_ideal: float | None


def tally(decisions: Iterable[Decision], stack_blocks: int) -> list[Tally]:
    """Rows in the order in which they first occur. `stack_blocks`: blocks of this rank's stage."""
    groups: dict[tuple[str, str, int], list[Decision]] = {}
    for decision in decisions:
        where = decision.where
        groups.setdefault((where.step.expert, where.branch, where.place.stage), []).append(decision)
    return [_row(key, group, stack_blocks) for key, group in groups.items()]


def _row(key: tuple[str, str, int], group: list[Decision], stack_blocks: int) -> Tally:
    reused = sum(decision.verdict == "reuse" for decision in group)
    block_seconds = sum(decision.block_seconds for decision in group)
    return Tally(
        *key,
        computed=len(group) - reused,
        reused=reused,
        shadow=sum(decision.forced and decision.judgement.verdict == "reuse" for decision in group),
        guard_trips=sum(decision.judgement.reason == "range_guard" for decision in group),
        saved=1 - sum(decision.computed_blocks for decision in group) / (len(group) * stack_blocks),
        over_ideal=sum(decision.seconds for decision in group) / block_seconds if block_seconds else None,
    )


def print_tallies(spec: CacheSpec, rows: Sequence[Tally], console: Console) -> None:
    """A row for each expert x branch x stage; loud, if nothing was reused."""
    standing = "qualified" if spec.qualified else "unqualified: no campaign has passed with these options"
    title = f"{spec.method}{', every call computed' if spec.forced else ''} ({standing})"
    table = Table("expert", "branch", "stage", "computed", "reused", "guard", "saved", "/ ideal", title=title)
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        reused = f"0 ({row.shadow} in the shadow)" if spec.forced else str(row.reused)
        over = "-" if row.over_ideal is None else f"{row.over_ideal:.3f}"
        counts = (row.stage, row.computed, reused, row.guard_trips, f"{row.saved:.1%}", over)
        table.add_row(row.expert, row.branch, *map(str, counts))
    console.print(table)
    if not any(row.shadow if spec.forced else row.reused for row in rows):
        console.print(f"[bold red]{spec.method} never fired:[/] every block was computed, and the cache saved nothing.")
