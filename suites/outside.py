"""A project that is not this one: wanref's wheel is installed beside it, and pytest runs what its tests say."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

from oracle.report.junit import Case, cases_of, read_report

ROOT = Path(__file__).parents[1]

ENGINE = """
    import numpy as np
    from oracle.evidence.emit import Origin, TensorKey, begin, decide, describe, emit, end

    def run(kind="native", wrong=False, name="engine", revision=None, topology="pp1cfg1", rank=None, pull=0.0):
        cache = None if kind == "native" else {"method": "every-other-step"}
        describe(name=name, version="1.0", layers=2, topology=topology, rank=rank, cache=cache, revision=revision,
                 dirty=None if revision is None else False)
        steps = [dict(index=i, timestep=900 - i, sigma=1 - i / 4, expert="high", guidance_scale=1) for i in range(4)]
        request = begin(steps)
        latents = np.linspace(-1, 1, 8, dtype=np.float32)
        kept = None
        for i in range(4):
            reuse = kind == "cached" and i % 2 == 1
            hidden = latents + pull
            emit(TensorKey(request, i, "high", "cond", "embed"), hidden)
            if reuse:
                origin = Origin(request, i - 1, "high", "uncond" if wrong else "cond", 0)
                decide(request, i, "high", "cond", 0, "reuse", computed_blocks=0, origins=[origin])
                hidden = hidden + kept
                emit(TensorKey(request, i, "high", "cond", 1), hidden, "reused")
            else:
                if cache:
                    decide(request, i, "high", "cond", 0, "compute", computed_blocks=2)
                before = hidden
                for block in range(2):
                    hidden = np.tanh(hidden * 0.9 + (0.1 if wrong and kind == "forced" else 0))
                    emit(TensorKey(request, i, "high", "cond", block), hidden)
                kept = hidden - before
            emit(TensorKey(request, i, "high", "cond", "project"), hidden)
            latents = latents - 0.2 * hidden
            emit(TensorKey(request, i, "high", None, "combine"), hidden)
            emit(TensorKey(request, i, "high", None, "scheduler"), latents)
        end(request)
        return latents
"""
"""Somebody's engine, `engine.py`: it can reuse what the other branch left (`wrong`), and pull its inputs elsewhere."""


CACHES = """
    from engine import run

    def test_right(oracle):
        with oracle.recording("full") as full:
            run("native")
        with oracle.recording("cached") as cached:
            run("cached")
        oracle.assert_equivalent(full, cached, "cached")

    def test_wrong(oracle):
        with oracle.recording("full") as full:
            run("native")
        with oracle.recording("cached") as cached:
            run("cached", wrong=True)
        oracle.assert_equivalent(full, cached, "cached")
"""
SAYS = "rank 0, stage 0, step 1, cond: reused a residual of the uncond branch (step 0)"
"""Where `test_wrong` first goes wrong."""


@dataclass(frozen=True)
class Project:
    folder: Path
    site: Path

    def write(self, **files: str) -> Project:
        """Its modules by name, beside `engine.py`."""
        for name, text in {"engine": ENGINE, **files}.items():
            (self.folder / f"{name}.py").write_text(dedent(text))
        return self

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "ORACLE", "COV", "RANK", "WORLD"))}
        inner = {**outer, "PYTHONPATH": str(self.site), "COLUMNS": "160", **environment}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=inner, capture_output=True, text=True, timeout=120)

    def pytest(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        lean = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        return self.python("-m", "pytest", *lean, *arguments, **environment)

    def cases(self) -> dict[str, Case]:
        """What `junit.xml` has, by name."""
        return {case.name: case for case in cases_of(read_report(self.folder / "junit.xml"))}

    def wanref(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-c", "from oracle.cli import main; main()", *arguments)


def make_project(folder: Path) -> Project:
    folder.mkdir()
    return Project(folder, installed_wheel())


@cache
def installed_wheel() -> Path:
    """Where the wheel, built once a process, is installed: a folder where no other Python looks. Needs no network."""
    folder = Path(tempfile.mkdtemp(prefix="wheel-"))
    atexit.register(shutil.rmtree, folder)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run([*install, "--disable-pip-version-check"], check=True, capture_output=True)
    return site
