"""Traces of engines that are not wanref: written by their own processes, through `emit`."""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from oracle.evidence import emit
from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.reader import open_trace
from oracle.evidence.trace import TraceError
from oracle.evidence.validate import check_trace
from oracle.verdict.align import align
from oracle.verdict.compare import compare
from wanref.observe import TensorKey

pytestmark = pytest.mark.cpu

STEPS = [
    {"index": index, "timestep": 999.0 - index, "sigma": 1 - index / 3, "expert": "high", "guidance_scale": 1.0}
    for index in range(3)
]
ENGINE = {"name": "other", "version": "2.0", "layers": 2, "topology": "pp2cfg1"}

TEN_LINES = """
import sys
import numpy as np
from oracle.evidence.emit import TensorKey, begin, decide, describe, emit, end

rank = int(sys.argv[1])
describe(name="other", version="2.0", layers=2, topology="pp2cfg1", rank=rank)
steps = [dict(index=i, timestep=999.0 - i, sigma=1 - i / 3, expert="high", guidance_scale=1.0) for i in range(3)]
request = begin(steps, prompt="a red square")
for i in range(3):
    value = np.full((1, 4, 8), i + float(sys.argv[2]), np.float32)
    for block in ("embed", 0) if rank == 0 else (1, "project"):
        emit(TensorKey(request, i, "high", "cond", block), value)
    if rank == 1:
        emit(TensorKey(request, i, "high", None, "combine"), value)
        emit(TensorKey(request, i, "high", None, "scheduler"), value)
end(request)
assert not {"torch", "diffusers"} & set(sys.modules), "a process that never needed them has imported them"
"""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    emit._here = emit._Process()
    yield
    emit._here = emit._Process()


