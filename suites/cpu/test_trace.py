"""A trace survives what ends its run, says what it lacks, and is read by a reader that trusts nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import (
    LEVELS,
    DecisionRecord,
    OriginRecord,
    TensorRecord,
    TraceError,
    from_line,
    tensor_name,
    tensors_file,
    to_line,
)
from oracle.evidence.validate import check_trace
from oracle.evidence.words import array_digest, tensor_digest
from oracle.evidence.writer import TraceWriter, write_manifest, write_whole
from oracle.verdict.align import align
from suites.support import defaults, load_engine
from suites.traced import ASKED, CACHE_DIT, edited, record_trace, with_manifest
from wanref.observe import StepEvent, TensorKey

if TYPE_CHECKING:
    from oracle.evidence.ranks import RankPool

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def trace(ranks: RankPool, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A cached run in pp2cfg1, with its tensors, in bfloat16."""
    folder = tmp_path_factory.mktemp("trace") / "t"
    return record_trace(ranks, tiny(), folder, "pp2cfg1", CACHE_DIT, dtype="bfloat16")


# Digests.


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]), st.integers(0, 70))
def test_a_tensor_has_the_digest_of_its_bytes_in_numpy(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).mul(100).to(dtype)
    array = tensor.view(torch.uint8).numpy() if size else np.zeros(0, np.uint8)
    assert tensor_digest(tensor) == array_digest(array)
    assert tensor_digest(torch.stack([tensor, tensor]).T[:, 0]) == tensor_digest(tensor)  # strides are no part of it


