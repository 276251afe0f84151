"""What ranks say to each other: both branches overlap on one chain, the log is whole, and misfits are not sent."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.support import Run, load_engine, observed, run_on, serial
from wanref.exchange import Exchange
from wanref.observe import Event, ExchangeEvent, StepEvent, TensorEvent, TensorKey
from wanref.request import Request
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

GUIDED = Request(prompt="a red square", height=32, width=32, frames=5, steps=4, guidance_scale=4.0, seed=7)
UNGUIDED = replace(GUIDED, guidance_scale=1)
BATCH = replace(GUIDED, prompt=("a red square", "a blue circle"), negative_prompt=("stripes", "dots"), seed=(1, 2))


# Overlap of the branches on one chain.


def run_with_meeting(folder: Path, meeting: Path) -> Run:
    """Stage 1 stays in its first cond block until stage 0 is in its first uncond block, and the other way round."""
    engine = load_engine(folder, "pp2cfg1")
    stage = engine.place.stage

    def meet(event: Event) -> None:
        if (
            isinstance(event, TensorEvent)
            and (event.key.branch, event.key.block) == (("uncond", 0), ("cond", 2))[stage]
        ):
            (meeting / f"{event.key.step}-{stage}").touch()
            deadline = monotonic() + 20
            while not (meeting / f"{event.key.step}-{1 - stage}").exists():
                assert monotonic() < deadline, f"stage {stage} met nobody at step {event.key.step}"
                sleep(0.002)

    return observed(engine, GUIDED, meet)


def test_stage_1_works_on_cond_while_stage_0_works_on_uncond(
    ranks: RankPool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    runs = ranks.run(2, run_with_meeting, tiny(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {f"{step}-{stage}" for step in range(4) for stage in (0, 1)}
    assert runs[0].latents == serial(ranks, tiny(), (GUIDED,), "float32")[0].latents


def test_stage_0_sends_both_branches_before_it_waits_and_stage_1_starts_cond_before_it_waits_for_uncond(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    (runs,) = run_on(ranks, tiny(), "pp2cfg1", (GUIDED,))
    for step in range(4):
        first, last = (within_step(each, step) for each in runs)
        assert [e for e in first if e in ("send", "receive")] == ["send", "send", "receive"]
        assert first.index("delivered") > first.index("receive")
        assert (
            last.index(("cond", 3)) < [i for i, e in enumerate(last) if e == "receive"][1] < last.index(("uncond", 2))
        )


def within_step(of_rank: Run, step: int) -> list[Any]:
    """What a rank did at one step: the kind of each exchange that it began, and the (branch, block) of each tensor."""
    starts = [i for i, event in enumerate(of_rank.events) if isinstance(event, StepEvent)] + [len(of_rank.events)]
    did: list[Any] = []
    for event in of_rank.events[slice(*list(pairwise(starts))[step])]:
        if isinstance(event, TensorKey):
            did.append((event.branch, event.block))
        elif isinstance(event, ExchangeEvent) and not event.completed:
            did.append(event.kind)
    return did


# The log.


def test_the_exchange_log_is_numbered_without_gaps_and_complete(
    ranks: RankPool, tiny: Callable[..., Path], topology: str
) -> None:
    if topology == "pp1cfg1":
        assert serial(ranks, tiny(), (GUIDED,), "float32")[0].log == ()
        return
    for first, second in zip(*run_on(ranks, tiny(), topology, (GUIDED, UNGUIDED)), strict=True):
        numbers = [event.sequence for event in first.log + second.log]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all(event.completed for event in first.log + second.log)
        assert first.rank not in {peer for event in first.log for peer in event.peers}


def test_what_one_rank_logs_as_sent_its_peer_logs_as_received(ranks: RankPool, tiny: Callable[..., Path]) -> None:
    (runs,) = run_on(ranks, tiny(), "pp2cfg2", (BATCH,), "bfloat16")
    for sender in runs:
        for peer in range(4):
            sent, received = (
                [(event.shape, event.dtype) for event in log if event.kind == kind and event.peers == (other,)]
                for log, kind, other in ((sender.log, "send", peer), (runs[peer].log, "receive", sender.rank))
            )
            assert sent == received
        delivered, sent_to = ([e.peers for e in sender.log if e.kind == kind] for kind in ("delivered", "send"))
        assert delivered == sent_to
    hidden, latents = ((2, 8, 24), "torch.bfloat16"), ((2, 4, 2, 4, 4), "torch.float32")
    assert [(e.shape, e.dtype) for e in runs[0].log if e.kind in ("send", "receive")] == [hidden, latents] * 4
    assert [(e.shape, e.dtype) for e in runs[1].log if e.kind == "gather"] == [((2, 4, 2, 4, 4), "torch.bfloat16")] * 4


def send_misfits() -> list[tuple[str, int, bool]]:
    """What `Exchange` says to tensors that its peers do not expect, and what it had logged by then."""
    place = parse_topology("pp2cfg1").place(0)
    said = []
    for tensor in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
        exchange = Exchange(place, None, torch.device("cpu"))
        for call in (
            lambda x=exchange, t=tensor: x.send(t, (2,), torch.float32, 1),
            lambda x=exchange, t=tensor: x.gather_branches(t, (2,), torch.float32),
            lambda x=exchange, t=tensor: x.broadcast(t, (2,), torch.float32, 0),
        ):
            with pytest.raises(ValueError, match="but the peers expect") as refused:
                call()
            said.append((str(refused.value), len(exchange._sends), any(e.completed for e in exchange.log)))
    return said


def test_a_tensor_that_the_peers_do_not_expect_is_refused_before_the_call() -> None:
    """Without a process group: a call that was made would fail otherwise."""
    said = send_misfits()
    assert len(said) == 6
    for index, (message, pending, completed) in enumerate(said):
        assert ("[3] torch.float32" if index < 3 else "[2] torch.float64") in message
        assert "expect [2] torch.float32" in message
        assert (pending, completed) == (0, False)
