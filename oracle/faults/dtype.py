"""Values that pass through another dtype than they should."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from oracle.faults.fault import Fault, Points
from oracle.faults.plant import HERE, around
from oracle.faults.scenario import FIXED, cached, topology, twin
from wanref import parts, pipeline
from wanref.caching.residual import ResidualStore
from wanref.exchange import Exchange
from wanref.stage import Stage

Planted = AbstractContextManager[None]


def _timestep_in_bfloat16() -> Planted:
    def prepare(original: Any, stage: Any, timestep: Any, *args: Any) -> Any:
        return original(stage, timestep.to(torch.bfloat16).to(timestep.dtype) if HERE.at(rank=1) else timestep, *args)

    return around(Stage, "prepare_step", prepare)


def _latents_in_bfloat16() -> Planted:
    def receive(original: Any, exchange: Any, *args: Any) -> Any:
        tensor = original(exchange, *args)
        return tensor.bfloat16().float() if HERE.at(rank=0, step=1) else tensor

    return around(Exchange, "receive", receive)


def _residual_in_bfloat16() -> Planted:
    def keep(original: Any, store: Any, where: Any, *tensors: Any) -> None:
        original(store, where, *tensors)
        if where.place.rank == 1:
            key = where.step.expert, where.branch
            store._kept[key] = tuple(replace(r, value=r.value.bfloat16().float()) for r in store._kept[key])

    return around(ResidualStore, "keep", keep)


def _prediction_in_float32() -> Planted:
    def project(original: Any, *args: Any) -> Any:
        prediction = original(*args)
        return prediction.float() if HERE.at(rank=1, step=2) else prediction

    return around(Stage, "project", project)


def _modulation_in_bfloat16() -> Planted:
    def load(original: Any, folder: Any, config: Any, blocks: Any, **options: Any) -> Any:
        model = original(folder, config, blocks, **options)
        for name, parameter in model.named_parameters():
            if blocks.start and name.endswith("scale_shift_table"):
                parameter.data = parameter.data.bfloat16()
        return model

    return around(parts, "load_transformer", load)


def _solver_in_bfloat16() -> Planted:
    def make(original: Any, *args: Any) -> Any:
        solver = original(*args)
        step = solver.step

        def rounded(prediction: Any, timestep: Any, latents: Any, **options: Any) -> Any:
            if HERE.at(rank=3, step=4):
                latents = latents.bfloat16().float()
            return step(prediction, timestep, latents, **options)

        solver.step = rounded
        return solver

    return around(pipeline, "make_solver", make)


FAULTS = (
    Fault(
        "dtype-timestep-in-bfloat16",
        "dtype",
        "D1: dsyn#562, dsyn#1025, mold#786",
        "one stage rounds the timestep to bfloat16 before it embeds it: 999 becomes 1000",
        topology("pp2cfg1"),
        Points("arithmetic", rank=1, step=0, branch="cond", block=3),
        _timestep_in_bfloat16,
        caught_by="test_topologies.py",
    ),
    Fault(
        "dtype-latents-in-bfloat16",
        "dtype",
        "D3: omni#3956",
        "latents travel in bfloat16 at one step",
        topology("pp2cfg1"),
        Points("exchange", rank=0, step=1, block="scheduler"),
        _latents_in_bfloat16,
        caught_by="test_topologies.py",
    ),
    Fault(
        "dtype-residual-in-bfloat16",
        "dtype",
        "D3: trt#11964",
        "one stage keeps its residual in bfloat16",
        twin(cached("pp2cfg1", FIXED)),
        Points("arithmetic", rank=1, step=2, branch="cond"),
        _residual_in_bfloat16,
        caught_by="test_caching_topologies.py",
    ),
    Fault(
        "dtype-prediction-in-float32",
        "dtype",
        "D3: omni#3956",
        "one rank of two gives its prediction in float32: the exchange refuses it, and both end",
        topology("pp1cfg2", dtype="bfloat16"),
        Points("missing evidence", rank=1, step=2, branch="uncond", block="project"),
        _prediction_in_float32,
        caught_by="test_topologies.py",
    ),
    Fault(
        "dtype-modulation-in-bfloat16",
        "dtype",
        "D1: dsyn#1025, mold#811",
        "one stage casts also the modulation tables, which diffusers keeps in float32",
        topology("pp2cfg1", dtype="bfloat16"),
        Points("arithmetic", rank=1, step=0, branch="cond", block=3),
        _modulation_in_bfloat16,
        caught_by="test_topologies.py",
    ),
    Fault(
        "dtype-solver-in-bfloat16",
        "dtype",
        "D3: omni#3956",
        "one rank's solver steps from rounded latents, once: the chains part",
        topology("pp2cfg2"),
        Points("arithmetic", rank=3, step=4, block="scheduler"),
        _solver_in_bfloat16,
        caught_by="test_caching_topologies.py",
    ),
)
