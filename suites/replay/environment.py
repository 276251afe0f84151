"""A virtual environment a release: that one package, and for all others this environment's."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
READY = "ready"
BESIDE = {"diffusers": ("httpx",)}
"""What older releases import, and today's do not."""


def make_environment(folder: Path, package: str, version: str) -> Path:
    """Its Python. Made once, and kept: what is there and whole is taken as it is."""
    home = folder / f"{package}-{version}"
    python = home / "bin" / "python"
    if (home / READY).is_file():
        return python
    venv.create(home, with_pip=True, clear=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Behind its own: what is installed here comes first.
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed"]
    subprocess.run([*install, f"{package}=={version}"], check=True)
    if package in BESIDE:
        # With what they need: nothing of it is in this environment.
        subprocess.run([*install[:-2], *BESIDE[package]], check=True)
    (home / READY).touch()
    return python


def run_scenario(python: Path, scenario: str, traces: Path) -> subprocess.CompletedProcess[str]:
    """In that environment, with its trace folder."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "suites.replay.scenarios", scenario, str(traces)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
