"""What the `wanref` command refuses and how, and what `schedule`, `inspect` and `--help` show."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from suites.cpu.command import SHOW, invoke
from wanref import open_checkpoint

pytestmark = pytest.mark.cpu

# The command, and then which of the heavy libraries it has imported.
REPORT_IMPORTS = """
import sys
from oracle.cli import main

try:
    main()
finally:
    print("imported:", *sorted({"torch", "diffusers", "transformers", "numpy", "av"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def single(tiny: Callable[..., Path]) -> Path:
    return tiny(blocks=2)


@pytest.fixture(scope="module")
def dual(tiny: Callable[..., Path]) -> Path:
    return tiny(layout="dual", blocks=2)


# Refusals: one line, exit code 2, before torch is imported.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", "0"), "steps=0 is not accepted: give an integer of at least 1"),
        (("--height", "40"), "height=40 is not a multiple of 16"),
        (("--frames", "6"), "frames=6 is not accepted"),
        (("--guidance-scale", "nan"), "guidance_scale=nan is not accepted"),
        (("--guidance-scale-2", "3"), "guidance_scale_2=3.0 (request) is not accepted"),
        (("--boundary-ratio", "0.5"), "boundary_ratio=0.5"),
        (("--scheduler", "heun"), "scheduler='heun' is not accepted: give one of unipc, euler, dpm++"),
        (("--topology", "pp2"), "topology='pp2' is not accepted: give ppNcfgM"),
        (("--topology", "pp3cfg1"), "topology=pp3cfg1 is not accepted: 3 stages for 2 blocks. Give at most pp2."),
        (("--dtype", "int8"), "dtype='int8' is not accepted: give one of float32, bfloat16, float16"),
        (("--device", "tpu"), "device='tpu' is not accepted: give one of cpu, cuda"),
        (("--flow-shift-by-steps", "4:5,5:3"), "steps=3 (its own default) is not in this engine's flow_shift_by_steps"),
        (("--output", "video.gif"), "output='video.gif' is not accepted: give NAME.mp4"),
        (("--output", "absent/video.mp4"), "the folder 'absent' does not exist"),
    ],
)
def test_what_cannot_be_honoured_is_one_line_before_torch_is_imported(
    single: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    command = [sys.executable, "-c", REPORT_IMPORTS, "generate", str(single), *SHOW, "--output", "video.mp4", *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert run.stdout.split() == ["imported:"]
    assert list(tmp_path.iterdir()) == []


def test_an_absent_checkpoint_is_named_letter_by_letter(tmp_path: Path) -> None:
    absent = f"{tmp_path}/[/red] tape"  # square brackets are markup to the library that prints
    for verb in (
        ("generate", absent, *SHOW, "--output", tmp_path / "a.mp4"),
        ("schedule", absent),
        ("inspect", absent),
    ):
        result = invoke(*verb)
        assert result.exit_code == 2
        assert absent in result.stderr


@pytest.mark.parametrize("taken", ["out", "out-1"])
def test_a_folder_that_holds_anything_but_frames_is_not_replaced(single: Path, tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).mkdir()
    (tmp_path / taken / "thesis.tex").touch()
    videos = 2 if taken == "out-1" else 1
    result = invoke("generate", single, *SHOW, "--videos-per-prompt", videos, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "would be replaced, and 'thesis.tex' in it lost" in result.stderr
    assert [file.name for file in tmp_path.rglob("*.*")] == ["thesis.tex"]


def test_a_world_of_another_size_is_refused_with_the_way_to_start_ranks(single: Path, tmp_path: Path) -> None:
    result = invoke("generate", single, *SHOW, "--output", tmp_path / "out.mp4", WORLD_SIZE="2")
    assert result.exit_code == 2
    assert "topology=pp1cfg1 needs 1 ranks, but the world size is 2" in result.stderr
    assert "torchrun" in result.stderr


# schedule, inspect, help.


@pytest.mark.parametrize(("shift", "high", "low"), [(5, 17, 23), (12, 26, 14)])
def test_schedule_json_has_the_documented_keys_and_the_golden_split(
    dual: Path, shift: int, high: int, low: int
) -> None:
    options = ("--steps", 40, "--flow-shift", shift, "--guidance-scale", 4, "--guidance-scale-2", 1)
    printed = json.loads(invoke("schedule", dual, *options, "--json").stdout)
    assert printed.keys() == {"steps", "split", "sources"}
    assert printed["split"] == {"high": high, "low": low}
    assert printed["sources"] == {
        "steps": "request",
        "scheduler": "checkpoint",
        "flow_shift": "request",
        "boundary_ratio": "checkpoint",
        "guidance_scale": "request",
        "guidance_scale_2": "request",
    }
    assert all(step.keys() == {"index", "timestep", "sigma", "expert", "guidance_scale"} for step in printed["steps"])
    assert [step["index"] for step in printed["steps"]] == list(range(40))
    assert [step["expert"] for step in printed["steps"]] == ["high"] * high + ["low"] * low
    assert [step["guidance_scale"] for step in printed["steps"]] == [4] * high + [1] * low
    assert all(step["timestep"] == int(step["sigma"] * 1000) for step in printed["steps"])


def test_schedule_takes_its_flow_shift_from_the_map_for_the_step_count_asked(dual: Path) -> None:
    options = ("--steps", 40, "--flow-shift-by-steps", "27:12,40:5", "--json")
    printed = json.loads(invoke("schedule", dual, *options).stdout)
    assert printed["split"] == {"high": 17, "low": 23}
    assert printed["sources"]["flow_shift"] == "engine"


def test_schedule_prints_each_step_with_its_branches_and_what_decided_each_value(dual: Path) -> None:
    options = ("--steps", 4, "--guidance-scale", 4, "--guidance-scale-2", 1)
    result = invoke("schedule", dual, *options)
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[3:] for row in rows if row[0].isdigit()] == [["high", "4", "cond, uncond"]] * 2 + [
        ["low", "1", "cond"]
    ] * 2
    assert ["boundary_ratio", "0.875", "checkpoint"] in rows
    assert ["guidance_scale_2", "1.0", "request"] in rows


def test_inspect_shows_experts_configs_and_identity(
    dual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # digests are remembered there
    opened = open_checkpoint(dual)
    shown = invoke("inspect", dual)
    assert shown.exit_code == 0, shown.output
    for part in ("dual, boundary_ratio 0.875", opened.identity(), "UniPCMultistepScheduler, flow_shift 3"):
        assert part in shown.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.stdout.splitlines() if "│" in line]
    assert ["num_layers", "2", "2"] in rows
    facts = json.loads(invoke("inspect", dual, "--json").stdout)
    assert (facts["kind"], facts["identity"]) == ("dual", opened.identity())
    assert {expert: config["num_layers"] for expert, config in facts["experts"].items()} == {"high": 2, "low": 2}


@pytest.mark.parametrize("verb", [(), ("generate",), ("schedule",), ("inspect",)])
def test_help_shows_an_example_and_imports_nothing_heavy(verb: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", REPORT_IMPORTS, *verb, "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert f"Example: wanref {verb[0] if verb else 'generate'} fixtures/micro" in " ".join(run.stdout.split())
    assert run.stdout.splitlines()[-1].split() == ["imported:"]
