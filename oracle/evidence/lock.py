"""Locks: the candidate is given the reference's values as it goes, so that what still differs arises right there.

Coarse to fine: `step` gives it the reference's latents after each step, `block` also every block's input, `module` also
the output of each attention and feed-forward. A value is recorded first, as the candidate made it, and then replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, get_args

import torch

from oracle.evidence.probe import Lock, Probe
from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from wanref import WanReference
from wanref.observe import TensorEvent, TensorKey

LockName = Literal["free", "step", "block", "module"]
LOCKS: tuple[LockName, ...] = get_args(LockName)

MODULES = {"attn1": "attn1.to_out.0", "attn2": "attn2.to_out.0", "ffn": "ffn"}
"""Ports inside a block, and the module of diffusers' block whose output each is."""


def make_lock(name: LockName, reference: Trace, owners: Mapping[TensorKey, int]) -> Lock | None:
    """The lock of that name. `owners`: for each key of the reference, the rank whose file holds its value.

    A block that only the candidate ran has no value there and stays as it is; the comparison says so. The lock raises
    TraceError where the reference has no latents: it would lock nothing.
    """
    if name == "free":
        return None

    def lock(key: TensorKey, tensor: torch.Tensor) -> None:
        is_latents = key.block == "scheduler"
        is_hidden = key.block == "embed" or (isinstance(key.block, int) and key.port == "output")
        is_module = key.port in MODULES
        if is_latents or (is_hidden and name != "step") or (is_module and name == "module"):
            if key in owners:
                value = torch.from_numpy(reference.array(key, owners[key]).copy())
                tensor.copy_(value.to(tensor.dtype))
            elif is_latents:
                raise TraceError(f"{reference.folder} has no latents at {key}: the {name} lock would lock nothing.")

    return lock


@contextmanager
def module_ports(engine: WanReference, probe: Probe) -> Iterator[None]:
    """Record the outputs of the modules inside each block, too, by forward hooks, for as long as the block lasts."""
    last: list[TensorKey] = []
    seen_by = engine.observer

    def observe(event: Any, /) -> None:
        if isinstance(event, TensorEvent):
            last[:] = [event.key]
        if seen_by is not None:
            seen_by(event)

    def hook_for(block: int, port: str) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            # The stage's input has been seen just before its first block: step and branch are its own.
            key = replace(last[0], block=block, port=port)
            probe.tensor(key, output)
            if probe.lock is not None:
                probe.lock(key, output)

        return hook

    handles = [
        block.get_submodule(path).register_forward_hook(hook_for(index, port))
        for stage in engine.stages.values()
        for index, block in enumerate(stage.stack.blocks, stage.stack.first)
        for port, path in MODULES.items()
    ]
    engine.observer = observe
    try:
        yield
    finally:
        engine.observer = seen_by
        for handle in handles:
            handle.remove()
