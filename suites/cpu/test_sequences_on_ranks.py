"""Contract 4 on ranks: aborts and refusals that start on one rank are everybody's, and the engine goes on as fresh."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oracle.evidence.ranks import RankPool
from suites.sequence import BASE, REQUESTS, Result, fresh
from suites.support import births, load_engine, observed, settled
from wanref.denoise import RequestAborted
from wanref.observe import Event, ExchangeEvent
from wanref.pipeline import WanReference
from wanref.request import Request

pytestmark = pytest.mark.cpu


def sequence_on_ranks(folder: Path) -> dict[str, Any]:
    """Mishaps that start on one rank, each followed by a request."""
    engine = load_engine(folder, "pp2cfg2")
    rank = engine.place.rank
    unguided = replace(BASE, guidance_scale=1)
    said: dict[str, Any] = {"fresh": observed(engine, BASE).result}
    engine.observer = None
    for name, request, aborter in (("rank 0", BASE, 0), ("rank 3", BASE, 3), ("idle rank 2", unguided, 2)):
        with births() as born:
            said[f"abort on {name}"] = aborted_step(engine, request, rank == aborter)
            engine.observer = None
            said[f"tensors after abort on {name}"] = settled(born)
        said[f"sends after abort on {name}"] = len(engine.exchange._sends)
        said[f"after abort on {name}"] = observed(engine, REQUESTS[9]).result
        engine.observer = None
    said["refusal"] = refusal(engine, replace(BASE, height=40) if rank == 2 else BASE)
    said["after refusal"] = observed(engine, REQUESTS[2]).result
    said["different"] = refusal(engine, replace(BASE, seed=8) if rank == 1 else BASE)
    said["after different"] = observed(engine, REQUESTS[12]).result
    said["again"] = observed(engine, BASE).result
    return said


def aborted_step(engine: WanReference, request: Request, is_aborter: bool) -> int | None:
    """The step before which this rank stopped. The aborter asks for it after two boundaries were agreed on."""
    agreed: list[Event] = []

    def observer(event: Event) -> None:
        if isinstance(event, ExchangeEvent) and event.kind == "agree" and event.completed:
            agreed.append(event)
            if is_aborter and len(agreed) == 2:
                engine.abort()

    engine.observer = observer
    try:
        engine(request)
    except RequestAborted as aborted:
        return aborted.step
    return None


def refusal(engine: WanReference, request: Request) -> str:
    try:
        engine(request)
    except ValueError as error:
        return str(error)
    return "not refused"


def test_a_mishap_on_one_rank_is_everybodys_and_the_next_request_is_as_fresh(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    folder = tiny(layout="dual")
    by_rank = ranks.run(4, sequence_on_ranks, folder)
    for rank, said in enumerate(by_rank):
        for name in ("rank 0", "rank 3", "idle rank 2"):
            assert said[f"abort on {name}"] == 2, (rank, name)
            assert said[f"tensors after abort on {name}"] == [], (rank, name)
            assert said[f"sends after abort on {name}"] == 0, (rank, name)
            check_fresh(said[f"after abort on {name}"], folder, REQUESTS[9], rank)
        check_fresh(said["after refusal"], folder, REQUESTS[2], rank)
        check_fresh(said["after different"], folder, REQUESTS[12], rank)
        assert said["again"] == said["fresh"]
        check_fresh(said["again"], folder, BASE, rank)
        assert "height=40 is not a multiple" in said["refusal"]
        assert said["refusal"].startswith("rank 2 refuses") == (rank != 2)
        assert said["different"] == "ranks 0 and 1 were given different requests: give every rank the same."


def check_fresh(ran: Result, folder: Path, request: Request, rank: int) -> None:
    latents, video = fresh(folder, request)
    assert ran == (latents, video if rank == 1 else None), f"rank {rank}: {request}"
