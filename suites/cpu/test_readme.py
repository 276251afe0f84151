"""Every command in the README is run, and what the README says of it is seen."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]

RUNS_THIS_TEST = {"make test", "pytest -m cpu -n 2", "pytest -m gpu --rehearse"}
"""`make test` runs the two others; what runs this test cannot be run by it."""
NEEDS_GPUS = {"pytest -m gpu --topology pp2cfg2 --checkpoint Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}
DEMO = "make demo"
IN_TURN = [command for command in COMMANDS if command.startswith(("wanref verify", "wanref trace"))]
"""The first records what the others, and an example in Python, look into."""
WRITES = re.compile(r"--output (\S+)")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def recipe(target: str) -> list[str]:
    """The last command that make would run for `target`."""
    lines = run(["make", "--no-print-directory", "--dry-run", target], ROOT).stdout.splitlines()
    return shlex.split(lines[-1])


def test_the_readme_has_the_commands_that_this_file_knows() -> None:
    verbs = {command.split()[1] for command in COMMANDS if command.startswith("wanref")}
    assert verbs == {"generate", "schedule", "inspect", "verify", "trace"}
    assert set(COMMANDS) >= RUNS_THIS_TEST | NEEDS_GPUS | {DEMO}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in {*RUNS_THIS_TEST, *NEEDS_GPUS, DEMO, *IN_TURN}])
def test_readme_command_runs_and_writes_what_it_names(command: str, tmp_path: Path) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    done = run(shlex.split(command), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    written = WRITES.findall(command)
    assert all((tmp_path / name).stat().st_size > 0 for name in written)
    assert bool(written) == ("generate" in command)


@pytest.mark.parametrize("command", sorted(NEEDS_GPUS))
def test_readme_gpu_command_is_understood_and_says_what_is_missing(command: str) -> None:
    done = run([sys.executable, "-m", *shlex.split(command), "-p", "no:cacheprovider"], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert "passed" not in done.stdout


def test_readme_commands_of_the_oracle_run_in_turn_and_its_example_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    done = [run(shlex.split(command), tmp_path) for command in IN_TURN]
    assert [each.returncode for each in done] == [0, 0, 0], [each.stdout + each.stderr for each in done]
    recorded, validated, shown = (each.stdout for each in done)
    assert "17 of 17 hold" in recorded
    assert "valid" in validated
    assert "reuse, threshold" in shown
    monkeypatch.chdir(tmp_path)
    assert example("from oracle")["verdict"].holds  # type: ignore[attr-defined]


def example(first_words: str) -> dict[str, object]:
    """The names that the README's example in Python leaves behind."""
    (code,) = (e for e in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if e.startswith(first_words))
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_readme_python_example_runs_and_shapes_are_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    output = example("from wanref")["output"]
    assert output.video.shape == (1, 17, 64, 64, 3)  # type: ignore[attr-defined]
    assert output.latents.shape[0] == 1  # type: ignore[attr-defined]
    assert output.request.sources["steps"] == "request"  # type: ignore[attr-defined]


def test_demo_makes_its_videos_finds_all_bytes_equal_and_points_at_the_planted_fault(tmp_path: Path) -> None:
    command = [str(tmp_path) if part == "artifacts/demo" else part for part in recipe("demo")]
    done = run([sys.executable, *command[1:]], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 of 32 wanref renders are bitwise equal to stock diffusers" in done.stdout
    assert [f"{name}: 27 of 27 claims hold" in done.stdout for name in ("single", "dual")] == [True, True]
    assert "reused a residual of the uncond branch" in done.stdout
    assert len(list(tmp_path.glob("*.mp4"))) == 8
    assert (tmp_path / "contact_sheet.png").stat().st_size > 0


def test_every_file_that_the_readme_names_is_there() -> None:
    named = re.findall(r"`((?:wanref|oracle|suites|fixtures)/[\w./*-]+)`", README)
    assert named
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []
    assert [link for link in re.findall(r"\]\(([\w./]+)\)", README) if not (ROOT / link).exists()] == []
