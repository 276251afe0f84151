"""Mounting an observer beside whatever observes already, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wanref.observe import Event, Observer

if TYPE_CHECKING:
    from wanref.pipeline import WanReference


@contextmanager
def observing(engine: WanReference, observer: Observer) -> Iterator[None]:
    """`observer` sees every event of the engine in here, behind one that is mounted already."""
    before = engine.observer

    def both(event: Event, /) -> None:
        if before is not None:
            before(event)
        observer(event)

    engine.observer = both
    try:
        yield
    finally:
        engine.observer = before


def synchronise(engine: WanReference) -> None:
    """Wait for the accelerator, if there is one: its work is only queued when a call returns."""
    if engine.device.type == "cuda":
        import torch

        torch.cuda.synchronize(engine.device)
