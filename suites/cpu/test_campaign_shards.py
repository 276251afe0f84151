"""Shards: what is there and whole is not run again, and what was interrupted ends as if it had not been."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.campaign.content import Content, read_content, write_content
from oracle.campaign.record import read_record, write_record
from oracle.campaign.refusal import CampaignError
from oracle.campaign.shards import (
    ATTEMPTS,
    Done,
    InProcess,
    OnRanks,
    Progress,
    Shard,
    ShardsFailed,
    check_graph,
    path_of,
    run_graph,
)
from oracle.evidence.ranks import RankPool
from suites import campaign_shards
from suites.campaign_shards import finish, graph, keep_sum

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


class Counting(InProcess):
    """Remembers which shards were run."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
        for done in super().run(shards):
            self.ran.append(done.shard.name)
            yield done


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# Resuming.


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    shards = graph(tmp_path)
    run_graph(shards, tmp_path, first)
    assert first.ran == [shard.name for shard in shards]
    before = files(tmp_path)
    path_of("rows/002", tmp_path).unlink()
    run_graph(shards, tmp_path, second)
    assert second.ran == ["rows/002"]
    assert files(tmp_path) == before


def test_a_file_of_other_work_or_with_a_broken_byte_is_written_again_and_noted(tmp_path: Path) -> None:
    shards = graph(tmp_path)
    run_graph(shards, tmp_path, InProcess())
    before = files(tmp_path)
    broken = path_of("native/001", tmp_path)
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    cut = path_of("native/003", tmp_path)
    cut.write_bytes(cut.read_bytes()[:-20])
    other = Counting()
    run_graph([*shards[:-1], replace(shards[-1], key="another")], tmp_path, other)
    assert other.ran == ["native/001", "native/003", "rows/005"]
    assert files(tmp_path)["native/001.safetensors"] == before["native/001.safetensors"]
    notes = [json.loads(line) for line in (tmp_path / ATTEMPTS).read_text().splitlines()]
    assert [(note["shard"], note["outcome"]) for note in notes] == [
        ("native/001", "run again"),
        ("native/003", "run again"),
        ("rows/005", "run again"),
    ]
    assert "its digest differs" in notes[0]["reason"]
    assert "written for other work" in notes[2]["reason"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(folder)
    return files(folder)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "suites.campaign_shards", str(folder), *arguments], cwd=ROOT)


def whole_files(folder: Path) -> dict[str, bytes]:
    """Those under their names. A draft that a kill left behind is no file of the campaign."""
    return {name: content for name, content in files(folder).items() if not name.endswith(".partial")}


@pytest.mark.parametrize("kind", ["draft", "rename", "behind"])
@pytest.mark.parametrize("nth", [1, 9, 13], ids=["source", "sum", "table"])
def test_killed_at_each_kind_of_write_it_resumes_to_the_same_bytes(
    tmp_path: Path, undisturbed: dict[str, bytes], nth: int, kind: str
) -> None:
    assert start(tmp_path, str(nth), kind).wait(60) == -signal.SIGKILL
    left = whole_files(tmp_path)
    assert len(left) == (nth if kind == "behind" else nth - 1)
    assert left.items() <= undisturbed.items(), "what has its name is whole"
    finish(tmp_path)
    assert whole_files(tmp_path) == undisturbed


def test_killed_at_random_moments_it_resumes_to_the_same_bytes(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    random.seed(0)
    kills = 0
    for _ in range(5):
        process = start(tmp_path)
        # From before its first write to behind several.
        while not (tmp_path / "native").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.06))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        assert whole_files(tmp_path).items() <= undisturbed.items()
    assert kills >= 2, "a run that was not interrupted proves nothing"
    finish(tmp_path)
    assert whole_files(tmp_path) == undisturbed


# Failing.


def fail(*_: object) -> None:
    raise OSError("no space left")


def test_a_failed_shard_is_not_a_result_and_keeps_only_what_needs_it_from_running(tmp_path: Path) -> None:
    shards = graph(tmp_path)
    shards[2] = replace(shards[2], work=fail)
    with pytest.raises(ShardsFailed) as failed:
        run_graph(shards, tmp_path, InProcess())
    assert failed.value.reasons == {
        "native/002": "OSError: no space left",
        "rows/002": "not run: it needs native/002",
    }
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(shards) - 2
    (note,) = [json.loads(line) for line in (tmp_path / ATTEMPTS).read_text().splitlines()]
    assert note == {"shard": "native/002", "key": "source 2", "outcome": "failed", "reason": "OSError: no space left"}
    again = Counting()
    run_graph(graph(tmp_path), tmp_path, again)
    assert again.ran == ["native/002", "rows/002"]


