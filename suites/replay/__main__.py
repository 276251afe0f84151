"""Real fixes, replayed: the oracle on the release before each and on the one after it.

python -m suites.replay --output artifacts/replay.json. It needs a package index, and is not in CI.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from oracle.evidence.writer import write_whole
from suites.replay.case import Case, read_cases
from suites.replay.environment import make_environment, run_scenario

ENVIRONMENTS = Path("artifacts/replay/environments")


def main(
    output: Annotated[Path, typer.Option(help="Where the score is written, with a row a case.")],
    environments: Annotated[Path, typer.Option(help="Where virtual environments are kept.")] = ENVIRONMENTS,
    case: Annotated[list[str] | None, typer.Option(help="Its id; repeat. Default: all.")] = None,
) -> None:
    """Measure the score: how many were found before and are clean after. What it is, `docs/replay.md` publishes."""
    console = Console(width=120)
    cases = [each for each in read_cases() if case is None or each.id in case]
    rows = []
    for each in track(cases, description="replaying", console=Console(stderr=True), transient=True):
        found = {side: find(each, getattr(each, side), environments.resolve()) for side in ("before", "after")}
        rows.append({**asdict(each), **{f"found_{side}": told for side, told in found.items()}, "right": right(found)})
    table = Table("case", "release", "found before", "after")
    for row in rows:
        before, after = row["found_before"], row["found_after"]
        said = before[0] if before else "[bold red]nothing[/]"
        table.add_row(
            row["id"], f"{row['package']} {row['before']} → {row['after']}", said, after[0] if after else "clean"
        )
    score = {"cases": len(rows), "right": sum(row["right"] for row in rows), "rows": rows}
    console.print(table)
    console.print(f"{score['right']} of {score['cases']} were found before and are clean after")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, lambda draft: draft.write_text(json.dumps(score, indent=2) + "\n", "utf-8"))


def find(case: Case, version: str, environments: Path) -> list[str]:
    """What the oracle found with that release. Raises RuntimeError where the scenario itself did not end."""
    python = make_environment(environments, case.package, version)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        done = run_scenario(python, case.scenario, Path(folder))
    if done.returncode:
        raise RuntimeError(f"{case.id}, {case.package} {version}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["versions"][case.package] != version:
        raise RuntimeError(f"{case.id}: asked for {case.package} {version}, and ran {told['versions'][case.package]}")
    return [str(each) for each in told["found"]]


def right(found: dict[str, list[str]]) -> bool:
    """Found before, clean after."""
    return bool(found["before"]) and not found["after"]


if __name__ == "__main__":
    typer.run(main)
