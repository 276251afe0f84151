"""The triplet over topologies: what holds is shown to hold, and what was not shown does not."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oracle.evidence.reader import open_trace
from oracle.report.junit import read_report
from oracle.verdict.align import align
from oracle.verdict.compare import compare
from oracle.verdict.matrix import Matrix, Row, judge_matrix, record_matrix, record_on_rank
from oracle.verdict.twin import compare_loops, recorded_schedule
from suites.cpu.command import invoke
from suites.support import defaults
from suites.traced import ASKED, LIVE, TEACACHE, edited, record_trace
from wanref.caching.spec import parse_cache

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool
    from wanref.schedule import Step

pytestmark = pytest.mark.cpu


def matrix(checkpoint: Path, *topologies: str, **caches: str) -> Matrix:
    return Matrix(
        checkpoint=str(checkpoint),
        request=ASKED,
        topologies=topologies,
        caches={name: parse_cache(text) for name, text in caches.items()},
        defaults=defaults(),
    )


def rows_of(ranks: RankPool, asked: Matrix, folder: Path) -> list[Row]:
    seen: list[str] = []
    failed = record_matrix(asked, folder, ranks, seen.append)
    assert tuple(seen) == asked.run
    return list(judge_matrix(asked, folder, failed))


def test_every_claim_of_every_topology_is_made_and_holds(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    asked = matrix(tiny(), "pp1cfg2", "pp2cfg1", "pp2cfg2", plain=TEACACHE, live=LIVE)
    rows = rows_of(ranks, asked, tmp_path)
    assert [row.sentence for row in rows if not row.verdict.holds] == []
    claims = {(row.topology, row.cache, row.verdict.contract) for row in rows}
    assert len(rows) == len(claims) == 4 + 3 + 4 * 2 * 2 + 2 * 2  # used engine, topology, forced and cached, cfg
    cached = [row for row in rows if row.verdict.contract == "cached"]
    assert all(row.verdict.hits and row.verdict.misses for row in cached)


def test_a_cache_that_never_fires_fails_its_claim_and_the_command(tiny: Callable[..., Path], tmp_path: Path) -> None:
    never = f"{TEACACHE},first=4".replace(",first=1", "")
    size = ["--height", "32", "--width", "32", "--frames", "1", "--steps", "4"]
    folder = str(tmp_path / "traces")
    junit = tmp_path / "junit.xml"
    asked = ["--traces", folder, "--topology", "pp1cfg1", "--cache", never, "--junit", str(junit)]
    done = invoke("verify", tiny(), *asked, *size)
    assert done.exit_code == 1, done.output
    assert "2 of 3 hold" in done.stdout
    assert "no call decided to reuse" in " ".join(done.stdout.replace("│", " ").split())
    (suite,) = read_report(junit)
    assert {case.name: case.result.kind for case in suite.cases} == {
        "used engine": "passed",
        "forced": "passed",
        "cached": "error",
    }
    wrong = invoke("verify", tiny(), "--traces", str(tmp_path / "new"), "--cache", "cache-dit:depth=3", *size)
    assert wrong.exit_code == 2
    assert "depth" in wrong.stderr
    again = invoke("verify", tiny(), "--traces", folder, *size)
    assert again.exit_code == 2
    assert "not empty" in again.stderr


def lose_a_rank(asked: Matrix, topology: str, folder: str) -> None:
    """For ranks: the last one of two is killed."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    record_on_rank(asked, topology, folder)


