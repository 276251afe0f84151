"""oracle: proves that a cached or parallel run is the run that was asked for, or shows the first place where it is not.

Names are imported when they are first used. Reading and comparing traces imports neither torch nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oracle.evidence.reader import Trace, open_trace
    from oracle.verdict.compare import compare
    from oracle.verdict.finding import Finding, Verdict
    from oracle.verdict.runs import compare_runs

_HOME_OF = {
    "Finding": "verdict.finding",
    "Trace": "evidence.reader",
    "Verdict": "verdict.finding",
    "compare": "verdict.compare",
    "compare_runs": "verdict.runs",
    "open_trace": "evidence.reader",
}

__all__ = ["Finding", "Trace", "Verdict", "compare", "compare_runs", "open_trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'oracle' has no attribute {name!r}")
    value = getattr(import_module(f"oracle.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
