"""Measures wanref against diffusers and its topologies against one rank, on a mid-size random model, fp32.

python -m suites.bench --output artifacts/bench.json

Prints a table, and writes a flat JSON object of each figure's median. Fails if outputs that are timed against each
other differ in one byte; a target that is not reached is shown, not raised, since timings depend on the machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import diffusers
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from oracle.evidence.writer import write_whole
from suites.bench import caches, memory, pipeline, startup, topologies, traces
from suites.bench.figure import BytesDiffer, Figure
from suites.bench.subject import build_midsize


def main(output: Annotated[Path, typer.Option(help="JSON file to write.")] = Path("artifacts/bench.json")) -> None:
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    console, load = Console(), os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
            checkpoint = build_midsize(Path(folder) / "midsize")
            groups = {
                "wanref and diffusers": lambda: pipeline.measure(checkpoint),
                "caches": lambda: caches.measure(checkpoint),
                "traces": lambda: traces.measure(checkpoint),
                "topologies": lambda: topologies.measure(checkpoint),
                "memory": lambda: memory.measure(checkpoint),
                "start-up": startup.measure,
            }
            figures: list[Figure] = []
            for name, measure in groups.items():
                status.update(f"measuring {name}")
                figures += measure()
    except BytesDiffer as error:
        console.print(f"[bold red]failed:[/] {error}")
        sys.exit(1)
    console.print(_table(figures))
    for figure in figures:
        if figure.note:
            console.print(f"{figure.name}: {figure.note}", highlight=False)
    if load > 0.5:
        console.print(f"the load was {load:.1f} before the bench began: other programs have a share in these timings")
    _write(output, figures)
    console.print(f"wrote {output}")


def _table(figures: Sequence[Figure]) -> Table:
    cores = len(os.sched_getaffinity(0))
    title = f"torch {torch.__version__}, diffusers {diffusers.__version__}, {cores} cores, one thread a rank"
    table = Table("figure", "median", "spread", "target", title=title)
    for figure in figures:
        bound = f"≥ {figure.at_least}" if figure.at_least else f"≤ {figure.at_most}" if figure.at_most else ""
        colour = "green" if figure.reached else "red"
        verdict = f"[{colour}]{bound} {'reached' if figure.reached else 'missed'}[/]" if bound else ""
        spread = f"{min(figure.values):.3f} to {max(figure.values):.3f}" if len(figure.values) > 1 else ""
        table.add_row(figure.name, f"{figure.median:.3f}", spread, verdict)
    return table


def _write(output: Path, figures: Sequence[Figure]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    medians = json.dumps({figure.name: round(figure.median, 4) for figure in figures}, indent=2)
    write_whole(output, lambda draft: draft.write_text(medians + "\n"))


if __name__ == "__main__":
    typer.run(main)
