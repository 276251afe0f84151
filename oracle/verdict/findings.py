"""The findings about other people's libraries: which there are, and whether each still shows itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import oracle.findings

FOLDER = Path(oracle.findings.__file__).parent
SUBJECTS = "# subjects: "


@dataclass(frozen=True, slots=True)
class Finding:
    """says: in one sentence. subjects: whom it is about, by the names of `wanref audit`."""

    script: Path
    says: str
    subjects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """Whether a script shows its fault here; None where it ended otherwise than it says. told: its last line."""

    finding: Finding
    shown: bool | None
    told: str


def findings(subject: str | None = None) -> tuple[Finding, ...]:
    """Those about a subject, or all."""
    listed = [_read(script) for script in sorted(FOLDER.glob("*.py")) if script.name != "__init__.py"]
    return tuple(each for each in listed if subject is None or subject in each.subjects)


def show(finding: Finding) -> Shown:
    """Run its script, in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(finding.script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    told = done.stdout.strip().splitlines()
    # A script that raises exits with 1 as well: it must have said something.
    if done.returncode not in (0, 1) or "Traceback" in done.stderr or (done.returncode == 1 and not told):
        return Shown(finding, None, (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return Shown(finding, done.returncode == 1, told[-1] if told else "nothing to show")


def _read(script: Path) -> Finding:
    lines = script.read_text("utf-8").splitlines()
    (subjects,) = (line.removeprefix(SUBJECTS) for line in lines if line.startswith(SUBJECTS))
    return Finding(script, lines[0].strip('"'), tuple(subjects.split(", ")))
