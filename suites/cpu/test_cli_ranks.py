"""`wanref generate` on several ranks, each a process: the bytes of the file are those of one rank."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest
import torch.distributed as dist

from oracle.evidence.ranks import RankPool
from suites.cpu.command import SHOW, WANREF, invoke

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def single(tiny: Callable[..., Path]) -> Path:
    return tiny(blocks=2)


@pytest.fixture(scope="module")
def one_rank(single: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("one") / "out.safetensors"
    result = invoke("generate", single, *SHOW, "--output", file)
    assert result.exit_code == 0, result.output
    return file.read_bytes()


def generate(checkpoint: Path, output: Path, topology: str, *more: str) -> list[str]:
    return [WANREF, "generate", str(checkpoint), *SHOW, "--output", str(output), "--topology", topology, *more]


def test_a_topology_starts_its_own_local_ranks(single: Path, one_rank: bytes, tmp_path: Path) -> None:
    command = generate(single, tmp_path / "out.safetensors", "pp2cfg1")
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "topology pp2cfg1, decoded on rank 1" in run.stdout
    assert "%|" not in run.stderr  # no bars of other libraries: one from each rank would garble the command's own
    assert (tmp_path / "out.safetensors").read_bytes() == one_rank


def test_under_torchrun_it_joins_the_ranks_that_are_there(single: Path, one_rank: bytes, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command = [*torchrun, *generate(single, tmp_path / "out.safetensors", "pp1cfg2")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("wrote ") == 1
    assert (tmp_path / "out.safetensors").read_bytes() == one_rank


def generate_as_torchrun_would(arguments: list[str], topology: str) -> tuple[int, str]:
    """For ranks: the command on this rank, whose process has imported everything; its exit code and what it printed."""
    if "WORLD_SIZE" in os.environ:
        raise RuntimeError("this rank was started by torchrun already")
    rank = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "COLUMNS": "160"}
    done = invoke(*arguments, "--topology", topology, **rank)
    return done.exit_code, done.output if done.exit_code else done.stdout


@pytest.mark.parametrize(
    ("started_by", "topology", "cache", "rows", "fired"),
    [
        ("torchrun", "pp1cfg2", "fixed:steps=0.cond=1", [("cond", "0", "1")], True),  # without guidance rank 1 is idle
        ("torchrun", "pp2cfg1", "fixed:steps=0.cond=1", [("cond", "0", "1"), ("cond", "1", "0")], True),
        ("itself", "pp2cfg1", "teacache:coefficients=1/0,threshold=0", [("cond", "0", "0"), ("cond", "1", "0")], False),
    ],
)
def test_one_rank_prints_one_table_of_all_ranks_and_judges_the_whole(
    ranks: RankPool,
    single: Path,
    tmp_path: Path,
    started_by: str,
    topology: str,
    cache: str,
    rows: list[tuple[str, ...]],
    fired: bool,
) -> None:
    output = str(tmp_path / "out.safetensors")
    arguments = ["generate", str(single), *SHOW, "--output", output, "--guidance-scale", "1", "--cache", cache]
    if started_by == "torchrun":
        done = ranks.run(2, generate_as_torchrun_would, arguments, topology)
    else:
        result = invoke(*arguments, "--topology", topology, COLUMNS="160")
        done = [(result.exit_code, result.output if result.exit_code else result.stdout)]
    assert [code for code, _ in done] == [0] * len(done), done
    printed = "".join(text for _, text in done)
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    assert [(branch, stage, reused) for _, branch, stage, _, reused, *_ in table] == rows
    assert printed.count("expert ┃") == 1
    assert printed.count("never fired") == (not fired)


def test_two_torchrun_agents_make_one_world(single: Path, one_rank: bytes, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    agent = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *agent, "--rdzv-id", "test", "--no-python"]
    command = [*torchrun, *generate(single, tmp_path / "out.safetensors", "pp2cfg1")]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], outputs
    assert sum(stdout.count("wrote ") for stdout, _ in outputs) == 1
    assert (tmp_path / "out.safetensors").read_bytes() == one_rank


@pytest.fixture
def running(single: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command on two local ranks, in the middle of denoising far more steps than it will get to run."""
    command = generate(single, tmp_path / "out.mp4", "pp2cfg1", "--steps", "999")
    environment = os.environ | {"FORCE_COLOR": "1"}  # the progress bar moves only on what looks like a terminal
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    read_until(process.stderr, re.compile(r"[1-9]\d*/999"))
    yield process
    process.terminate()  # it ends its ranks, which a kill would leave behind
    process.wait()


def read_until(stream: IO[str], pattern: re.Pattern[str]) -> None:
    seen = ""
    while not pattern.search(seen):
        character = stream.read(1)
        assert character, f"ended without {pattern.pattern}: {seen}"
        seen += character


def test_a_killed_rank_is_named_and_leaves_no_file(running: subprocess.Popen[str], tmp_path: Path) -> None:
    below = psutil.Process(running.pid).children(recursive=True)
    ranks = [each for each in below if not each.children() and "resource_tracker" not in " ".join(each.cmdline())]
    assert len(ranks) == 2
    max(ranks, key=lambda rank: rank.pid).send_signal(signal.SIGKILL)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 1
    assert "rank 1 ended with exit code -9" in stderr
    assert list(tmp_path.iterdir()) == []
