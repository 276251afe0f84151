"""Public bug reports on topologies, exchanges and dtypes, as small scenarios named after their rows."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oracle.evidence.ranks import RankPool
from suites.support import load_engine, run_requests
from wanref.exchange import Exchange
from wanref.launch import join
from wanref.request import Request
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red square", height=32, width=32, frames=5, steps=6, guidance_scale=4.0, seed=7)


# T: topology.


def send_and_edit(elements: int) -> Any:
    """Rank 0 sends a view and edits what it is a view of before rank 1 receives."""
    topology = parse_topology("pp2cfg1")
    rank, mesh = join(topology, "cpu")
    exchange = Exchange(topology.place(rank), mesh, torch.device("cpu"))
    if rank == 0:
        sent = torch.ones(2, elements).t()  # not contiguous, so that a copy of its own travels
        exchange.send(sent, (elements, 2), torch.float32, 1)
        sent.fill_(7)
        pending = len(exchange._sends)
        dist.barrier()
        exchange.drain()
        return pending, len(exchange._sends)
    dist.barrier()
    received = exchange.receive((elements, 2), torch.float32, 0)
    return float(received.min()), float(received.max())


def let_go_at_once(elements: int) -> Any:
    """Rank 0 sends, lets go of the tensor and allocates others of its size before rank 1 receives."""
    topology = parse_topology("pp2cfg1")
    rank, mesh = join(topology, "cpu")
    exchange = Exchange(topology.place(rank), mesh, torch.device("cpu"))
    if rank == 0:
        exchange.send(torch.ones(elements), (elements,), torch.float32, 1)
        reused = [torch.full((elements,), 7.0) for _ in range(8)]
        dist.barrier()
        exchange.drain()
        return len(reused), len(exchange._sends)
    dist.barrier()
    received = exchange.receive((elements,), torch.float32, 0)
    return float(received.min()), float(received.max())


def test_T3_a_sent_tensor_is_held_until_it_has_been_delivered(ranks: RankPool) -> None:
    """vllm-omni#2322, vllm#52015. 16 MB, which no socket buffer takes at once."""
    assert ranks.run(2, let_go_at_once, 1 << 22) == [(8, 0), (1.0, 1.0)]


def test_T3_what_is_not_contiguous_is_sent_as_a_copy_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(2, send_and_edit, 1 << 21) == [(1, 0), (1.0, 1.0)]


