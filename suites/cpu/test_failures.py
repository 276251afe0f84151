"""A rank that fails or is lost ends the engine on every rank, and is named."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import wanref.parts
from oracle.evidence.ranks import RankPool
from suites.support import Run, fingerprint, load_engine, observed, run_requests
from wanref.checkpoint import CheckpointError
from wanref.liveness import RankFailure
from wanref.observe import Event, ExchangeEvent, StepEvent
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red square", height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
WITHIN_S = 30.0


class Planted(Exception):
    """What the tests make a rank run into."""


def strike(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Planted("as planned")


def plant(engine: WanReference, moment: str, how: str) -> None:
    """Make this rank fail at a moment of its next request: texts, step or decode."""
    texts = [0]

    def observer(event: Event) -> None:
        if moment == "texts" and isinstance(event, ExchangeEvent) and event.kind == "broadcast" and event.completed:
            texts[0] += 1
            if texts[0] == 1:
                strike(how)
        if moment == "step" and isinstance(event, StepEvent) and event.step.index == 1:
            strike(how)

    engine.observer = observer
    if moment == "decode":
        assert engine._decoder is not None, "only the owner decodes"
        engine._decoder.vae.decoder.register_forward_pre_hook(lambda *_: strike(how))


def run_into(folder: Path, topology: str, culprit: int, moment: str, how: str) -> dict[str, Any]:
    """What this rank gets from a request on which `culprit` fails, and from a second one."""
    engine = load_engine(folder, topology)
    good = fingerprint(engine(REQUEST).latents)
    if engine.place.rank == culprit:
        plant(engine, moment, how)
    said: dict[str, Any] = {"good": good}
    for call in ("first", "second"):
        started = time.monotonic()
        try:
            engine(REQUEST)
        except RankFailure as failure:
            said[call], said[f"{call}_cause"] = str(failure), type(failure.__cause__).__name__
        said[f"{call}_s"] = time.monotonic() - started
    said["sends"] = len(engine.exchange._sends)
    return said


def check_named(said: dict[str, Any], reason: str) -> None:
    assert reason in said["first"]
    assert "build a new one" in said["first"]
    assert said["first_s"] < WITHIN_S
    assert said["second"].startswith("this engine is over")
    assert reason in said["second"]
    assert said["second_s"] < 0.1
    assert said["sends"] == 0, "tensors of a request that is over"


@pytest.mark.parametrize(
    ("culprit", "moment"),
    [(0, "texts"), (3, "texts"), (0, "step"), (1, "step"), (2, "step"), (3, "step"), (1, "decode")],
)
def test_an_exception_on_one_rank_ends_the_engine_on_every_rank_and_names_it(
    ranks: RankPool, tiny: Callable[..., Path], culprit: int, moment: str
) -> None:
    by_rank = ranks.run(4, run_into, tiny(layout="dual"), "pp2cfg2", culprit, moment, "raised")
    for rank, said in enumerate(by_rank):
        check_named(said, f"rank {culprit} failed: Planted: as planned")
        assert said["first_cause"] == ("Planted" if rank == culprit else "ExchangeError")
    check_a_new_engine_works(ranks, tiny, by_rank[0]["good"])


@pytest.mark.parametrize(("culprit", "moment"), [(0, "texts"), (0, "step"), (2, "step"), (3, "step"), (1, "decode")])
def test_a_killed_rank_ends_the_engine_on_every_other_rank_and_is_named(
    ranks: RankPool, tiny: Callable[..., Path], culprit: int, moment: str
) -> None:
    outcomes = ranks.outcomes(4, run_into, tiny(layout="dual"), "pp2cfg2", culprit, moment, "killed")
    assert [outcome.kind for outcome in outcomes] == ["died" if rank == culprit else "value" for rank in range(4)]
    assert outcomes[culprit].text == f"exit code {-signal.SIGKILL}"
    survivors = [outcome.value for outcome in outcomes if outcome.kind == "value"]
    for said in survivors:
        check_named(said, f"rank {culprit} is lost")
    check_a_new_engine_works(ranks, tiny, survivors[0]["good"])


def check_a_new_engine_works(ranks: RankPool, tiny: Callable[..., Path], good: Any) -> None:
    again: list[list[Run]] = ranks.run(4, run_requests, tiny(layout="dual"), "pp2cfg2", "float32", [REQUEST])
    assert {only.latents for (only,) in again} == {good}


def interrupt(folder: Path) -> str:
    """KeyboardInterrupt on rank 1: it goes its way, and the other is told."""
    engine = load_engine(folder, "pp2cfg1")

    def observer(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step.index == 1:
            raise KeyboardInterrupt

    if engine.place.rank == 1:
        engine.observer = observer
    try:
        engine(REQUEST)
    except (KeyboardInterrupt, RankFailure) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_interrupt_on_one_rank_is_told_to_the_others(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    first, second = ranks.run(2, interrupt, tiny())
    assert first.startswith("RankFailure: rank 1 failed: KeyboardInterrupt")
    assert second.startswith("KeyboardInterrupt")


def test_an_exception_on_the_only_rank_ends_nothing(tiny: Callable[..., Path]) -> None:
    engine = load_engine(tiny(layout="dual"))
    good = observed(engine, REQUEST).result
    plant(engine, "step", "raised")
    with pytest.raises(Planted):
        engine(REQUEST)
    assert observed(engine, REQUEST).result == good


# Loading.


def load_with_failure_on_rank_1(folder: Path, error: Exception) -> tuple[str, str]:
    real = wanref.parts.load_parts

    def load_parts(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            raise error
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wanref.parts, "load_parts", load_parts)
        try:
            load_engine(folder, "pp2cfg1")
        except (CheckpointError, RankFailure) as refused:
            return type(refused).__name__, str(refused)
    return "", "loaded"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("disk gone"), "CheckpointError"),
        (ValueError("odd weights"), "CheckpointError"),
        (RuntimeError("out of memory"), "RankFailure"),
    ],
    ids=str,
)
def test_a_rank_that_cannot_load_its_part_is_named_on_every_rank(
    ranks: RankPool, tiny: Callable[..., Path], error: Exception, kind: str
) -> None:
    ((named, text),) = set(ranks.run(2, load_with_failure_on_rank_1, tiny(), error, timeout=30.0))
    assert named == kind
    assert text.startswith("rank 1 could not load its part of")
    assert str(error) in text


def load(folder: Path) -> str:
    try:
        load_engine(folder, "pp2cfg1")
    except CheckpointError as refused:
        return str(refused)
    return "loaded"


def test_a_shard_that_only_the_last_stage_reads_and_cannot_is_named_on_every_rank(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny(shards=6), folder)
    index = json.loads((folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    by_shard: dict[str, set[str]] = {}
    for name, shard in index["weight_map"].items():
        by_shard.setdefault(shard, set()).add(name)
    last_only = ("blocks.2.", "blocks.3.", "proj_out", "scale_shift_table")
    broken = next(shard for shard, names in by_shard.items() if all(name.startswith(last_only) for name in names))
    (folder / "transformer" / broken).write_bytes(b"\x00" * 64)
    said = ranks.run(2, load, folder, timeout=30.0)
    assert len(set(said)) == 1
    assert said[0].startswith("rank 1 could not load its part of")
    assert broken in said[0]