def run_engine(folder: Path, value: float = 0.0, ranks: tuple[int, ...] = (0, 1)) -> list[str]:
    environment = {**os.environ, "ORACLE_TRACE": str(folder), "ORACLE_TRACE_LEVEL": "tensor"}
    command = [sys.executable, "-c", TEN_LINES]
    started = [
        subprocess.Popen([*command, str(rank), str(value)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    errors = [each.communicate(timeout=60)[1] for each in started]
    assert [each.returncode for each in started] == [0] * len(ranks), errors
    return errors


def emit_request(rank: int, topology: str = "pp2cfg1") -> None:
    """What a worker does, in any process."""
    emit.describe(**{**ENGINE, "topology": topology}, rank=rank)
    request = emit.begin(STEPS)
    for step in STEPS:
        for block in ("embed", 0) if rank == 0 else (1, "project"):
            emit.emit(TensorKey(request, step["index"], "high", "cond", block), np.ones((1, 4, 8), np.float32))
        if rank == 1:
            for block in ("combine", "scheduler"):
                emit.emit(TensorKey(request, step["index"], "high", None, block), np.ones(3, np.float32))
    emit.end(request)


def test_processes_without_torch_make_a_whole_trace_that_can_be_compared(tmp_path: Path) -> None:
    run_engine(tmp_path / "one")
    run_engine(tmp_path / "again")
    run_engine(tmp_path / "other", 0.5)
    assert list(check_trace(tmp_path / "one")) == []
    one, again, other = (open_trace(tmp_path / name) for name in ("one", "again", "other"))
    assert compare(one, again, "rerun").holds
    verdict = compare(one, other, "rerun")
    assert not verdict.holds
    assert verdict.first is not None
    assert (verdict.first.layer, verdict.first.spot.step, verdict.first.spot.block) == ("tensors", 0, "embed")


def test_without_the_variable_nothing_is_asked_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORACLE_TRACE", raising=False)
    monkeypatch.chdir(tmp_path)

    class Unreadable:
        def __array__(self, *_: Any) -> np.ndarray:
            raise AssertionError("it was copied, though there is no trace")

    assert not emit.enabled()
    emit.describe(**ENGINE)
    assert emit.begin(STEPS) == -1
    emit.emit(TensorKey(-1, 0, "high", "cond", 0), Unreadable())
    emit.decide(-1, 0, "high", "cond", 0, "compute", computed_blocks=1)
    emit.end(-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_a_file_each_however_they_were_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=emit_request, args=(rank,)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert list(check_trace(tmp_path / "trace")) == []


def test_a_child_made_by_fork_does_not_write_into_its_parents_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    emit.describe(**ENGINE, rank=0)
    request = emit.begin(STEPS)
    child = multiprocessing.get_context("fork").Process(target=emit_request, args=(1,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    for step in STEPS:
        for block in ("embed", 0):
            emit.emit(TensorKey(request, step["index"], "high", "cond", block), np.ones((1, 4, 8), np.float32))
    emit.end(request)
    assert list(check_trace(tmp_path / "trace")) == []


def test_a_child_that_takes_its_parents_rank_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    emit_request(1)
    before = (tmp_path / "trace" / "rank1.events.jsonl").read_bytes()
    child = multiprocessing.get_context("fork").Process(target=emit_request, args=(1,))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "the engine goes on"
    emit._forget()
    emit_request(0)
    assert (tmp_path / "trace" / "rank1.events.jsonl").read_bytes() == before
    assert [str(h) for h in open_trace(tmp_path / "trace").holes if "incomplete" in str(h)] == [
        f"rank 1: is incomplete: process {child.pid} stopped recording: TraceExists: "
        f"folder='{tmp_path / 'trace'}' is not accepted: it has a trace. Give a new folder."
    ]


def emit_as_nobody(folder: str, marker: int) -> None:
    if os.geteuid() == 0:  # root may write anywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    os.environ["ORACLE_TRACE"] = folder
    emit_request(0)
    os.write(marker, b"lost" if not emit.enabled() else b"recorded")


def test_a_folder_that_may_only_be_read_stops_the_trace_alone() -> None:
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o555)
    reads, writes = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=emit_as_nobody, args=(folder, writes))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "the engine goes on"
    assert os.read(reads, 100) == b"lost"
    assert os.listdir(folder) == [], "no trace is no evidence: opening it is an error"
    with pytest.raises(TraceError, match=r"manifest\.json"):
        open_trace(folder)
    os.rmdir(folder)


def test_a_folder_that_cannot_be_made_stops_the_trace_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_engine(tmp_path / "file" / "trace", ranks=(0,))
    assert errors[0].count("The engine goes on without.") == 1


def emit_into_little_room(folder: str, room: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    os.environ["ORACLE_TRACE"] = folder
    emit_request(1)
    assert not emit.enabled()


def test_where_no_room_is_left_the_trace_stops_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path))
    emit_request(0)
    room = 1_000
    child = multiprocessing.get_context("fork").Process(target=emit_into_little_room, args=(str(tmp_path), room))
    child.start()
    child.join(60)
    assert child.exitcode == 0, "the engine goes on"
    assert (tmp_path / "rank1.events.jsonl").stat().st_size == room, "an event was cut in its middle"
    holes = [str(hole) for hole in align(open_trace(tmp_path)).holes]
    assert any("rank 1: line" in hole and "cut short" in hole for hole in holes)
    assert any("rank 1: is incomplete" in hole and "a part of an event" in hole for hole in holes)
    assert "rank 1: request 0 does not end" in holes


def test_a_decision_is_held_against_the_work_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    emit.describe(name="other", version="2.0", layers=1, cache={"method": "mine"})
    request = emit.begin(STEPS)
    for step in STEPS:
        index = step["index"]
        reuses = index == 2
        emit.decide(
            request,
            index,
            "high",
            "cond",
            0,
            "reuse" if reuses else "compute",
            computed_blocks=0 if reuses else 1,
            origins=[emit.Origin(request, 1, "high", "cond", 0)] if reuses else [],
        )
        source: Any = "computed"  # also at step 2, where a reuse is claimed
        for block in ("embed", 0, "project"):
            emit.emit(TensorKey(request, index, "high", "cond", block), np.ones(3, np.float32), source)
        for block in ("combine", "scheduler"):
            emit.emit(TensorKey(request, index, "high", None, block), np.ones(3, np.float32))
    emit.end(request)
    trace = open_trace(tmp_path / "trace")
    decided = align(trace).decisions[0, 2, "cond", 0]
    assert [(origin.step, origin.branch) for origin in decided.origins] == [(1, "cond")]
    verdict = compare(trace, trace, "rerun")
    assert verdict.first is not None
    assert verdict.first.spot.step == 2
    assert "0 blocks are said to have run, 1 were seen" in verdict.first.says


def test_bytes_and_statistics_are_the_probes(tmp_path: Path) -> None:
    import torch

    from oracle.evidence import words
    from oracle.evidence.probe import _statistics

    emitter = Emitter(tmp_path, Engine("other", "1", layers=1), level="tensor")
    request = emitter.begin(STEPS[:1])
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    values[0, 0], values[1, 1] = float("nan"), float("-inf")
    tensors = {f"port{i}": values.to(dtype) for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))}
    for port, tensor in tensors.items():
        emitter.tensor(TensorKey(request, 0, "high", "cond", 0, port), tensor)
    emitter.end(request)
    emitter.close()
    records = {each.key.port: each for each in open_trace(tmp_path).records[0] if hasattr(each, "digest")}
    for port, tensor in tensors.items():
        assert records[port].digest == words.tensor_digest(tensor)
        assert records[port].dtype == str(tensor.dtype).removeprefix("torch.")
        expected = _statistics(tensor)
        assert (records[port].nan, records[port].inf) == (expected["nan"], expected["inf"]) == (1, 1)
        assert records[port].absmax == expected["absmax"]
        assert records[port].rms == pytest.approx(expected["rms"], rel=1e-6)
    with safe_open(tmp_path / "request000.rank0.step0000.safetensors", framework="pt") as stored:
        for port, tensor in tensors.items():
            again = stored.get_tensor(f"cond.0.{port}.0")
            assert again.dtype == tensor.dtype
            assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def test_a_key_that_comes_again_is_another_occurrence_and_each_is_as_it_was_then(tmp_path: Path) -> None:
    emitter = Emitter(tmp_path, Engine("other", "1", layers=1), level="tensor")
    request = emitter.begin(STEPS[:1])
    key = TensorKey(request, 0, "high", "cond", 0)
    array = np.arange(3, dtype=np.uint8)
    for _ in range(2):
        emitter.tensor(key, array)
        array += 1  # as an engine does that goes on in place
    emitter.end(request)
    trace = open_trace(tmp_path)
    stored = [trace.array(replace(key, occurrence=each), 0).tolist() for each in (0, 1)]
    assert stored == [[0, 1, 2], [1, 2, 3]]
    header = int.from_bytes((tmp_path / "request000.rank0.step0000.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0, "readers in other languages map the tensors where they lie"


@pytest.mark.parametrize(
    ("level", "engine", "message"),
    [
        ("loud", ENGINE, "level='loud' is not accepted: give one of decisions, digest, stats, tensor"),
        ("stats", {**ENGINE, "rank": 2}, "rank=2 is not in topology pp2cfg1, which has ranks 0 to 1"),
        ("stats", {**ENGINE, "topology": "tp2"}, "tp2"),
    ],
)
def test_what_the_caller_says_wrongly_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, engine: Any, message: str
) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("ORACLE_TRACE_LEVEL", level)
    with pytest.raises(ValueError, match=message):
        emit.describe(**engine)
    assert not (tmp_path / "trace").exists()


def test_calls_out_of_order_and_values_of_no_kind_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    with pytest.raises(TraceError, match=r"describe\(\) comes first"):
        emit.begin(STEPS)
    emit.describe(**ENGINE, rank=0)
    with pytest.raises(TraceError, match="step 1 has index 2"):
        emit.begin([STEPS[0], STEPS[2]])
    with pytest.raises(TraceError, match="step 0 lacks sigma"):
        emit.begin([{name: value for name, value in STEPS[0].items() if name != "sigma"}])
    request = emit.begin(STEPS)
    with pytest.raises(TraceError, match=r"is a trace of .*'other'.* and not of .*'another'"):
        emit.describe(**{**ENGINE, "name": "another"}, rank=0)
    with pytest.raises(TraceError, match="dtype='complex64' is not accepted"):
        emit.emit(TensorKey(request, 0, "high", "cond", 0), np.zeros(2, np.complex64))
    with pytest.raises(TraceError, match="outcome='finished' is not accepted"):
        emit.end(request, "finished")
    with pytest.raises(TraceError, match="verdict='hit' is not accepted"):
        emit.decide(request, 0, "high", "cond", 0, "hit", computed_blocks=0)


def test_another_folder_is_another_trace_of_the_same_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORACLE_TRACE", raising=False)
    emit.describe(**{**ENGINE, "topology": "pp1cfg1", "layers": 1})

    def run() -> None:
        request = emit.begin(STEPS)
        for step in STEPS:
            for block in ("embed", 0, "project"):
                emit.emit(TensorKey(request, step["index"], "high", "cond", block), np.ones(3, np.float32))
            for block in ("combine", "scheduler"):
                emit.emit(TensorKey(request, step["index"], "high", None, block), np.ones(3, np.float32))
        emit.end(request)

    early = emit.begin(STEPS)
    for name in ("one", "two"):
        monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / name))
        emit.end(early)
        run()
        assert list(check_trace(tmp_path / name)) == [], "the request that began before is no part of it"
    assert compare(open_trace(tmp_path / "one"), open_trace(tmp_path / "two"), "rerun").holds


def test_the_launchers_rank_is_taken_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORACLE_TRACE", str(tmp_path / "trace"))
    monkeypatch.setenv("RANK", "1")
    emit.describe(**ENGINE)
    emit.begin(STEPS)
    assert [file.name for file in (tmp_path / "trace").iterdir()] == ["rank1.events.jsonl"]
