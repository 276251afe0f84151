"""The terms of a cache's rule, from the options that a manifest has of it. Shares no code with the caches' own parser.

An option that changes no decision is passed over. Any other that is not known here is an error: by it the run may have
decided otherwise than the rule that would be replayed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from oracle.verdict.decisions import CAPS, FORCED_ENDS, SIGNS, DBCacheTerms, TeaCacheTerms

Terms = TeaCacheTerms | DBCacheTerms | frozenset[int]
"""A set of steps is a fixed schedule: those that reuse."""

DECIDING = {
    "teacache": {
        *("dialect", "signal", "coefficients", "coefficients_low", "threshold"),
        *("ranges", "sign", "first", "last", "cap"),
    },
    "cache-dit": {
        *("threshold", "max_warmup_steps", "max_cached_steps", "max_continuous_cached_steps"),
        *("mask", "mask_policy"),
    },
    "fixed": {"steps"},
}
"""The options by which each method decides. Cache-DiT's come again with `low_` in front, for the low-noise expert."""

PASSED_OVER = {"teacache": {"eps", "reuse"}, "cache-dit": {"fn", "bn", "taylorseer_order"}, "fixed": {"reuse"}}
"""Options that come before the recorded number (`eps`, `fn`), or behind the decision: what is then computed, and what
is made of the residuals that were kept."""

_DBCACHE = {
    "threshold": 0.08,
    "max_warmup_steps": 8,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": -1,
    "mask": "",
    "mask_policy": "dynamic",
}
_DBCACHE_LOW = {**_DBCACHE, "max_warmup_steps": 2, "max_cached_steps": 20}


class TermsError(ValueError):
    """Options that do not say by which rule a run decided."""


def terms_of(cache: Mapping[str, Any], expert: str, branch: str, stage: int) -> Terms:
    """The rule of one expert, branch and stage. cache: that of a manifest, its method one of DECIDING.

    Raises TermsError for options that are not there, not known, or not to be read.
    """
    method, options = cache["method"], cache.get("options")
    if not isinstance(options, Mapping):
        raise TermsError(
            f"{method} is named, but not by which options it decides, so that it cannot be replayed: record the "
            "cache's `options`, or name a method that is not replayed"
        )
    known = DECIDING[method] | PASSED_OVER[method]
    for name in options:
        if name not in known and not (method == "cache-dit" and name.removeprefix("low_") in known):
            raise TermsError(f"{method} may decide by its option {name!r}, which is not known here: it is not replayed")
    try:
        if method == "teacache":
            return _teacache(options, expert, stage)
        if method == "cache-dit":
            return _dbcache(options, expert)
        return _fixed(str(options["steps"]), branch, stage)
    except (LookupError, TypeError, ValueError, SyntaxError) as error:
        raise TermsError(
            f"the recorded options of {method} give no rule for the {expert}-noise expert on stage {stage}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _teacache(options: Mapping[str, Any], expert: str, stage: int) -> TeaCacheTerms:
    dialect = options.get("dialect", "teacache")
    sign = options.get("sign", SIGNS[dialect])
    signal = options.get("signal", next(own for name, own in FORCED_ENDS if name == dialect))
    first, last = FORCED_ENDS.get((dialect, signal), (1, 0))
    if sign not in ("signed", "abs", "clamp"):
        raise ValueError(f"sign={sign!r}")
    coefficients = _read(options["coefficients_low" if expert == "low" else "coefficients"])
    cap, ranges = _read(options.get("cap", CAPS.get(dialect))), _read(options.get("ranges"))
    calibrated = None if ranges is None else ranges[expert][stage]
    return TeaCacheTerms(
        coefficients=_coefficients(coefficients, signal, stage),
        threshold=float(options["threshold"]),
        sign=sign,
        ends=(_whole(options.get("first", first)), _whole(options.get("last", last))),
        cap=None if cap is None else float(cap),
        calibrated=None if calibrated is None else (float(calibrated[0]), float(calibrated[1])),
    )


def _coefficients(value: Any, signal: str, stage: int) -> tuple[float, ...]:
    """A published table's name, numbers joined by "/", or a list for each stage."""
    if isinstance(value, list):
        return tuple(map(float, value[stage]))
    # The tables are facts, not code: what is independent here is what is made of them.
    published = json.loads(files("wanref.caching").joinpath("published_coefficients.json").read_text("utf-8"))
    table = published[value][signal] if value in published else str(value).split("/")
    return tuple(map(float, table))


def _dbcache(options: Mapping[str, Any], expert: str) -> DBCacheTerms:
    prefix, defaults = ("low_", _DBCACHE_LOW) if expert == "low" else ("", _DBCACHE)
    own = {name: options.get(prefix + name, default) for name, default in defaults.items()}
    return DBCacheTerms(
        threshold=float(own["threshold"]),
        warmup=_whole(own["max_warmup_steps"]),
        most=_whole(own["max_cached_steps"]),
        most_in_a_row=_whole(own["max_continuous_cached_steps"]),
        mask=tuple(map(int, str(own["mask"]))),
        static={"dynamic": False, "static": True}[own["mask_policy"]],
    )


def _fixed(steps: str, branch: str, stage: int) -> frozenset[int]:
    """The steps of "0.cond=3-5+8/1.uncond=4" that are this stage's and branch's; "*" is every stage, or both."""
    reused: set[int] = set()
    for entry in steps.split("/"):
        target, listed = entry.split("=")
        at, of = target.split(".")
        if of in ("*", branch) and (at == "*" or int(at) == stage):
            for part in listed.split("+"):
                first, _, last = part.partition("-")
                reused.update(range(int(first), int(last or first) + 1))
    return frozenset(reused)


def _read(value: Any) -> Any:
    """A profile's lists and mappings, which a manifest has as their text."""
    return ast.literal_eval(value) if isinstance(value, str) and value.startswith(("[", "{", "None")) else value


def _whole(value: Any) -> int:
    """A count, which a profile may give as 2.0."""
    return int(float(value))
