"""What the project promises around its code: options, skips, dependencies, pins, and what is in the tree."""

import ast
import fnmatch
import importlib.metadata
import os
import pickle
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What engines pin themselves. Installing wanref beside an engine must not bring or move any of it.
PINNED_BY_ENGINES = {
    *("accelerate", "cache-dit", "diffusers", "flash-attn", "huggingface-hub", "scipy", "tokenizers"),
    *("torch", "torchaudio", "torchvision", "transformers", "triton", "xformers"),
}
LARGEST_FILE = 8 * 2**20


def run_pytest(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Other installed plugins have no part in what is tested here, and cost more than all else in such a short run.
    inner = outer | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, env=inner, capture_output=True, text=True, timeout=120)


# Options.


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("--topology", "pp4cfg4", "pp2cfg2"),
        ("--checkpoint", "no-such-folder", "an existing folder nor a hub id, org/name[@revision]"),
        ("--checkpoint", "", "an existing folder nor a hub id, org/name[@revision]"),
        ("--checkpoint", "/absent/folder", "an existing folder nor a hub id, org/name[@revision]"),
        ("--checkpoint", "org/name@", "an existing folder nor a hub id, org/name[@revision]"),
        ("--artifacts", "pyproject.toml", "an existing or a new folder"),
        ("--artifacts", "", "an existing or a new folder"),
    ],
)
def test_unknown_option_value_is_a_usage_error_that_names_what_is_accepted(
    option: str, value: str, accepted: str
) -> None:
    run = run_pytest("--collect-only", __file__, f"{option}={value}")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert option in run.stderr
    assert repr(value) in run.stderr
    assert accepted in run.stderr


@pytest.mark.parametrize("checkpoint", ["suites", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "org/name@refs/pr/3"])
def test_folder_and_hub_id_are_accepted_as_checkpoint(checkpoint: str) -> None:
    assert run_pytest("--collect-only", __file__, f"--checkpoint={checkpoint}").returncode == pytest.ExitCode.OK


# Topologies, skips and rehearsals, seen from a project that has the same conftest and four tests of its own.