def test_T3_no_tensor_that_is_still_being_sent_is_written_to(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    """A contiguous tensor travels without a copy: the engine must leave it alone until the drain."""
    hidden, latents = ranks.run(2, versions_of_sent, tiny())
    assert (len(hidden), len(latents)) == (12, 6)
    assert all(when_sent == at_drain for when_sent, at_drain in hidden + latents)


def versions_of_sent(folder: Path) -> list[tuple[int, int]]:
    engine = load_engine(folder, "pp2cfg1")
    versions = []
    drain = engine.exchange.drain

    def checked_drain() -> None:
        versions.extend((before, tensor._version) for tensor, before in sent)
        sent.clear()
        drain()

    sent: list[tuple[torch.Tensor, int]] = []
    send = engine.exchange.send

    def noted_send(tensor: torch.Tensor, *arguments: Any) -> None:
        sent.append((tensor, tensor._version))
        send(tensor, *arguments)

    engine.exchange.send, engine.exchange.drain = noted_send, checked_drain  # type: ignore[method-assign]
    engine(REQUEST)
    return versions


def test_T4_without_a_seed_every_rank_starts_from_the_same_noise(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    """vllm-omni#2176, #2218, #2252, #1729, #5176. The `embed` of both chains is of the same initial latents."""
    by_rank = ranks.run(4, run_requests, tiny(), "pp2cfg2", "float32", [replace(REQUEST, seed=None)] * 2)
    first = [
        {value for rank in by_rank for key, value in rank[i].tensors.items() if (key.step, key.block) == (0, "embed")}
        for i in (0, 1)
    ]
    assert [len(embedded) for embedded in first] == [1, 1]
    assert first[0] != first[1]
    assert len({run.latents for (run, _) in by_rank}) == 1


# D: dtypes.


def disagree_on_dtype() -> tuple[str, float, bool]:
    """Rank 1 comes to the gather with float32 where bfloat16 is agreed; rank 0 must not be left waiting unnoticed."""
    topology = parse_topology("pp1cfg2")
    rank, mesh = join(topology, "cpu")
    exchange = Exchange(topology.place(rank), mesh, torch.device("cpu"))
    started, said = time.monotonic(), "nothing"
    if rank == 1:
        try:
            exchange.gather_branches(torch.ones(4), (4,), torch.bfloat16)
        except ValueError as error:
            said = str(error)
    return said, time.monotonic() - started, any(event.kind == "gather" for event in exchange.log)


def test_D3_a_dtype_that_drifted_is_an_error_on_its_own_rank_before_the_exchange(ranks: RankPool) -> None:
    """vllm-omni#3956, TensorRT-LLM#11964."""
    _, (said, seconds, logged) = ranks.run(2, disagree_on_dtype)
    assert said == "gather: the tensor is [4] torch.float32, but the peers expect [4] torch.bfloat16."
    assert seconds < 1.0
    assert not logged


def test_D3_a_bfloat16_model_exchanges_bfloat16_predictions_and_float32_latents(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    for scheduler in ("unipc", "euler", "dpm++"):
        request = replace(REQUEST, scheduler=scheduler, steps=2)
        by_rank = ranks.run(4, run_requests, tiny(), "pp2cfg2", "bfloat16", [request])
        dtypes = {(event.kind, event.dtype, event.shape) for (run,) in by_rank for event in run.log}
        assert ("gather", "torch.bfloat16", (1, 4, 2, 4, 4)) in dtypes
        assert {
            dtype for kind, dtype, shape in dtypes if len(shape) == 5 and kind in ("send", "receive", "broadcast")
        } == {"torch.float32"}
        assert {run.latents.dtype for (run,) in by_rank} == {"torch.float32"}


# V: what was asked is what runs.


def test_V2_the_topology_that_ran_is_in_the_output(ranks: RankPool, tiny: Callable[..., Path], topology: str) -> None:
    """vllm-omni#3382, #4290, #4900, #2281, LightX2V#1248."""
    world = parse_topology(topology).world_size
    by_rank = ranks.run(world, run_requests, tiny(), topology, "float32", [replace(REQUEST, steps=1)])
    assert [(run.topology, run.rank) for (run,) in by_rank] == [(topology, rank) for rank in range(world)]


@pytest.mark.parametrize(("asked", "world"), [("pp1cfg2", 1), ("pp2cfg2", 2), ("pp1cfg1", 2)])
def test_V2_a_world_that_is_not_the_topologys_is_refused(
    ranks: RankPool, tiny: Callable[..., Path], asked: str, world: int
) -> None:
    outcomes = ranks.outcomes(world, run_requests, tiny(), asked, "float32", [REQUEST])
    needed = parse_topology(asked).world_size
    for outcome in outcomes:
        assert outcome.kind == "raised"
        assert re.match(rf"ValueError: topology={asked} needs {needed} ranks, .* is {world}\..*torchrun", outcome.value)
        assert "wanref.launch" in outcome.value


def test_V1_the_latent_shape_does_not_depend_on_the_topology(
    ranks: RankPool, tiny: Callable[..., Path], topology: str
) -> None:
    """diffusers#11167, Wan2.1#229, vllm-omni#1279, sglang#19311."""
    request = replace(REQUEST, height=48, width=16, frames=9, steps=1)
    by_rank = ranks.run(parse_topology(topology).world_size, run_requests, tiny(), topology, "float32", [request])
    assert {run.latents.shape for (run,) in by_rank} == {(1, 4, 3, 6, 2)}
    assert {run.video.shape for (run,) in by_rank if run.video is not None} == {(1, 9, 48, 16, 3)}
