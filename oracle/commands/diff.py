"""`wanref diff`: runs that do not repeat, within their noise or not. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanref.cli import app, console, usage_errors


@app.command(epilog="Example: `wanref diff base/0 base/1 base/2 base/3 base/4 --against head/0 --against head/1`")
def diff(
    base: Annotated[list[Path], typer.Argument(help="Traces of at least 5 runs of the base, at level tensor.")],
    against: Annotated[list[Path], typer.Option(help="A trace of the head; repeat, at least twice.")],
    locked: Annotated[Path | None, typer.Option(help="Trace of the schedule that every run was to replay.")] = None,
    alarm_rate: Annotated[float, typer.Option(help="Share of false alarms that is accepted.", min=0, max=1)] = 0.05,
) -> None:
    """Say whether runs that do not repeat are the same within their noise. Exit code 0 only if they are."""
    from oracle.evidence.reader import open_trace
    from oracle.verdict.runs import compare_runs

    with usage_errors():
        schedule = None if locked is None else open_trace(locked)
        verdict = compare_runs([*map(open_trace, base)], [*map(open_trace, against)], schedule, alarm_rate)
    console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"p {verdict.p_value:.4g}, alarm rate {verdict.alarm_rate:g} (so few runs allow {verdict.attainable:.4g} at "
        f"best); smallest visible relative distance {verdict.visible:.3g}",
        highlight=False,
        soft_wrap=True,
    )
    if verdict.kind != "same within noise":
        raise typer.Exit(1)
