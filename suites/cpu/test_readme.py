"""Every command in the README is run, and what the README says of it is seen."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from oracle.report.junit import cases_of, read_report
from suites import demo
from suites.browser import find_chromium
from suites.cpu.command import invoke

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
IN_TURN = [command for command in COMMANDS if re.match("wanref (verify|trace|report|junit)", command)]
"""The first records what the others, and an example in Python, look into."""
CAMPAIGN = [command for command in COMMANDS if command.startswith("wanref campaign")]
WRITES = re.compile(r"--output (\S+)")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def run_here(command: str) -> Result:
    """A `wanref` command in this process and folder: to import torch and diffusers once more takes 7 s."""
    name, *arguments = shlex.split(command)
    assert name == "wanref"
    return invoke(*arguments, COLUMNS="120")


def recipe(target: str) -> list[str]:
    """The last command that make would run for `target`."""
    lines = run(["make", "--no-print-directory", "--dry-run", target], ROOT).stdout.splitlines()
    return shlex.split(lines[-1])


def test_the_readme_has_the_commands_that_this_file_knows() -> None:
    verbs = {command.split()[1] for command in COMMANDS if command.startswith("wanref")}
    assert verbs == {"generate", "schedule", "inspect", "verify", "trace", "report", "junit", "audit", "campaign"}
    assert set(COMMANDS) >= RUNS_THIS_TEST | NEEDS_GPUS | {DEMO}


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c not in {*RUNS_THIS_TEST, *NEEDS_GPUS, DEMO, *IN_TURN, *CAMPAIGN}]
)
def test_readme_command_runs_and_writes_what_it_names(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    if command.startswith("wanref"):
        done = run_here(command)
        assert done.exit_code == 0, done.output
    else:
        ran = run(shlex.split(command), tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    written = WRITES.findall(command)
    assert all((tmp_path / name).stat().st_size > 0 for name in written)
    assert bool(written) == ("generate" in command)


@pytest.mark.parametrize("command", sorted(NEEDS_GPUS))
def test_readme_gpu_command_is_understood_and_says_what_is_missing(command: str) -> None:
    done = run([sys.executable, "-m", *shlex.split(command), "-p", "no:cacheprovider", "suites/gpu"], ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert "passed" not in done.stdout


def test_readme_commands_of_the_oracle_run_in_turn_and_its_example_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    done = [run_here(command) for command in IN_TURN]
    assert [each.exit_code for each in done] == [0] * 5, [each.output for each in done]
    recorded, validated, shown, page, summary = (each.stdout for each in done)
    assert "17 of 17 hold" in recorded
    assert "valid" in validated
    assert "reuse, threshold" in shown
    assert "17 of 17 claims hold" in page
    assert (tmp_path / "traces" / "report.html").stat().st_size > 0
    assert "17 passed" in summary
    assert example("from oracle")["verdict"].holds  # type: ignore[attr-defined]


def test_readme_campaign_runs_and_leaves_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)
    run, report = CAMPAIGN
    ran = run_here(run)
    # Whether its latency passes depends on what else the machine does: a profile that failed says so in itself.
    assert ran.exit_code in (0, 1), ran.output
    assert "small" in ran.stdout
    shown = run_here(report)
    assert shown.exit_code == 0, shown.output
    assert "of 1 topologies have a qualified profile" in shown.stdout
    assert (tmp_path / "campaign" / "campaign.html").stat().st_size > 0


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


def test_demo_makes_its_videos_finds_all_bytes_equal_and_points_at_the_planted_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe("demo")[1:] == ["-m", "suites.demo", "--artifacts", "artifacts/demo"]
    with pytest.raises(SystemExit) as ended:
        demo.main(tmp_path)
    told = capsys.readouterr().out
    assert ended.value.code == 0, told
    assert "32 of 32 wanref renders are bitwise equal to stock diffusers" in told
    assert [f"{name}: 27 of 27 claims hold" in told for name in ("single", "dual")] == [True, True]
    assert "reused a residual of the uncond branch" in told
    assert len(list(tmp_path.glob("*.mp4"))) == 8
    assert (tmp_path / "contact_sheet.png").stat().st_size > 0
    pages = [(tmp_path / f"{name}.html").read_text() for name in ("single", "dual")]
    assert ["27 of 27 claims hold" in page for page in pages] == [True, True]
    suites = read_report(tmp_path / "junit.xml")
    assert {suite.name: len(suite.cases) for suite in suites} == {"single": 27, "dual": 27, "planted": 1}
    assert all(case.result.kind == "passed" for case in cases_of(suites))
    assert bool(list(tmp_path.glob("page-*.png"))) == (find_chromium() is not None)


def test_every_file_that_the_readme_names_is_there() -> None:
    named = re.findall(r"`((?:wanref|oracle|suites|fixtures)/[\w./*-]+)`", README)
    assert named
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []
    assert [link for link in re.findall(r"\]\(([\w./]+)\)", README) if not (ROOT / link).exists()] == []
