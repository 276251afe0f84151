"""The score of the oracle on planted faults: as a table, and as a file."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from oracle.evidence.writer import write_whole
from oracle.faults.score import Row, Score


def write_score(path: Path, score: Score) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: draft.write_text(json.dumps(score.as_json(), indent=2) + "\n"))


def score_table(score: Score) -> Table:
    """A row a kind of fault, one for all benign variants, and each trial that went wrong. `score`: of one part."""
    table = Table("kind", "planted", "found", "pointed", "no test of suites/cpu sees it", title=_title(score))
    for kind in dict.fromkeys(row.kind for row in score.faults):
        rows = [row for row in score.faults if row.kind == kind]
        found, pointed = sum(row.alarm for row in rows), sum(bool(row.pointed) for row in rows)
        # Beside other kernels, a test that compares bytes fails with the fault and without it.
        unseen = len(rows) if rows[0].bounded else sum(row.caught_by is None for row in rows)
        table.add_row(kind, *map(str, (len(rows), found, pointed, unseen)))
    table.add_section()
    kinds = len({row.kind for row in score.benign})
    table.add_row(f"benign, {kinds} kinds", str(len(score.benign)), str(score.false_alarms), "", "")
    wrong = [row for row in score.rows if _is_wrong(row)]
    if wrong:
        table.add_section()
    for row in wrong:
        what = "pointed elsewhere" if row.planted and row.alarm else "missed" if row.planted else "false alarm"
        table.add_row(f"[bold red]{what}[/]: {row.id} ({row.kind})", "", "", "", escape(row.says))
    return table


def _is_wrong(row: Row) -> bool:
    return not row.pointed if row.planted else row.alarm


def _title(score: Score) -> str:
    faults, benign = len(score.faults), len(score.benign)
    verdicts = sum(row.verdict_seconds for row in score.rows) / max(len(score.rows), 1)
    bounded = any(row.bounded for row in score.rows)
    changed = f" ({score.changed} of which have other bytes)" if bounded else ""
    return (
        f"{'bf16, bounded' if bounded else 'bytes'}: found {score.found} of {faults}, pointed at {score.pointed}; "
        f"{score.false_alarms} false alarms in {benign} benign runs{changed}; {verdicts * 1000:.0f} ms a verdict, "
        f"{score.seconds:.0f} s in all"
    )
