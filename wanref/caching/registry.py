"""From a `CacheSpec` to the cache of one rank, checked before any work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.resources import files
from typing import Any, get_args

from wanref.caching.base import BlockCache
from wanref.caching.error import CacheError
from wanref.caching.spec import CacheSpec, Options, check_method
from wanref.checkpoint import Checkpoint, Expert
from wanref.topology import Topology


def build_cache(spec: CacheSpec, checkpoint: Checkpoint, topology: Topology) -> BlockCache:
    """The cache for one rank. Raises CacheError for a cache or option that is not known, missing, or not honoured."""
    return _BUILDERS[check_method(spec.method)](spec, checkpoint, topology)


def _teacache(spec: CacheSpec, checkpoint: Checkpoint, topology: Topology) -> BlockCache:
    from wanref.caching.rule import RuleCache
    from wanref.caching.teacache import DIALECTS, Signal, SignPolicy, TeaCache, TeaCacheOptions

    known = ("dialect", "signal", "threshold", "ranges", "reuse", "sign", "eps", "first", "last", "cap")
    names = {
        expert: "coefficients_low" if expert == "low" and checkpoint.has_boundary else "coefficients"
        for expert in checkpoint.experts
    }
    options = _only(spec, (*known, *names.values()))
    dialect = DIALECTS[_choice(spec, "dialect", tuple(DIALECTS), "teacache")]
    signal = _choice(spec, "signal", get_args(Signal), next(iter(dialect.forced)))
    if signal not in dialect.forced and "first" not in options:
        raise CacheError(
            f"teacache: signal={signal!r} is not this dialect's ({', '.join(dialect.forced)}): say first= and last=."
        )
    first, last = dialect.forced.get(signal, (1, 0))
    tables: dict[tuple[int, Expert], TeaCacheOptions] = {}
    for expert, name in names.items():
        if name not in options:
            continue
        for stage in range(topology.pp):
            tables[stage, expert] = TeaCacheOptions(
                signal=signal,
                coefficients=_coefficients(options[name], signal, stage),
                threshold=_number(spec, "threshold", float),
                eps=_number(spec, "eps", float, dialect.eps),
                sign=_choice(spec, "sign", get_args(SignPolicy), dialect.sign),
                first=_number(spec, "first", int, first),
                last=_number(spec, "last", int, last),
                cap=_number(spec, "cap", float, dialect.cap),
                input_range=_range(options.get("ranges"), stage, expert),
            )
    missing = sorted({expert for expert in checkpoint.experts if (0, expert) not in tables})
    if missing:
        raise CacheError(
            f"teacache: no coefficients for the {' and '.join(missing)}-noise expert: each expert needs its own "
            f"({'=, '.join(names.values())}=), or load a profile that has them. There is no default."
        )
    return RuleCache(TeaCache(tables), _choice(spec, "reuse", ("plain", "linear"), "plain"), spec.forced)


def _fixed(spec: CacheSpec, checkpoint: Checkpoint, topology: Topology) -> BlockCache:
    from wanref.caching.fixed import FixedSchedule, parse_reuse_steps
    from wanref.caching.rule import RuleCache

    options = _only(spec, ("steps", "reuse"))
    if "steps" not in options:
        raise CacheError("fixed: steps= is missing: give STAGE.BRANCH=STEPS, for instance steps=*.*=3+5.")
    steps = parse_reuse_steps(str(options["steps"]), topology.pp)
    return RuleCache(FixedSchedule(steps), _choice(spec, "reuse", ("plain", "linear"), "plain"), spec.forced)


def _cache_dit(spec: CacheSpec, checkpoint: Checkpoint, topology: Topology) -> BlockCache:
    from wanref.caching.cache_dit import CacheDiT, CacheDiTOptions, check_options

    names = tuple(field.name for field in fields(CacheDiTOptions))
    prefixes = {expert: "low_" if expert == "low" else "" for expert in checkpoint.experts}
    _only(spec, tuple(prefix + name for prefix in prefixes.values() for name in names))
    built: dict[Expert, CacheDiTOptions] = {}
    smallest = len(topology.blocks(topology.pp - 1, checkpoint.transformer["num_layers"]))
    for expert in checkpoint.experts:
        # What engines set for the second expert: its own steps are few, and the first's warm-up would eat them.
        defaults = CacheDiTOptions() if expert == "high" else CacheDiTOptions(max_warmup_steps=2, max_cached_steps=20)
        values: dict[str, Any] = {}
        for name in names:
            default = getattr(defaults, name)
            own = prefixes[expert] + name
            if isinstance(default, str):
                values[name] = str(spec.options.get(own, default))
            else:
                values[name] = _number(spec, own, type(default), default)
        built[expert] = CacheDiTOptions(**values)
        check_options(built[expert], expert, smallest)
    return CacheDiT(built, spec.forced)


_BUILDERS: Mapping[str, Callable[[CacheSpec, Checkpoint, Topology], BlockCache]] = {
    "teacache": _teacache,
    "fixed": _fixed,
    "cache-dit": _cache_dit,
}


def _only(spec: CacheSpec, known: tuple[str, ...]) -> Options:
    unknown = sorted(spec.options.keys() - set(known))
    if unknown:
        raise CacheError(f"{spec.method}: option {unknown[0]!r} is not known here. Known: {', '.join(known)}.")
    return spec.options


def _choice(spec: CacheSpec, name: str, accepted: tuple[str, ...], default: str) -> Any:
    value = spec.options.get(name, default)
    if value not in accepted:
        raise CacheError(f"{spec.method}: {name}={value!r} is not accepted: give one of {', '.join(accepted)}.")
    return value


def _number(spec: CacheSpec, name: str, kind: type, default: Any = ...) -> Any:
    value = spec.options.get(name, default)
    if value is ...:
        raise CacheError(f"{spec.method}: {name}= is missing.")
    if value is None:
        return None
    try:
        number = kind(value)
        if kind is int and number != float(value):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise CacheError(f"{spec.method}: {name}={value!r} is not {kind.__name__}.") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise CacheError(f"{spec.method}: {name}={value!r} is not accepted: give a finite number.")
    return number


def _coefficients(value: Any, signal: str, stage: int) -> tuple[float, ...]:
    """A published table's name, numbers joined by "/", or (from a profile) a list for each stage."""
    if isinstance(value, list):
        return _finite("coefficients", _of_stage("coefficients", value, stage))
    published = json.loads(files("wanref.caching").joinpath("published_coefficients.json").read_text())
    if value in published and value != "_source":
        if signal not in published[value]:
            raise CacheError(f"teacache: coefficients={value!r} are published for {', '.join(published[value])} alone.")
        return tuple(published[value][signal])
    try:
        numbers = tuple(float(part) for part in str(value).split("/"))
    except ValueError:
        names = ", ".join(name for name in published if name != "_source")
        raise CacheError(
            f"teacache: coefficients={value!r} is neither a published table ({names}) nor numbers joined by '/'."
        ) from None
    return _finite("coefficients", numbers)


def _range(value: Any, stage: int, expert: Expert) -> tuple[float, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or expert not in value:
        raise CacheError(f"teacache: ranges={value!r} is not accepted: a profile gives one, by expert and stage.")
    bounds = _finite("ranges", _of_stage("ranges", value[expert], stage))
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise CacheError(f"teacache: ranges: {list(bounds)} is not the lower and the upper end of a range.")
    return bounds[0], bounds[1]


def _of_stage(name: str, value: Any, stage: int) -> Any:
    if not isinstance(value, list) or stage >= len(value):
        raise CacheError(f"teacache: {name}={value!r} is not a list with an entry for stage {stage}.")
    return value[stage]


def _finite(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    ):
        raise CacheError(f"teacache: {name}: {values!r} is not a list of finite numbers.")
    return tuple(map(float, values))
