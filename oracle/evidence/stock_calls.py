"""What hooks see of a stock pipeline's transformers: every call, and what ran in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from oracle.evidence.subjects import Array, Place
from wanref.checkpoint import Expert
from wanref.topology import BRANCHES, Branch

LEAVES = {"attn1": "attn1.to_q", "ffn": "ffn.net.0"}
"""Modules of a block, and what is called inside each exactly if it really computes."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of a transformer. ran: by module, the blocks in which it computed. attention: of block 0."""

    step: int
    expert: Expert
    branch: Branch
    first: Array | None = None
    last: Array | None = None
    prediction: Array | None = None
    attention: Array | None = None
    outputs: dict[int, Array] = field(default_factory=dict)
    ran: dict[str, set[int]] = field(default_factory=lambda: {module: set() for module in LEAVES})


class Seen:
    """What hooks have seen of one request, in order. Its methods make the hooks."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.calls: list[Call] = []
        self.steps: list[tuple[float, Expert]] = []
        self.combined: list[torch.Tensor] = []
        self.latents: list[torch.Tensor] = []

    def enters(self, expert: Expert) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            # The scheduler has stepped as often as there are steps behind; the first call of one is cond, as in Wan's
            # pipeline, and the second uncond.
            step = len(self.latents)
            if len(self.steps) == step:
                timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
                self.steps.append((float(timestep.flatten()[0]), expert))
            earlier = sum(call.step == step for call in self.calls)
            self.calls.append(Call(step, expert, BRANCHES[earlier]))

        return hook

    def first_block(self, module: Any, args: Any) -> None:
        if self.calls[-1].first is None:
            self.calls[-1].first = _kept(args[0])

    def attention(self, module: Any, args: Any, output: Any) -> None:
        self.calls[-1].attention = _kept(output)

    def block(self, index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            self.calls[-1].outputs[index] = _kept(output)

        return hook

    def leaf(self, index: int, module: str) -> Any:
        return lambda *_: self.calls[-1].ran[module].add(index)

    def end_of_blocks(self, module: Any, args: Any) -> None:
        self.calls[-1].last = _kept(args[0])

    def leaves(self, module: Any, args: Any, output: Any) -> None:
        self.calls[-1].prediction = _kept(output[0] if isinstance(output, tuple) else output.sample)

    def stepping(self, step: Any) -> Any:
        def watched(prediction: Any, *args: Any, **kwargs: Any) -> Any:
            self.combined.append(prediction.detach().clone())
            stepped = step(prediction, *args, **kwargs)
            self.latents.append((stepped[0] if isinstance(stepped, tuple) else stepped.prev_sample).detach().clone())
            return stepped

        return watched

    def work(self) -> dict[str, dict[Place, int]]:
        return {m: {(call.step, call.branch): len(call.ran[m]) for call in self.calls} for m in LEAVES}


def origins_of(call: Call, seen: Seen) -> Iterator[Call]:
    """The call that computed what this one reuses, known by its value: the attention that it took, or the difference
    that the skipped blocks made. None where the cache makes something new of it, as extrapolations do."""
    earlier = seen.calls[: seen.calls.index(call)]
    skipped = min(set(range(seen.layers)) - call.ran["ffn"], default=None)
    if skipped is None:
        took = call.attention
        yield from [each for each in earlier if 0 in each.ran["attn1"] and _same(each.attention, took)][-1:]
        return
    here = _skipped_by(call, skipped)
    for each in reversed(earlier):
        if len(each.ran["ffn"]) == seen.layers:
            there = _skipped_by(each, skipped)
            # To rounding: what was added to other hidden states does not come off them to the last bit.
            if there.shape == here.shape and np.abs(here - there).max() <= 1e-3 * np.abs(there).max():
                yield each
                return


def _skipped_by(call: Call, first: int) -> Array:
    before = call.first if first == 0 else call.outputs[first - 1]
    assert before is not None
    assert call.last is not None
    return call.last.astype(np.float32) - before.astype(np.float32)


def _kept(tensor: Any) -> Array:
    return np.asarray(tensor.detach().float().clone().numpy())


def _same(one: Array | None, other: Array | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)
