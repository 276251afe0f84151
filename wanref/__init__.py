"""wanref: Wan 2.1 / 2.2 video diffusion, run the plainest correct way.

Names are imported when they are first used, so that `import wanref` does not import torch and diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wanref.checkpoint import Checkpoint, CheckpointError, open_checkpoint
    from wanref.denoise import RequestAborted
    from wanref.liveness import RankFailure
    from wanref.observe import ExchangeEvent, Observer, RequestEvent, StepEvent, TensorEvent, TensorKey
    from wanref.output import Output
    from wanref.pipeline import WanReference
    from wanref.request import EngineDefaults, Request, ResolvedRequest
    from wanref.resolver import resolve
    from wanref.schedule import Schedule, Step, build_schedule, make_solver
    from wanref.topology import Topology, parse_topology

_HOMES = {
    "checkpoint": ("Checkpoint", "CheckpointError", "open_checkpoint"),
    "denoise": ("RequestAborted",),
    "liveness": ("RankFailure",),
    "observe": ("ExchangeEvent", "Observer", "RequestEvent", "StepEvent", "TensorEvent", "TensorKey"),
    "output": ("Output",),
    "pipeline": ("WanReference",),
    "request": ("EngineDefaults", "Request", "ResolvedRequest"),
    "resolver": ("resolve",),
    "schedule": ("Schedule", "Step", "build_schedule", "make_solver"),
    "topology": ("Topology", "parse_topology"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "EngineDefaults",
    "ExchangeEvent",
    "Observer",
    "Output",
    "RankFailure",
    "Request",
    "RequestAborted",
    "RequestEvent",
    "ResolvedRequest",
    "Schedule",
    "Step",
    "StepEvent",
    "TensorEvent",
    "TensorKey",
    "Topology",
    "WanReference",
    "build_schedule",
    "make_solver",
    "open_checkpoint",
    "parse_topology",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'wanref' has no attribute {name!r}")
    value = getattr(import_module(f"wanref.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
