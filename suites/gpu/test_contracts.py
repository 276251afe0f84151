"""Contracts 1, 2 and 4 on a real checkpoint, one process a GPU over NCCL; in rehearsal on the CPU over gloo."""

import gc
from pathlib import Path

import pytest
import torch

from suites.gpu.on_rank import ABORT_DURING, Evidence, asked, gather, log_problems
from suites.stock import run_stock, stock_pipeline
from suites.support import Run, fingerprint, first_difference, load_engine, observed, union
from wanref.checkpoint import open_checkpoint
from wanref.launch import launch
from wanref.topology import parse_topology

pytestmark = pytest.mark.gpu

DTYPE = "bfloat16"


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return "cpu" if pytestconfig.getoption("--rehearse") else "cuda"


@pytest.fixture(scope="session")
def on_ranks(topology: str, checkpoint: Path | str, device: str) -> list[Evidence]:
    """The evidence of each rank of `topology`, gathered once."""
    return started(checkpoint, topology, device)


@pytest.fixture(scope="session")
def serial(checkpoint: Path | str, device: str) -> Evidence:
    (only,) = started(checkpoint, "pp1cfg1", device)
    return only


def started(checkpoint: Path | str, topology: str, device: str) -> list[Evidence]:
    by_rank = launch(gather, parse_topology(topology), str(checkpoint), topology, device, DTYPE)
    free(device)
    return [by_rank[rank] for rank in sorted(by_rank)]


def free(device: str) -> None:
    """Give back what an engine or a pipeline of this process held: the next one may need all of the memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def test_latents_and_pixels_are_those_of_stock_diffusers(checkpoint: Path | str, device: str) -> None:
    opened = open_checkpoint(checkpoint)
    request = asked(opened)
    run = observed(load_engine(checkpoint, dtype=DTYPE, device=device), request)
    free(device)
    stock = run_stock(stock_pipeline(checkpoint, torch.bfloat16, device), request, opened)
    free(device)
    after_each_step = [value for key, value in run.tensors.items() if key.block == "scheduler"]
    assert after_each_step == [fingerprint(latents) for latents in stock.latents]
    assert run.video == fingerprint(stock.video)


def test_equals_pp1cfg1_at_every_key(on_ranks: list[Evidence], serial: Evidence, topology: str) -> None:
    for name in ("first", "other"):
        runs: list[Run] = [getattr(evidence, name) for evidence in on_ranks]
        reference: Run = getattr(serial, name)
        assert len(runs) == parse_topology(topology).world_size
        assert first_difference(reference.tensors, union(runs)) is None
        assert {run.latents for run in runs} == {reference.latents}
        assert {run.rank: run.video for run in runs if run.video is not None} == {runs[0].owner: reference.video}


def test_a_request_repeats_itself_after_another_and_after_an_abort(on_ranks: list[Evidence], topology: str) -> None:
    for rank, evidence in enumerate(on_ranks):
        assert evidence.other.latents != evidence.first.latents
        for later in (evidence.again, evidence.after_abort):
            assert first_difference(evidence.first.tensors, later.tensors) is None, f"rank {rank}"
            assert later.result == evidence.first.result, f"rank {rank}"


def test_an_abort_on_one_rank_stops_every_rank_before_the_same_step(on_ranks: list[Evidence], topology: str) -> None:
    assert [evidence.stopped for evidence in on_ranks] == [ABORT_DURING + 1] * parse_topology(topology).world_size


def test_every_exchange_is_numbered_and_completed(on_ranks: list[Evidence], topology: str) -> None:
    logs = [run for e in on_ranks for run in (e.first, e.other, e.again, e.after_abort)]
    assert [log_problems(run) for run in logs] == [[]] * len(logs)
    assert all((len(run.log) > 0) == (topology != "pp1cfg1") for run in logs)