def test_a_killed_rank_is_a_verdict_of_its_own(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = matrix(tiny(), "pp2cfg1")
    monkeypatch.setattr("oracle.verdict.matrix.record_on_rank", lose_a_rank)
    rows = rows_of(ranks, asked, tmp_path)
    (lost,) = [row for row in rows if row.topology == "pp2cfg1"]
    assert not lost.verdict.holds
    assert lost.sentence == "rank 1 died: exit code -9"
    assert all(row.verdict.holds for row in rows if row.topology == "pp1cfg1")


def hang_at_step_1(asked: Matrix, topology: str, folder: str) -> None:
    """For ranks: the last one of two does not come back."""
    from oracle.faults.plant import around
    from wanref import denoise

    def sleep(original: Callable[..., object], job: denoise.Job, step: Step, *rest: object) -> object:
        if job.exchange.place.rank == 1 and step.index == 1:
            time.sleep(600)
        return original(job, step, *rest)

    with around(denoise, "_run_step", sleep):
        record_on_rank(asked, topology, folder)


def test_the_command_says_who_waits_for_whom_in_a_hang_and_keeps_every_stack(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oracle.verdict.matrix.record_on_rank", hang_at_step_1)
    monkeypatch.setattr("oracle.verdict.matrix.HANG_SECONDS", 4.0)
    size = ["--height", "32", "--width", "32", "--frames", "1", "--steps", "2"]
    done = invoke("verify", tiny(), "--traces", tmp_path / "traces", "--topology", "pp1cfg2", *size)
    assert done.exit_code == 1, done.output
    waits = (
        r"no answer in 4 s; it waits in gather #\d+ with rank 1 at step 1; rank 1 is in sleep \(test_verify\.py:\d+\)"
    )
    assert re.search(rf"fails rank 0 hung: {waits} at step 1", " ".join(done.stdout.replace("│", " ").split()))
    failure = (tmp_path / "traces" / "pp1cfg2" / "failure.txt").read_text()
    assert re.match(rf"rank 0 hung: {waits}", failure)
    assert "in gather_branches" in failure
    assert "in sleep\n" in failure


@pytest.mark.parametrize(("recorded", "replayed"), [("pp2cfg1", "pp2cfg2"), ("pp1cfg1", "pp1cfg2")])
def test_a_recorded_schedule_replayed_on_another_topology_gives_the_cached_runs_bytes(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path, recorded: str, replayed: str
) -> None:
    cached = record_trace(ranks, tiny(), tmp_path / "cached", recorded, LIVE)
    steps = recorded_schedule(align(cached), int(replayed[2]))
    again = record_trace(ranks, tiny(), tmp_path / "again", replayed, f"fixed:steps={steps}")
    one, other = align(cached), align(again)
    assert compare_loops(one, other).differing == ()
    verdict = compare(cached, again, "replay")
    assert verdict.holds, verdict.sentence
    final = [key for key in one.ordered if key.block == "scheduler"][-1]
    assert one.tensors[final][0].record.digest == other.tensors[final][0].record.digest
    assert {d.verdict for d in other.decisions.values()} == {"compute", "reuse"}


def test_a_schedule_that_another_topology_cannot_follow_is_refused(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    fixed = "fixed:steps=0.cond=1+2/1.cond=2"
    cached = align(record_trace(ranks, tiny(), tmp_path / "cached", "pp2cfg1", fixed))
    assert recorded_schedule(cached, 2) == "0.cond=1+2/1.cond=2"
    assert recorded_schedule(cached, 4) == "0.cond=1+2/1.cond=1+2/2.cond=2/3.cond=2"
    with pytest.raises(ValueError, match=r"stage 0 would hold the recorded stages \[0, 1\].*step 1"):
        recorded_schedule(cached, 1)


def test_a_rule_by_the_timestep_alone_that_decides_otherwise_on_its_own_output_is_a_wrong_decision(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from oracle.verdict.twin import judge_triplet

    record_trace(ranks, tiny(), tmp_path / "native")
    record_trace(ranks, tiny(), tmp_path / "plain-forced", cache=TEACACHE, forced=True)
    cached = record_trace(ranks, tiny(), tmp_path / "kept", cache=TEACACHE)
    edited(cached, tmp_path / "plain-cached", lambda event: event)
    verdicts, loops = judge_triplet(tmp_path, "plain")
    assert verdicts["cached"].holds
    assert loops.differing == ()

    def flip(event: dict[str, object]) -> dict[str, object]:
        if event["kind"] == "decision" and event["step"] == 1:
            event["shadow"] = "compute"
        return event

    (tmp_path / "other").mkdir()
    for part in ("native", "plain-cached"):
        (tmp_path / "other" / part).symlink_to(tmp_path / part)
    edited(open_trace(tmp_path / "plain-forced"), tmp_path / "other" / "plain-forced", flip)
    verdicts, loops = judge_triplet(tmp_path / "other", "plain")
    assert len(loops.differing) == 2  # both branches
    assert any("decides by the timestep alone" in finding.says for finding in verdicts["cached"].findings)
    assert compare(open_trace(tmp_path / "native"), open_trace(tmp_path / "plain-forced"), "forced").holds
