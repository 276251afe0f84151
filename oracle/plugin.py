"""The pytest plugin: fixtures `oracle`, `topology`, `checkpoint` and `twins`, for the tests of any project.

Nothing is collected or changed unless a test asks for a fixture, and nothing is imported before: pytest loads this file
in every project that has wanref installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oracle.fixtures import Oracle, Record
    from oracle.report.waivers import Waiver

ORACLE: pytest.StashKey[Oracle] = pytest.StashKey()
WAIVERS: pytest.StashKey[Sequence[Waiver]] = pytest.StashKey()


class NotEquivalent(AssertionError):
    """A claim that does not hold. `sentence` is its verdict; the message has what follows from it, too."""

    def __init__(self, sentence: str, message: str) -> None:
        super().__init__(message)
        self.sentence = sentence


class NotEquivalentWarning(UserWarning):
    """The same, in a run that was told to warn only."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("oracle", "whether cached and parallel runs are the runs that were asked for")
    group.addoption(
        "--oracle-traces",
        type=_folder,
        metavar="DIR",
        help="where recordings are kept (default: a temporary folder, kept for tests that fail)",
    )
    group.addoption("--oracle-level", type=_level, metavar="LEVEL", help="how much is recorded (default: stats)")
    # No default here: argparse would read it, and import what reads it.
    group.addoption("--oracle-topology", type=_topology, metavar="NAME", help="fixture `topology` (default: pp1cfg1)")
    group.addoption("--oracle-checkpoint", metavar="PATH_OR_HUB_ID", help="fixture `checkpoint`")
    group.addoption("--oracle-warn", action="store_true", help="verdicts that fail are warnings, and fail no test")
    group.addoption("--oracle-waivers", metavar="FILE", help="TOML with known failures, each with a reason and an end")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--oracle-waivers")
    if file is None:
        return
    from oracle.report.waivers import WaiverError, read_waivers

    try:
        config.stash[WAIVERS] = read_waivers(Path(file))
    except WaiverError as error:
        raise pytest.UsageError(f"--oracle-waivers: {error}") from error
    if not hasattr(config, "workerinput"):  # under xdist the reports of all workers come together in one process
        config.pluginmanager.register(_WaiverReport(config.stash[WAIVERS]))


@pytest.fixture(name="oracle")
def _oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Records runs, and asserts what must hold between them; see `oracle.fixtures.Oracle`."""
    from oracle.fixtures import Oracle, folder_of

    config = request.config
    kept = config.getoption("--oracle-traces")
    oracle = Oracle(
        item=request.node,
        folder=(kept or tmp_path_factory.getbasetemp() / "oracle") / folder_of(request.node),
        level=config.getoption("--oracle-level"),
        shared=kept is not None,
        warn=config.getoption("--oracle-warn"),
        waivers=config.stash.get(WAIVERS, ()),
    )
    request.node.stash[ORACLE] = oracle
    yield oracle
    if kept is None and not oracle.failed and oracle.folder.exists():
        shutil.rmtree(oracle.folder)


@pytest.fixture
def twins(oracle: Oracle) -> Record:
    """`twins(run)`, or `twins(engine, request, cache)`: a request native, forced and cached; see `Oracle.record`."""
    return oracle.record


@pytest.fixture(scope="session")
def topology(pytestconfig: pytest.Config) -> str:
    """The name of the topology to run in: --oracle-topology, or pp1cfg1."""
    return str(pytestconfig.getoption("--oracle-topology") or "pp1cfg1")


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config) -> str:
    """The checkpoint to run: --oracle-checkpoint. Without it, tests that need one are skipped."""
    given = pytestconfig.getoption("--oracle-checkpoint")
    if not given:
        pytest.skip("no checkpoint: pass --oracle-checkpoint PATH_OR_HUB_ID")
    return str(given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    oracle = item.stash.get(ORACLE, None)
    if oracle is None or call.excinfo is None or not report.failed:
        return report
    oracle.failed = True
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if isinstance(call.excinfo.value, NotEquivalent) and crash is not None:
        crash.message = call.excinfo.value.sentence
    elif call.when == "call" and _did_not_end(call.excinfo.value):
        # JUnit calls it an `error` when a test did not come to say anything. pytest writes one for every phase but the
        # call, and xdist reports a worker that died in this phase, too.
        report.when = "???"  # type: ignore[assignment]
    return report


def _did_not_end(error: BaseException) -> bool:
    """Time ran out, or a rank hung or died: what the test would have said is not known."""
    if isinstance(error, (TimeoutError, subprocess.TimeoutExpired)):
        return True
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith("Timeout")  # of pytest-timeout
    # Whoever raises one of these has imported its module, and torch with it.
    pool, liveness = sys.modules.get("oracle.evidence.ranks"), sys.modules.get("wanref.liveness")
    if pool is not None and isinstance(error, pool.RanksFailed):
        return any(outcome.kind in ("died", "hung") for outcome in error.outcomes)
    return liveness is not None and isinstance(error, liveness.RankFailure)


class _WaiverReport:
    """Says at the end which waivers did not waive anything."""

    def __init__(self, waivers: Sequence[Waiver]) -> None:
        self._waivers = waivers
        self._ran: set[str] = set()
        self._used: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ran.add(report.nodeid)
        self._used |= {str(value) for name, value in report.user_properties if name == "oracle.waived"}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        today = date.today()
        for waiver in self._waivers:
            if waiver.label in self._used:
                continue
            tests = [test for test in self._ran if waiver.is_for(test)]
            what = "its tests ran, and none failed so" if tests else "no test of its name ran"
            says = f"has ended on {waiver.until}" if waiver.until < today else f"waived nothing: {what}"
            terminalreporter.write_line(f"oracle: waiver {waiver.number} ({waiver.test}) {says}", yellow=True)


def _folder(text: str) -> Path:
    if not text or (Path(text).exists() and not Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; an existing or a new folder is accepted")
    return Path(os.path.abspath(text))


def _level(text: str) -> str:
    from oracle.evidence.trace import LEVELS

    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a level; one of {', '.join(LEVELS)} is accepted")
    return text


def _topology(text: str) -> str:
    from wanref.topology import parse_topology

    try:
        return str(parse_topology(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