@given(st.binary(min_size=1, max_size=64), st.data())
def test_one_changed_byte_anywhere_is_another_digest(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    other = bytearray(data)
    other[at] ^= draw.draw(st.integers(1, 255))
    assert array_digest(np.frombuffer(data, np.uint8)) != array_digest(np.frombuffer(bytes(other), np.uint8))


def test_two_words_that_change_places_are_another_digest() -> None:
    assert array_digest(np.array([1.0, 2.0])) != array_digest(np.array([2.0, 1.0]))


def test_the_digest_is_the_published_one() -> None:
    """splitmix64's first outputs are public: 0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4."""
    first = (0xE220A8397B1DCDAF * 1 + (0x6E789E6AA1B965F4 | 1) * 2) % (1 << 64)
    assert array_digest(np.array([1, 2], dtype="<u8"))[:16] == f"{first:016x}"


# Levels, and what is recorded.


def test_each_level_records_what_those_before_it_do_and_more(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    traces = {level: record_trace(ranks, tiny(), tmp_path / level, cache=CACHE_DIT, level=level) for level in LEVELS}
    tensors = {
        level: {r.key: r for r in each.records[0] if isinstance(r, TensorRecord)} for level, each in traces.items()
    }
    assert not tensors["decisions"]
    assert [r for r in traces["decisions"].records[0] if isinstance(r, DecisionRecord)]
    assert {k: r.digest for k, r in tensors["digest"].items()} == {k: r.digest for k, r in tensors["stats"].items()}
    assert all(r.rms is None for r in tensors["digest"].values())
    assert all(r.rms for r in tensors["stats"].values())
    assert tensors["stats"] == tensors["tensor"]
    stored = {level: len(list(each.folder.glob("*.safetensors"))) for level, each in traces.items()}
    assert stored == {"decisions": 0, "digest": 0, "stats": 0, "tensor": ASKED.steps}


def test_a_stored_tensor_is_read_back_with_its_bytes_and_statistics(trace: Trace) -> None:
    records = [r for r in trace.records[1] if isinstance(r, TensorRecord)]
    assert records
    for record in records:
        assert array_digest(trace.raw(record.key, 1)) == record.digest
        array = trace.array(record.key, 1).astype(np.float64)
        assert array.shape == record.shape
        assert record.rms == pytest.approx(np.sqrt((array**2).mean()), rel=1e-5)
        assert record.absmax == np.abs(array).max()


def test_non_finite_elements_are_counted_and_left_out_of_the_statistics() -> None:
    from oracle.evidence.probe import _statistics

    values = torch.tensor([3.0, float("nan"), -4.0, float("inf"), -float("inf")])
    assert _statistics(values) == {"rms": pytest.approx(12.5**0.5), "absmax": 4.0, "nan": 1, "inf": 2}


def test_an_observer_that_is_mounted_sees_every_event_too_and_is_there_again_afterwards(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from oracle.evidence.probe import record

    seen: list[object] = []
    engine = load_engine(tiny(), defaults=defaults(), observer=seen.append)
    record(engine, ASKED, tmp_path / "t")
    assert any(isinstance(event, StepEvent) for event in seen)
    assert engine.observer == seen.append


# The schema.


def test_a_recorded_trace_is_valid_and_has_no_hole(trace: Trace) -> None:
    assert list(check_trace(trace.folder)) == []
    assert align(trace).holes == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "tensor", "digest": "xyz"}, "digest: 'xyz' does not match"),
        ({"kind": "tensor", "note": 1}, "'note' was unexpected"),
        ({"kind": "decision", "verdict": "skip"}, "verdict: 'skip' is not one of"),
        ({"kind": "exchange", "completed": 1}, "completed: 1 is not of type 'boolean'"),
    ],
)
def test_an_event_that_breaks_the_schema_is_named_by_line_and_field(
    trace: Trace, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    broken = edited(trace, tmp_path / "t", lambda e: {**e, **change} if e["kind"] == change["kind"] else e)
    problems = list(check_trace(broken.folder))
    assert any(says in problem and "rank0.events.jsonl, line" in problem for problem in problems), problems[:3]


def test_stored_bytes_that_are_not_those_digested_are_named(trace: Trace, tmp_path: Path) -> None:
    broken = edited(trace, tmp_path / "t", lambda event: event)
    file = broken.folder / "request000.rank0.step0002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert any("not those that were digested" in problem for problem in check_trace(broken.folder))
    file.unlink()
    assert any("no tensor" in problem for problem in check_trace(broken.folder))


@given(
    st.builds(
        DecisionRecord,
        request=st.integers(0, 9),
        step=st.integers(0, 99),
        expert=st.sampled_from(["high", "low"]),
        branch=st.sampled_from(["cond", "uncond"]),
        stage=st.integers(0, 3),
        verdict=st.sampled_from(["compute", "reuse"]),
        reason=st.text(),
        shadow=st.none() | st.just("reuse"),
        signal=st.none() | st.floats(allow_nan=False),
        rescaled=st.none(),
        accumulated_before=st.none(),
        accumulated_after=st.floats(allow_nan=False),
        threshold=st.none(),
        computed_blocks=st.integers(0, 40),
        origins=st.lists(st.just(OriginRecord(0, 1, "high", "cond", 0)), max_size=2).map(tuple),
    )
)
def test_a_record_comes_back_from_its_line_as_it_was_and_the_line_is_json_for_everyone(record: DecisionRecord) -> None:
    line = to_line(record)
    assert from_line(line) == record
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


# What is broken.


def test_a_line_that_was_cut_short_is_a_hole(trace: Trace, tmp_path: Path) -> None:
    broken = edited(trace, tmp_path / "t", lambda event: event)
    file = broken.folder / "rank1.events.jsonl"
    file.write_text(file.read_text()[:-20])
    assert any("cut short" in str(hole) and hole.rank == 1 for hole in open_trace(broken.folder).holes)
    assert any("does not end" in str(hole) for hole in align(open_trace(broken.folder)).holes)


@pytest.mark.parametrize(
    ("manifest", "says"), [({"schema": 2}, "schema 2; this reader knows 1"), ({"schema": None}, "None")]
)
def test_another_version_is_refused(trace: Trace, tmp_path: Path, manifest: dict[str, object], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        with_manifest(trace, tmp_path / "t", **manifest)


@pytest.mark.parametrize("content", [None, "", "[1]", "{", '{"schema": 1}', "\xff"])
def test_a_folder_without_a_manifest_that_says_what_it_must_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(TraceError, match="is not accepted"):
        open_trace(tmp_path)


def test_a_second_recording_into_one_folder_is_refused_and_leaves_the_first(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    from oracle.evidence.probe import record

    engine = load_engine(tiny(), defaults=defaults())
    record(engine, ASKED, tmp_path / "t")
    before = (tmp_path / "t" / "rank0.events.jsonl").read_bytes()
    with pytest.raises(TraceError, match="it has a trace"):
        record(engine, ASKED, tmp_path / "t")
    assert (tmp_path / "t" / "rank0.events.jsonl").read_bytes() == before


def test_an_exception_leaves_a_trace_that_says_how_far_it_came(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from oracle.evidence.probe import record

    def fail(event: object) -> None:
        if isinstance(event, StepEvent) and event.step.index == 2:
            raise RuntimeError("the third step fails")

    engine = load_engine(tiny(), defaults=defaults(), observer=fail)
    with pytest.raises(RuntimeError, match="third step"):
        record(engine, ASKED, tmp_path / "t", "tensor")
    aligned = align(open_trace(tmp_path / "t"))
    assert aligned.errors[0].message == "the third step fails"
    assert {key.step for key in aligned.tensors} == {0, 1}
    assert any("ended as failed" in str(hole) for hole in aligned.holes)
    assert not list((tmp_path / "t").glob(".*.partial"))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_reader_of_garbage_names_holes_and_never_fails_otherwise(
    trace: Trace, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of a real events file are overwritten, dropped or added anywhere."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_manifest(folder, {**trace.manifest, "world_size": 1, "topology": "pp1cfg1"})
    content = bytearray((trace.folder / "rank0.events.jsonl").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 60))] = data.draw(st.binary(max_size=8))
    (folder / "rank0.events.jsonl").write_bytes(bytes(content))
    found = open_trace(folder)
    align(found)
    broken = [number for number, line in enumerate(bytes(content).split(b"\n"), 1) if line and not is_json(line)]
    assert {number for number in broken if not any(f"line {number}" in str(hole) for hole in found.holes)} == set()


def is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode(errors="replace"))
    except ValueError:
        return False
    return True


def test_what_is_written_whole_is_there_or_not(tmp_path: Path) -> None:
    def half(draft: Path) -> None:
        draft.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "file", half)
    assert list(tmp_path.iterdir()) == []


# Light and lazy.


def test_reading_and_comparing_import_neither_torch_nor_diffusers(trace: Trace) -> None:
    script = (
        "import sys, oracle\n"
        f"trace = oracle.open_trace({str(trace.folder)!r})\n"
        "assert oracle.compare(trace, trace, 'rerun').holes is None\n"
    ).replace(".holes is None", ".holds")
    script += "assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_reading_one_tensor_of_a_large_file_reads_no_other(tmp_path: Path) -> None:
    write_manifest(
        tmp_path, {"schema": 1, "world_size": 1, "topology": "pp1cfg1", "level": "tensor", "digest": "", "layers": 1}
    )
    TraceWriter(tmp_path, 0).close()
    key = TensorKey(0, 0, "high", "cond", 0)
    name = "request000.rank0.step0000.safetensors"
    save_file({"cond.0.output.0": torch.arange(4.0), "large": torch.zeros(1)}, tmp_path / name)
    with (tmp_path / name).open("r+b") as stream:
        stream.truncate(4 << 30)  # sparse: reading all of it would take 4 GiB of memory
    script = (
        "import oracle\nfrom pathlib import Path\nfrom wanref.observe import TensorKey\n"
        f"array = oracle.open_trace({str(tmp_path)!r}).array(TensorKey(0, 0, 'high', 'cond', 0), 0)\n"
        "assert array.tolist() == [0, 1, 2, 3]\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"  # ru_maxrss is the parent's, too
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 << 10  # KiB
    assert open_trace(tmp_path).array(key, 0).tolist() == [0, 1, 2, 3]


LAYERS, LARGE_STEPS, ELEMENTS = 30, 5, 8 << 20


def write_large(folder: Path) -> None:
    """A cached run of 32 MiB a tensor, 4 GiB in all, whose files are sparse: step 2 reuses the residual of step 1."""
    engine = Engine("large", "1", LAYERS, cache={"method": "mine"})
    emitter = Emitter(folder, engine, level="tensor")
    steps = [
        {"index": i, "timestep": 1.0, "sigma": 0.5, "expert": "high", "guidance_scale": 1.0} for i in range(LARGE_STEPS)
    ]
    emitter.begin(steps)
    for step in range(LARGE_STEPS):
        reuses = step == 2
        origins = (OriginRecord(0, 1, "high", "cond", 0),) if reuses else ()
        blocks: list[int | str] = [LAYERS - 1] if reuses else list(range(LAYERS))
        verdict, computed = ("reuse", 0) if reuses else ("compute", LAYERS)
        emitter.decision(
            DecisionRecord(0, step, "high", "cond", 0, verdict, "mine", *[None] * 6, computed, origins)  # type: ignore[arg-type]
        )
        header = {}
        keys = [TensorKey(0, step, "high", "cond", block) for block in ("embed", *blocks, "project")]
        keys += [TensorKey(0, step, "high", None, block) for block in ("combine", "scheduler")]
        for number, key in enumerate(keys):
            source = "reused" if reuses and key.block == LAYERS - 1 else "computed"
            record = TensorRecord(key, "float32", (ELEMENTS,), f"{number:032x}", source, 1.0, 1.0, 0, 0)
            emitter._writer.write(record)
            places = (4 * ELEMENTS * number, 4 * ELEMENTS * (number + 1))
            header[tensor_name(key)] = {"dtype": "F32", "shape": [ELEMENTS], "data_offsets": places}
        text = json.dumps(header).encode()
        with (folder / tensors_file(0, 0, step)).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + 4 * ELEMENTS * len(keys))
    emitter.end(0)


@pytest.mark.parametrize("contract", ["rerun", "cached"])
def test_comparing_two_traces_of_4_gib_needs_less_than_500_mib(tmp_path: Path, contract: str) -> None:
    for name in ("one", "other"):
        write_large(tmp_path / name)
        assert sum(file.stat().st_size for file in (tmp_path / name).iterdir()) > 4 << 30
    script = (
        "import oracle\nfrom pathlib import Path\n"
        f"one, other = (oracle.open_trace(Path({str(tmp_path)!r}) / name) for name in ('one', 'other'))\n"
        f"verdict = oracle.compare(one, other, {contract!r})\n"
        "assert verdict.holds, verdict.sentence\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500 << 10  # KiB
