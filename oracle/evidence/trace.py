"""What a trace holds: the events of a run as plain records, and their form on disk. Needs neither torch nor NumPy.

A trace is a folder: `manifest.json`, one `rankN.events.jsonl` a rank, and at level `tensor` one
`requestRRR.rankN.stepSSSS.safetensors` for each step; `rankN.processP.incomplete.txt` says why a process stopped
recording. `trace.schema.json` beside this file describes all of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from wanref.observe import TensorKey

SCHEMA = 1
"""Version of the format. A reader refuses any other."""

Level = Literal["decisions", "digest", "stats", "tensor"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Each records what those before it do, and more."""

MANIFEST = "manifest.json"


class TraceError(ValueError):
    """A folder that is not a trace of this version, or a record that does not say what its kind must."""


def events_file(rank: int) -> str:
    return f"rank{rank}.events.jsonl"


def tensors_file(request: int, rank: int, step: int) -> str:
    return f"request{request:03d}.rank{rank}.step{step:04d}.safetensors"


def incomplete_file(rank: int, process: int) -> str:
    """Where a process that had to stop recording says so."""
    return f"rank{rank}.process{process}.incomplete.txt"


def tensor_name(key: TensorKey) -> str:
    """The name of a tensor in the file of its request, rank and step."""
    return f"{key.branch or 'both'}.{key.block}.{key.port}.{key.occurrence}"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request begins (`moment` begin; with everything that was resolved), or ends: done, aborted or failed."""

    request: int
    moment: str
    resolved: Mapping[str, Any] | None = None
    schedule: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step begins."""

    request: int
    step: int
    expert: str
    timestep: float
    sigma: float
    guidance_scale: float


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The value at a logical key. Statistics are None below level `stats`; they are over the finite elements.

    source: whether this rank `computed` it, `received` it, or had it from a cache (`reused`).
    """

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    digest: str
    source: str = "computed"
    rms: float | None = None
    absmax: float | None = None
    nan: int | None = None
    inf: int | None = None


@dataclass(frozen=True, slots=True)
class OriginRecord:
    """Where a reused residual was computed."""

    request: int
    step: int
    expert: str
    branch: str
    stage: int


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """What a cache decided for one call of a stage's blocks. `shadow` is the rule's own verdict where it was forced."""

    request: int
    step: int
    expert: str
    branch: str
    stage: int
    verdict: str
    reason: str
    shadow: str | None
    signal: float | None
    rescaled: float | None
    accumulated_before: float | None
    accumulated_after: float | None
    threshold: float | None
    computed_blocks: int
    origins: tuple[OriginRecord, ...] = ()

    @property
    def ruled(self) -> str:
        """What the rule said, whether or not it was overridden."""
        return self.shadow or self.verdict


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """A communication of this rank, before the call and, `completed`, after it."""

    sequence: int
    operation: str
    peers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    completed: bool


@dataclass(frozen=True, slots=True)
class StateRecord:
    """Digests of a cache's state at a request's `begin` or `end`, by expert and branch."""

    request: int
    moment: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An exception that ended the recording."""

    type: str
    message: str


Record: TypeAlias = (
    RequestRecord | StepRecord | TensorRecord | DecisionRecord | ExchangeRecord | StateRecord | ErrorRecord
)

KINDS: Mapping[str, type[Any]] = {
    "request": RequestRecord,
    "step": StepRecord,
    "tensor": TensorRecord,
    "decision": DecisionRecord,
    "exchange": ExchangeRecord,
    "state": StateRecord,
    "error": ErrorRecord,
}
_KIND_OF = {record: kind for kind, record in KINDS.items()}
_KEY_FIELDS = tuple(f.name for f in fields(TensorKey))
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("request", "step", "index", "stage", "occurrence", "sequence", "computed_blocks"), int),
    **dict.fromkeys(("expert", "verdict", "moment", "digest", "port", "dtype", "operation", "source"), str),
    "branch": str | None,
    "block": int | str,
    "shape": tuple,
    "peers": tuple,
    "schedule": tuple,
    "origins": tuple,
    "guidance_scale": int | float,
    "resolved": dict,
    "digests": dict,
}
_STEP_FIELDS = {"index", "timestep", "sigma", "expert", "guidance_scale"}
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(record: Record) -> str:
    """One line of JSON. Numbers that JSON has no word for are written as strings; what is None is left out."""
    plain: dict[str, Any] = {"kind": _KIND_OF[type(record)]}
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, TensorKey):
            plain.update((name, getattr(value, name)) for name in _KEY_FIELDS)
        elif f.name == "origins":
            plain["origins"] = [{g.name: getattr(origin, g.name) for g in fields(origin)} for origin in value]
        elif value is not None:
            plain[f.name] = _plain(value)
    return json.dumps(plain, separators=(",", ":"))


def from_line(line: str) -> Record:
    """The record of one line. Raises TraceError for anything else."""
    try:
        plain = json.loads(line)
        record: Record = _read(KINDS[plain.pop("kind")], plain)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"not an event: {type(error).__name__}: {error}: {line[:120]!r}") from error
    return record


def _read(kind: type[Any], plain: dict[str, Any]) -> Any:
    values = {name: _value(value) for name, value in plain.items()}
    _check(values)
    for step in values.get("schedule", ()):
        _check(step)
        missing = _STEP_FIELDS - step.keys()
        if missing:
            raise KeyError(f"a step of the schedule lacks {', '.join(sorted(missing))}")
    if kind is TensorRecord:
        values["branch"] = values.get("branch")
        values["key"] = TensorKey(**{name: values.pop(name) for name in _KEY_FIELDS})
    if kind is DecisionRecord:
        for origin in values.get("origins", ()):
            _check(origin)
        values["origins"] = tuple(OriginRecord(**origin) for origin in values.get("origins", ()))
        for f in fields(DecisionRecord):
            values.setdefault(f.name, None)
    return kind(**values)


def _check(values: Mapping[str, Any]) -> None:
    """What records are sorted and looked up by has its type, so that no reader stumbles over it later."""
    for name, value in values.items():
        allowed = _TYPES.get(name)
        if allowed is not None and (not isinstance(value, allowed) or isinstance(value, bool)):
            raise TypeError(f"{name} is {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
