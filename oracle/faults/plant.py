"""How a fault gets into a running engine: one function is wrapped, in this process and for as long as the run takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

Wrapper = Callable[..., Any]
"""Called with the original and its arguments."""

Plant = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True)
class Here:
    """Where this rank is in its work. -1 and "" where it is nowhere. block: the global index of the one that runs."""

    request: int = -1
    rank: int = -1
    step: int = -1
    expert: str = ""
    branch: str = ""
    block: int = -1

    def at(self, **place: object) -> bool:
        """Whether every named coordinate is the given one."""
        return all(getattr(self, name) == value for name, value in place.items())


HERE = Here()


@contextmanager
def around(owner: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    """`owner.name`, a function or a method, goes through `wrapper` while the block runs."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def together(*plants: AbstractContextManager[None]) -> Iterator[None]:
    """Several at once, for a fault that takes more than one change."""
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(plant)
        yield


def beside(*plants: Plant) -> AbstractContextManager[None]:
    """The same of plants, so that `partial(beside, ...)` is one; the last one wraps those before it."""
    return together(*(plant() for plant in plants))


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def watching() -> Iterator[None]:
    """Keeps `HERE` up to date, so that a fault can act at one place alone."""
    from wanref import denoise
    from wanref.pipeline import WanReference
    from wanref.stage import BlockStack

    def request(original: Any, engine: Any, *args: Any) -> Any:
        HERE.rank, HERE.step, HERE.expert, HERE.branch = engine.place.rank, -1, "", ""
        HERE.request += 1
        return original(engine, *args)

    def step(original: Any, job: Any, at: Any, *args: Any) -> Any:
        HERE.step, HERE.expert, HERE.branch = at.index, at.expert, ""
        return original(job, at, *args)

    def stage(original: Any, job: Any, at: Any, branch: str, *args: Any) -> Any:
        HERE.branch = branch
        return original(job, at, branch, *args)

    def block(original: Any, stack: Any, index: int, *args: Any) -> Any:
        HERE.block = stack.first + index
        try:
            return original(stack, index, *args)
        finally:
            HERE.block = -1

    HERE.request = -1
    with (
        around(BlockStack, "run", block),
        around(WanReference, "_generate", request),
        around(denoise, "_run_step", step),
        around(denoise, "_run_stage", stage),
    ):
        yield
