"""What may go on around a run, or be done another way in it, without changing a byte of it."""

from __future__ import annotations

import gc
import random
import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from oracle.faults.plant import HERE, around
from oracle.faults.scenario import LIVE, OTHER
from wanref import denoise
from wanref.caching.rule import RuleCache
from wanref.exchange import Exchange
from wanref.pipeline import WanReference
from wanref.stage import BlockStack

Planted = AbstractContextManager[None]


def _at_each_step(act: Any) -> Planted:
    def step(original: Any, *args: Any) -> Any:
        act()
        return original(*args)

    return around(denoise, "_run_step", step)


def slow_rank(rank: int, seconds: float) -> Planted:
    """One rank sleeps before each step."""
    return _at_each_step(lambda: time.sleep(seconds) if HERE.at(rank=rank) else None)


def slow_send(rank: int, seconds: float) -> Planted:
    """One rank sleeps before each send."""

    def send(original: Any, *args: Any) -> None:
        time.sleep(seconds if HERE.at(rank=rank) else 0)
        original(*args)

    return around(Exchange, "send", send)


def reseeded(seed: int) -> Planted:
    """Global random generators, which no request uses, are seeded again at each step."""

    def seed_all() -> None:
        random.seed(seed)
        torch.manual_seed(seed)

    return _at_each_step(seed_all)


def collected() -> Planted:
    """Garbage is collected at each step."""
    return _at_each_step(gc.collect)


def memory_churned(size: int) -> Planted:
    """Memory that the step will be given is full of NaN."""
    return _at_each_step(lambda: [torch.full((size,), torch.nan) for _ in range(8)])


def sends_waited_for() -> Planted:
    """Each send waits for its delivery, where nothing depends on its order: on ranks that do not receive in between."""

    def send(original: Any, exchange: Any, *args: Any) -> None:
        original(exchange, *args)
        exchange.drain()

    return around(Exchange, "send", send)


def copies() -> Planted:
    """Each block is given a copy of its input."""

    def run(original: Any, stack: Any, index: int, hidden: Any, *args: Any) -> Any:
        return original(stack, index, hidden.clone(), *args)

    return around(BlockStack, "run", run)


def received_copies() -> Planted:
    """What is received is copied to other memory."""
    return around(Exchange, "receive", lambda original, *args: original(*args).clone())


def second_observer() -> Planted:
    """An observer of the caller's own looks at every tensor."""
    seen: list[float] = []

    def look(event: Any) -> None:
        if hasattr(event, "tensor"):
            seen.append(float(event.tensor.float().sum()))

    def build(original: Any, engine: Any, *args: Any) -> None:
        original(engine, *args)
        engine.observer = look

    return around(WanReference, "__init__", build)


def second_engine() -> Planted:
    """Another engine of one rank, with a cache, runs in the same process in between."""
    running: list[bool] = []

    def generate(original: Any, engine: Any, *args: Any) -> Any:
        if not running:
            running.append(True)
            other = WanReference.from_pretrained(engine.checkpoint.path, cache=LIVE)
            other(OTHER)
        return original(engine, *args)

    return around(WanReference, "_generate", generate)


def branches_reversed() -> Planted:
    """All stages of a chain run uncond before cond."""
    return around(RuleCache, "order", lambda original, cache, step, branches: branches[::-1])