PROBE = """
import pathlib
import pytest

@pytest.fixture(scope="session")
def pool(topology):
    return topology

@pytest.mark.gpu
def test_gpu(pool, topology, checkpoint):
    assert pool == topology
    pathlib.Path(f"ran-{topology}").write_text(str(checkpoint))

@pytest.mark.gpu
def test_gpu_of_no_topology():
    pathlib.Path("ran-plain").touch()

@pytest.mark.cpu
def test_cpu(artifacts):
    assert artifacts.is_dir()

@pytest.mark.cpu
@pytest.mark.parametrize("topology", ["pp3cfg1"])
def test_own_topology(topology):
    assert topology == "pp3cfg1"
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    for name in ("conftest.py", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "test_probe.py").write_text(PROBE)
    return tmp_path


def stand_in_for_torch(probe: Path, gpus: int) -> dict[str, str]:
    """The environment of a machine with so many GPUs, as far as the conftest can see."""
    (probe / "torch.py").write_text(f"class cuda:\n    device_count = staticmethod(lambda: {gpus})\n")
    return {"PYTHONPATH": str(probe)}


def test_gpu_tests_are_skipped_with_all_that_is_missing(probe: Path) -> None:
    run = run_pytest("-m", "gpu", cwd=probe, CUDA_VISIBLE_DEVICES="")
    assert run.returncode == pytest.ExitCode.OK
    assert "5 skipped" in run.stdout
    assert "no checkpoint: pass --checkpoint PATH_OR_HUB_ID; no CUDA device" in run.stdout
    assert not list(probe.glob("ran-*"))


def test_gpu_tests_are_skipped_where_the_topology_needs_more_gpus(probe: Path) -> None:
    run = run_pytest("-m", "gpu", "--checkpoint", "org/name@main", cwd=probe, **stand_in_for_torch(probe, gpus=2))
    assert "4 passed, 1 skipped" in run.stdout
    assert "pp2cfg2 needs 4 GPUs, found 2" in run.stdout
    assert (probe / "ran-pp2cfg1").read_text() == "org/name@main"


def test_gpu_tests_run_where_nothing_is_missing(probe: Path) -> None:
    here = ["--topology=pp2cfg2", "--checkpoint=.", "--junitxml=gpu.xml"]
    run = run_pytest("-m", "gpu", *here, cwd=probe, **stand_in_for_torch(probe, gpus=4))
    assert "2 passed" in run.stdout
    assert {path.name for path in probe.glob("ran-*")} == {"ran-pp2cfg2", "ran-plain"}
    assert (probe / "ran-pp2cfg2").read_text() == str(probe)
    assert "rehearsal" not in (probe / "gpu.xml").read_text()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_rehearsal_runs_the_gpu_tests_and_is_recorded_as_a_rehearsal(probe: Path, workers: str) -> None:
    junit = probe / "rehearsal.xml"
    run = run_pytest(
        "-m", "gpu", "--rehearse", "-n", workers, f"--junitxml={junit}", cwd=probe, CUDA_VISIBLE_DEVICES=""
    )
    assert "5 passed" in run.stdout
    assert (probe / "ran-pp2cfg2").read_text() == str(probe / "fixtures" / "micro")
    text = junit.read_text()
    assert '<testsuite name="rehearsal"' in text
    assert text.count('classname="rehearsal.') == 5
    assert text.count('file="suites/test_probe.py"') == 5  # as xunit1 has it
    assert text.count('<property name="rehearsal" value="true"') == 5


def test_plain_pytest_collects_both_kinds_and_artifacts_go_where_asked(probe: Path) -> None:
    run = run_pytest("--artifacts=here/there", cwd=probe, **stand_in_for_torch(probe, gpus=0))
    assert "2 passed, 5 skipped" in run.stdout
    assert (probe / "here" / "there").is_dir()


def test_cpu_tests_do_not_import_torch_through_the_conftest(probe: Path) -> None:
    (probe / "torch.py").write_text("raise RuntimeError('imported')\n")
    assert "2 passed" in run_pytest("-m", "cpu", cwd=probe, PYTHONPATH=str(probe)).stdout


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_file_of_a_suite_carries_its_mark(kind: str) -> None:
    for path in (ROOT / "suites" / kind).rglob("test_*.py"):
        assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
        marks = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
        assert marks, f"{path.name} has no pytestmark"
        assert f"pytest.mark.{kind}" in marks[0], f"{path.name} is not marked {kind}"


# Dependencies.


def requirements(*groups: str) -> list[Requirement]:
    of = {"base": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return [Requirement(line) for group in groups for line in of[group]]


def closure(names: set[str]) -> set[str]:
    """All that these installed distributions bring, themselves included."""
    seen: set[str] = set()
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        for needed in map(Requirement, importlib.metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                names = names | {canonicalize_name(needed.name)}
    return seen


def test_base_dependencies_bring_nothing_that_an_engine_pins() -> None:
    brought = closure({canonicalize_name(requirement.name) for requirement in requirements("base")})
    assert not brought & PINNED_BY_ENGINES


def test_base_dependencies_have_lower_bounds_only() -> None:
    for requirement in requirements("base"):
        assert [bound.operator for bound in requirement.specifier] == [">="], requirement


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for requirement in pinned:
        assert [bound.operator for bound in requirement.specifier] == ["=="], requirement
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pinned}


@pytest.mark.parametrize("requirement", requirements("base", "reference", "test"), ids=lambda each: each.name)
def test_dependency_is_pinned_in_range_and_installed_as_pinned(requirement: Requirement) -> None:
    pin = pins()[canonicalize_name(requirement.name)]
    assert pin in requirement.specifier
    # The build of torch (`+cpu`, `+cu130`) is the machine's business; its release is not.
    assert Version(importlib.metadata.version(requirement.name)).public == str(pin)


@pytest.mark.parametrize("requirement", requirements("reference"), ids=lambda each: each.name)
def test_lower_bound_of_a_reference_library_is_the_pinned_release(requirement: Requirement) -> None:
    (lower,) = [Version(bound.version) for bound in requirement.specifier if bound.operator == ">="]
    pin = pins()[canonicalize_name(requirement.name)]
    assert pin.release[: len(lower.release)] == lower.release
    assert any(bound.operator == "<" for bound in requirement.specifier)


# The tree.


def committed_files() -> Iterator[Path]:
    """What a commit of all would hold. Walked rather than asked of git, so that it works in an export too."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not any(fnmatch.fnmatch(name, each) for each in ignored)]
        yield from (Path(folder, name) for name in files if not Path(folder, name).is_symlink())


def is_pickled(path: Path) -> bool:
    if zipfile.is_zipfile(path):  # torch.save
        return any(name.endswith(".pkl") for name in zipfile.ZipFile(path).namelist())
    with path.open("rb") as file:
        protocol = file.read(2)
    return protocol in {bytes([0x80, version]) for version in range(2, pickle.HIGHEST_PROTOCOL + 1)}


def test_tree_holds_no_pickled_weights_and_no_large_file() -> None:
    files = list(committed_files())
    assert ROOT / "pyproject.toml" in files
    pickled = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
    assert [path for path in files if path.suffix in pickled or is_pickled(path)] == []
    assert [path for path in files if path.stat().st_size > LARGEST_FILE] == []


@pytest.mark.parametrize("package", ["wanref", "oracle"])
def test_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text().splitlines()
    assert "run: make test" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
