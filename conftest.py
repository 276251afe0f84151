"""Options, fixtures and skips of the suites. They live only here: an installed oracle must not bring them elsewhere."""

import argparse
import functools
import math
import re
from pathlib import Path

import pytest
from _pytest.junitxml import xml_key

ROOT = Path(__file__).parent
TOPOLOGIES = ("pp1cfg1", "pp1cfg2", "pp2cfg1", "pp2cfg2")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def checkpoint_value(text: str) -> Path | str:
    if text and Path(text).is_dir():  # an unset shell variable must not mean the current folder
        return Path(text).absolute()
    if HUB_ID.fullmatch(text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither an existing folder nor a hub id, org/name[@revision]")


def artifacts_value(text: str) -> Path:
    if not text or (Path(text).exists() and not Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; an existing or a new folder is accepted")
    return Path(text).absolute()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("wanref")
    group.addoption(
        "--topology",
        choices=[*TOPOLOGIES, "all"],
        default="all",
        help="topology that the tests which take one run in (default: all four)",
    )
    group.addoption(
        "--checkpoint",
        type=checkpoint_value,
        metavar="PATH_OR_HUB_ID",
        help="diffusers-layout folder, or org/name[@revision] (default: fixtures/micro; gpu tests have no default)",
    )
    group.addoption(
        "--artifacts",
        type=artifacts_value,
        default=ROOT / "artifacts",
        metavar="DIR",
        help="folder that tests leave their artifacts in (default: artifacts)",
    )
    group.addoption(
        "--rehearse",
        action="store_true",
        help="run the gpu tests on the CPU with gloo and the micro checkpoint; recorded as a rehearsal, not a GPU pass",
    )


@pytest.hookimpl(trylast=True)  # after pytest's own JUnit plugin
def pytest_configure(config: pytest.Config) -> None:
    # pytest can name a testsuite only in its ini-file, and one file serves both kinds of run.
    if config.getoption("--rehearse") and (xml := config.stash.get(xml_key, None)):
        xml.suite_name = xml.prefix = "rehearsal"


def pytest_report_header(config: pytest.Config) -> list[str]:
    rehearsal = config.getoption("--rehearse")
    return ["rehearsal: gpu tests run on the CPU with gloo, nothing here is a GPU pass"] if rehearsal else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named_by_test = any("topology" in str(mark.args) for mark in metafunc.definition.iter_markers("parametrize"))
    if "topology" in metafunc.fixturenames and not named_by_test:
        chosen = metafunc.config.getoption("--topology")
        # Session scope, so that a pool of ranks can be a session fixture of its topology.
        metafunc.parametrize("topology", TOPOLOGIES if chosen == "all" else [chosen], scope="session")


@pytest.hookimpl(tryfirst=True)  # before any fixture is set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if item.config.getoption("--rehearse"):
        item.user_properties.append(("rehearsal", "true"))
    elif missing := [*missing_checkpoint(item), *missing_gpus(item)]:
        pytest.skip("; ".join(missing))


def missing_checkpoint(item: pytest.Item) -> list[str]:
    if item.config.getoption("--checkpoint"):
        return []
    return ["no checkpoint: pass --checkpoint PATH_OR_HUB_ID"]


def missing_gpus(item: pytest.Item) -> list[str]:
    topology = item.callspec.params.get("topology", "pp1cfg1") if hasattr(item, "callspec") else "pp1cfg1"
    needed, found = math.prod(map(int, re.findall(r"\d+", topology))), cuda_devices()
    if found == 0:
        return ["no CUDA device"]
    return [f"{topology} needs {needed} GPUs, found {found}"] if found < needed else []


@functools.cache
def cuda_devices() -> int:
    import torch  # only here: a run without gpu tests should not pay for the import

    return torch.cuda.device_count()


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config) -> Path | str:
    """The checkpoint under test: a folder, or a hub id with an optional `@revision`."""
    return pytestconfig.getoption("--checkpoint") or ROOT / "fixtures" / "micro"


@pytest.fixture(scope="session")
def artifacts(pytestconfig: pytest.Config) -> Path:
    """An existing folder that outlives the run. Tests of one run share it: use names that cannot collide."""
    folder = pytestconfig.getoption("--artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
