"""Which failures are new, gone or the same between two JUnit files: a test is the same by its class, name and
parameters, its failure by its message without what changes from run to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from oracle.report.junit import Case, Result, Suite, cases_of, worst
from oracle.report.volatile import stable

Change = Literal["new", "changed", "same", "gone"]
"""changed: it failed before, and now says something else. That may be another fault, so it counts as new."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One test's failure. `says` is what it says, or said where it is gone; `note`, what it was before or became."""

    change: Change
    identity: str
    says: str
    note: str = ""

    @property
    def is_new(self) -> bool:
        return self.change in ("new", "changed")


def diff_reports(base: Sequence[Suite], head: Sequence[Suite]) -> tuple[Failure, ...]:
    """Every failure and error of either, in the order new, changed, same, gone."""
    was, now = _results(base), _results(head)
    found = [each for identity in now | was for each in _compare(identity, was.get(identity), now.get(identity))]
    order = ("new", "changed", "same", "gone")
    return tuple(sorted(found, key=lambda each: order.index(each.change)))


def _results(suites: Sequence[Suite]) -> dict[str, Result]:
    cases: dict[str, list[Case]] = {}
    for case in cases_of(suites):
        cases.setdefault(case.identity, []).append(case)
    return {identity: worst([each.result for each in same]) for identity, same in cases.items()}


def _compare(identity: str, was: Result | None, now: Result | None) -> Iterator[Failure]:
    failed, fails = _bad(was), _bad(now)
    if fails is None:
        if failed is not None:
            became = "was not run" if now is None else f"was skipped: {now.line}" if now.kind == "skipped" else "passes"
            yield Failure("gone", identity, failed.line, became)
    elif failed is None:
        before = "was not run" if was is None else "was skipped" if was.kind == "skipped" else "passed"
        yield Failure("new", identity, fails.line, f"{before} before")
    elif (failed.kind, _message(failed)) == (fails.kind, _message(fails)):
        yield Failure("same", identity, fails.line)
    else:
        yield Failure("changed", identity, f"{fails.kind}: {fails.line}", f"before: {failed.kind}: {failed.line}")


def _bad(result: Result | None) -> Result | None:
    return result if result is not None and result.kind in ("failure", "error") else None


def _message(result: Result) -> str:
    return stable(result.message or result.line)
