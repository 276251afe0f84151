"""Measures the marks `caught_by` of the planted faults: which file of `suites/cpu` fails while one is planted.

python -m suites.caught_by [FAULT...] runs the file that each names, which must fail; where none is named, all files
that do without the oracle's verdicts, which must pass. It is not in CI: it takes an hour.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from oracle.faults.catalogue import FAULTS
from oracle.faults.fault import Fault

ROOT = Path(__file__).parents[1]
CPU = ROOT / "suites" / "cpu"
ORACLE = re.compile(r"^\s*(?:from|import) oracle\.(?!evidence\.ranks)", re.MULTILINE)
"""A test that runs its ranks in the oracle's pool asks the oracle nothing."""
TESTS_FAILED = 1
"""pytest's exit code; any other but 0 means that the run itself went wrong."""


def main(
    faults: Annotated[list[str] | None, typer.Argument(help="Their ids; default: all.")] = None,
    everywhere: Annotated[bool, typer.Option(help="Try all files, whatever is named.")] = False,
) -> None:
    """Exit code 1 if a mark is wrong."""
    console = Console()
    known = {fault.id: fault for fault in FAULTS}
    wrong = 0
    for fault in track([known[name] for name in faults or known], console=Console(stderr=True)):
        named = fault.caught_by is not None and not everywhere
        failed = failing(fault, [CPU / str(fault.caught_by)] if named else without_oracle())
        right = bool(failed) == bool(fault.caught_by)
        wrong += not right
        console.print(f"{'right' if right else 'wrong'}  {fault.id}: {failed or 'nothing failed'}", highlight=False)
    sys.exit(1 if wrong else 0)


def without_oracle() -> list[Path]:
    """The files of tests that import nothing of the oracle but its pool of ranks."""
    return [file for file in sorted(CPU.glob("test_*.py")) if not ORACLE.search(file.read_text())]


def failing(fault: Fault, files: list[Path]) -> str:
    """The first test that fails while `fault` is planted in every process of the run, or "" """
    environment = {
        **os.environ,
        "PLANTED_FAULT": fault.id,
        "PYTHONPATH": str(ROOT / "suites" / "planted"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-m", "cpu", "-q", "-x", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode not in (0, TESTS_FAILED):
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{fault.id}: pytest ended with {done.returncode}:\n{said}")
    said = re.search(r"^FAILED (\S+)|^ERROR (\S+)", done.stdout, re.MULTILINE)
    return (said[1] or said[2]).partition("/cpu/")[2] if said else ""


if __name__ == "__main__":
    typer.run(main)
