"""Tables for a terminal: verdicts, and a trace's steps x blocks with its decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.markup import escape
from rich.table import Table

from oracle.verdict.align import Aligned
from oracle.verdict.matrix import Row
from wanref.checkpoint import EXPERT_FOLDERS
from wanref.observe import TensorKey
from wanref.topology import BRANCHES, Branch

COMPUTED, REUSED, ABSENT = "■", "↺", "·"
LEGEND = f"{COMPUTED} computed   {REUSED} made up by a cache   {ABSENT} skipped   (decisions: verdict, reason, signal)"


def verdict_table(rows: Iterable[Row], title: str) -> Table:
    table = Table(
        "topology", "cache", "contract", "verdict", "what was shown, or where it first went wrong", title=title
    )
    for row in rows:
        word = "[green]holds[/]" if row.verdict.holds else "[bold red]fails[/]"
        table.add_row(row.topology, row.cache, row.verdict.contract, word, escape(row.sentence))
    return table


def trace_tables(aligned: Aligned) -> Iterator[Table]:
    """For each request and branch: a row a step, a column a block, and each stage's decision."""
    layers, stages = int(aligned.manifest["layers"]), range(aligned.topology.pp)
    cached = bool(aligned.decisions)
    for request, begun in sorted(aligned.requests.items()):
        guided = any(step["guidance_scale"] > 1 for step in begun.schedule or ())
        for branch in BRANCHES if guided else BRANCHES[:1]:
            table = Table("step", "expert", "blocks", title=f"request {request}, {branch} ({aligned.topology})")
            for stage in stages if cached else ():
                table.add_column(f"stage {stage}")
            for step in begun.schedule or ():
                index = step["index"]
                marks = "".join(_mark(aligned, request, index, branch, block) for block in range(layers))
                said = [_said(aligned, request, index, branch, stage) for stage in stages] if cached else []
                table.add_row(str(index), str(step["expert"]), marks, *said)
            yield table


def _mark(aligned: Aligned, request: int, step: int, branch: Branch, block: int) -> str:
    """What became of a block, on the rank whose work it is."""
    for expert in EXPERT_FOLDERS:
        owner = aligned.owner(TensorKey(request, step, expert, branch, block))
        if owner is not None:
            return REUSED if owner.record.source == "reused" else COMPUTED
    return ABSENT


def _said(aligned: Aligned, request: int, step: int, branch: str, stage: int) -> str:
    decision = aligned.decisions.get((request, step, branch, stage))
    if decision is None:
        return "-"
    signal = "" if decision.signal is None else f" {decision.signal:.4g}"
    shadow = f" (rule: {decision.shadow})" if decision.shadow and decision.shadow != decision.verdict else ""
    return f"{decision.verdict}, {decision.reason}{signal}{shadow}"
