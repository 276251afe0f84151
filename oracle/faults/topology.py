"""Ranks that do another part of the work, or hand on something else, than the grid says."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around, together
from oracle.faults.scenario import FIXED, cached, rerun, topology
from wanref import denoise
from wanref.exchange import Exchange
from wanref.pipeline import WanReference
from wanref.stage import Stage
from wanref.topology import BRANCHES, Place, Topology

Planted = AbstractContextManager[None]


def _reuse_does_not_send() -> Planted:
    def send(original: Any, exchange: Any, *args: Any) -> None:
        if not HERE.at(rank=0, step=3, branch="uncond"):
            original(exchange, *args)

    return around(Exchange, "send", send)


def _buffer_overwritten() -> Planted:
    def send(original: Any, exchange: Any, tensor: Any, *args: Any) -> None:
        original(exchange, tensor * 0.5 if HERE.at(rank=0, step=2, branch="cond") else tensor, *args)

    return around(Exchange, "send", send)


def _own_noise() -> Planted:
    def draw(original: Any, engine: Any, request: Any) -> Any:
        latents = original(engine, request)
        if engine.place.rank != 2:
            return latents
        return torch.randn(latents.shape, generator=torch.Generator().manual_seed(engine.place.rank))

    return around(WanReference, "_draw_latents", draw)


def _last_token_dropped() -> Planted:
    def receive(original: Any, exchange: Any, *args: Any) -> Any:
        tensor = original(exchange, *args)
        if tensor.ndim == 3 and HERE.at(rank=1):
            tensor[:, -1] = 0
        return tensor

    return around(Exchange, "receive", receive)


def _frames_padded() -> Planted:
    def rotary(original: Any, stage: Any, latents: Any) -> Any:
        table = original(stage, latents)
        return table.roll(1, dims=1) if stage.stack.first else table

    return around(Stage, "prepare_rotary", rotary)


def _stage_starts_early() -> Planted:
    def blocks(original: Any, grid: Any, stage: int, layers: int) -> range:
        own: range = original(grid, stage, layers)
        return range(own.start - 1, own.stop) if stage else own

    return around(Topology, "blocks", blocks)


def _stale_latents_returned() -> Planted:
    sent: list[Any] = []

    def send(original: Any, exchange: Any, tensor: Any, *args: Any) -> None:
        if tensor.ndim == 5:
            sent.append(tensor)
        original(exchange, sent[-2] if tensor.ndim == 5 and HERE.at(rank=3, step=3) else tensor, *args)

    return around(Exchange, "send", send)


def _silently_off() -> Planted:
    def branches(original: Any, place: Any, guided: bool) -> Any:
        return BRANCHES if guided else BRANCHES[:1]

    def combine(original: Any, job: Any, step: Any, predictions: Any, shape: Any) -> Any:
        cond, uncond = predictions["cond"], predictions["uncond"]
        return uncond + step.guidance_scale * (cond - uncond)

    return together(around(Place, "branches", branches), around(denoise, "_combine", combine))


FAULTS = (
    Fault(
        "topology-reuse-does-not-send",
        "topology",
        "T1: omni#6228, omni#6180, sgl#35623",
        "a stage that reuses does not send, and its peers wait for ever",
        rerun(cached("pp2cfg1", FIXED)),
        Points("exchange", rank=0, step=3, branch="uncond"),
        _reuse_does_not_send,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "topology-send-buffer-overwritten",
        "topology",
        "T3: omni#2322, vllm#52015",
        "activations change between the send and the delivery, once",
        topology("pp2cfg1"),
        Points("exchange", rank=1, step=2, branch="cond", block=2),
        _buffer_overwritten,
        caught_by="test_topologies.py",
    ),
    Fault(
        "topology-own-noise",
        "topology",
        "T4: omni#2176, omni#2252, omni#1729",
        "the uncond chain's first rank draws its own noise",
        topology("pp2cfg2"),
        Points("arithmetic", rank=2, step=0, branch="uncond", block="embed"),
        _own_noise,
        caught_by="test_topologies.py",
    ),
    Fault(
        "topology-last-token-dropped",
        "topology",
        "T6: VeOmni#1139, dsyn#1012, fv#1844",
        "the last token does not reach stage 1",
        topology("pp2cfg1"),
        Points("exchange", rank=1, step=0, branch="cond", block=2),
        _last_token_dropped,
        caught_by="test_topologies.py",
    ),
    Fault(
        "topology-positions-of-padded-frames",
        "topology",
        "T6: dfs#12567, sgl#23079",
        "stage 1 counts positions with a pad in front",
        topology("pp2cfg2"),
        Points("arithmetic", rank=1, step=0, branch="cond", block=3),
        _frames_padded,
        caught_by="test_topologies.py",
    ),
    Fault(
        "topology-stage-starts-a-block-early",
        "topology",
        "T7: sgl#16532",
        "a block at the seam runs on both stages",
        topology("pp2cfg1"),
        Points("exchange", rank=1, step=0, branch="cond", block=1),
        _stage_starts_early,
        caught_by="test_topology.py",
    ),
    Fault(
        "topology-stale-latents-returned",
        "topology",
        "T3: omni#2322",
        "the last stage returns the latents of the step before, once, on one chain",
        topology("pp2cfg2"),
        Points("exchange", rank=2, step=3, block="scheduler"),
        _stale_latents_returned,
        caught_by="test_sequences_on_ranks.py",
    ),
    Fault(
        "topology-cfg-silently-off",
        "topology",
        "V2: omni#3382, omni#4290, omni#4900",
        "CFG-parallel is asked for, and each rank runs both branches",
        topology("pp1cfg2"),
        Points("configuration", rank=1, step=0, branch="cond", block="embed"),
        _silently_off,
        caught_by="test_topologies.py",
    ),
)