def test_a_shard_that_an_executor_loses_has_failed(tmp_path: Path) -> None:
    class Losing(InProcess):
        def run(self, shards: Sequence[Shard]) -> Iterator[Done]:
            yield from super().run(shards[1:])

    with pytest.raises(ShardsFailed) as failed:
        run_graph(graph(tmp_path)[:2], tmp_path, Losing())
    assert failed.value.reasons == {"native/000": "the executor did not give it back"}


def test_an_interrupt_is_no_failure_of_a_shard(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_graph([replace(graph(tmp_path)[0], work=interrupt)], tmp_path, InProcess())


def test_a_graph_that_cannot_run_is_refused() -> None:
    one, two = graph(Path())[0], graph(Path())[campaign_shards.COUNT]
    for shards, match in (
        ([one, one], "is there twice"),
        ([two, one], "needs 'native/000', which does not come before it"),
        ([replace(one, name="../out")], "is not accepted"),
        ([replace(one, name="a//b")], "is not accepted"),
        ([replace(one, name="")], "is not accepted"),
    ):
        with pytest.raises(CampaignError, match=match):
            check_graph(shards)


def test_progress_tells_what_was_found_from_what_was_run(tmp_path: Path) -> None:
    said: list[Progress] = []
    shards = graph(tmp_path)
    run_graph(shards[:4], tmp_path, InProcess())
    run_graph(shards[:6], tmp_path, InProcess(), said.append)
    assert said == [Progress(4, 0, 6), Progress(5, 1, 6), Progress(6, 2, 6)]


# Ranks.


def rank_of(scale: int) -> int:
    import torch.distributed as dist

    return scale * dist.get_rank()


def add_ranks(by_rank: Sequence[int], scale: int) -> Content:
    return Content({"sum": list(by_rank), "scale": scale})


def test_a_shard_of_several_ranks_joins_what_each_returned(ranks: RankPool, tmp_path: Path) -> None:
    shard = Shard("both", rank_of, add_ranks, (10,), "key", world_size=2)
    with pytest.raises(ShardsFailed, match="2 ranks are not this one process"):
        run_graph([shard], tmp_path, InProcess())
    run_graph([shard], tmp_path, OnRanks(ranks))
    assert read_content(path_of("both", tmp_path), "key").values == {"sum": [0, 10], "scale": 10}


def test_a_rank_that_dies_fails_its_shard_alone(ranks: RankPool, tmp_path: Path) -> None:
    dead = Shard("dead", sys.exit, keep_sum, (3,), "key")
    with pytest.raises(ShardsFailed) as failed:
        run_graph([dead, replace(graph(tmp_path)[0])], tmp_path, OnRanks(ranks))
    assert list(failed.value.reasons) == ["dead"]
    assert "SystemExit" in failed.value.reasons["dead"]
    assert path_of("native/000", tmp_path).exists()


# The files.


def test_content_comes_back_and_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    arrays = {name: np.random.default_rng(i).random((3, i + 1)) for i, name in enumerate("cab")}
    for number, order in enumerate((sorted(arrays), sorted(arrays, reverse=True))):
        write_content(tmp_path / str(number), "key", Content({"b": 1, "a": [2.5]}, {n: arrays[n] for n in order}))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    read = read_content(tmp_path / "0", "key")
    assert read.values == {"b": 1, "a": [2.5]}
    assert all(np.array_equal(read.arrays[name], array) for name, array in arrays.items())


def test_no_number_is_written_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_content(tmp_path / "a", "key", Content({"x": float("nan")}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(tmp_path / "b", "test/1", {"x": float("inf")})
    assert files(tmp_path) == {}


def test_a_record_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    body: dict[str, Any] = {"passed": False, "value": 0.5}
    write_record(path, "test/1", body)
    assert read_record(path, "test/1") == body
    with pytest.raises(CampaignError, match="schema 'test/1' is not accepted; this reader knows test/2"):
        read_record(path, "test/2")
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(CampaignError, match="changed by hand"):
        read_record(path, "test/1")
    with pytest.raises(CampaignError, match="FileNotFoundError"):
        read_record(tmp_path / "absent.json", "test/1")
