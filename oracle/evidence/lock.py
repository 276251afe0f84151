"""Locks: the candidate is given the reference's values as it goes, so that what still differs arises right there.

Coarse to fine: `step` gives it the reference's latents after each step, `block` also every block's input, `module` also
the output of each attention and feed-forward, of what embeds the timestep, the predictions and what guidance makes of
them: under it, every value that a rank hands on. A value is recorded first, as the candidate made it, then replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from oracle.evidence.identity import identity_of
from oracle.evidence.probe import Probe
from oracle.evidence.reader import Trace
from oracle.evidence.trace import TraceError
from wanref import WanReference
from wanref.observe import RequestEvent, StepEvent, TensorEvent, TensorKey

LockName = Literal["free", "step", "block", "module"]
LOCKS: tuple[LockName, ...] = get_args(LockName)

MODULES = {"attn1": "attn1.to_out.0", "attn2": "attn2.to_out.0", "ffn": "ffn"}
"""Ports inside a block, and the module of diffusers' block whose output each is."""
TIME_MODULES = {
    "time_embedder": "condition_embedder.time_embedder",
    "time_proj": "condition_embedder.time_proj",
}
"""Ports of what each stage embeds the timestep with, and their modules in diffusers' transformer: keys of block `embed`
that have no branch. A slip there is small in each block, and large where it is made."""


@dataclass(frozen=True, slots=True)
class Lock:
    """Called with each tensor after it has been recorded; what it writes into the tensor, the engine goes on with.

    name: one of LOCKS. of: identity of the trace whose values it gives. The manifest says both.
    """

    name: str
    of: str
    write: Callable[[TensorKey, torch.Tensor], None]

    def __call__(self, key: TensorKey, tensor: torch.Tensor, /) -> None:
        self.write(key, tensor)


def make_lock(name: LockName, reference: Trace, owners: Mapping[TensorKey, int]) -> Lock | None:
    """The lock of that name. `owners`: for each key of the reference, the rank whose file holds its value.

    A value in a wider dtype is rounded to the candidate's. A block that only the candidate ran has no value there and
    stays as it is; the comparison says so. The lock raises TraceError where the reference has no latents: it would lock
    nothing.
    """
    if name == "free":
        return None

    def write(key: TensorKey, tensor: torch.Tensor) -> None:
        is_latents = key.block == "scheduler"
        is_hidden = key.block == "embed" or (isinstance(key.block, int) and key.port == "output")
        is_module = key.port in {**MODULES, **TIME_MODULES} or key.block in ("project", "combine")
        if is_latents or (is_hidden and name != "step") or (is_module and name == "module"):
            if key in owners:
                value = torch.from_numpy(reference.array(key, owners[key]).copy())
                tensor.copy_(value.to(tensor.dtype))
            elif is_latents:
                raise TraceError(f"{reference.folder} has no latents at {key}: the {name} lock would lock nothing.")

    return Lock(name, identity_of(reference), write)


@contextmanager
def module_ports(engine: WanReference, probe: Probe) -> Iterator[None]:
    """Record the outputs of MODULES and TIME_MODULES, too, by forward hooks, for as long as the block lasts."""
    last: list[TensorKey] = []
    seen_by = engine.observer

    def observe(event: Any, /) -> None:
        if isinstance(event, TensorEvent):
            last[:] = [event.key]
        elif isinstance(event, StepEvent):
            last[:] = [TensorKey(event.request, event.step.index, event.step.expert, None, "embed")]
        elif isinstance(event, RequestEvent):
            last.clear()  # between requests a cache may embed timesteps, to plan by them: that is of no step
        if seen_by is not None:
            seen_by(event)

    def hook_for(block: int | str, port: str) -> Callable[[torch.nn.Module, Any, torch.Tensor], None]:
        def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if not last:
                return
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
    ] + [
        stage.transformer.get_submodule(path).register_forward_hook(hook_for("embed", port))
        for stage in engine.stages.values()
        for port, path in TIME_MODULES.items()
    ]
    engine.observer = observe
    try:
        yield
    finally:
        engine.observer = seen_by
        for handle in handles:
            handle.remove()
