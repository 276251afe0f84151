"""A JUnit file in short, as lines for a terminal and as Markdown for a CI job's page."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oracle.evidence.revision import Revision
from oracle.report.junit import SEVERITY, Case, Suite, cases_of

WARNING = "oracle.warning"
"""The property of a test that would have failed, had the run not been told to warn only."""
SUBJECT = ("oracle.subject", "oracle.version", "oracle.revision", "oracle.dirty")
"""The properties that say whose run a test looked at, and of which source tree."""

SLOWEST = 5
_WORDS = {"passed": "passed", "skipped": "skipped", "failure": "failed", "error": "in error"}


@dataclass(frozen=True, slots=True)
class Summary:
    """`bad` are failures and errors, the errors last. `skipped` counts tests by reason. Seconds in `time`."""

    counts: dict[str, int]
    time: float
    bad: tuple[Case, ...]
    warned: tuple[Case, ...]
    retried: tuple[Case, ...]
    skipped: tuple[tuple[str, int], ...]
    slowest: tuple[Case, ...]

    @property
    def headline(self) -> str:
        tests = sum(self.counts.values())
        if not tests:
            return "no test was run: nothing was shown"
        told = ", ".join(f"{self.counts[kind]} {_WORDS[kind]}" for kind in SEVERITY if self.counts[kind])
        return f"{tests} test{'s' if tests > 1 else ''}: {told} in {self.time:.1f} s"


def summarise(suites: Sequence[Suite]) -> Summary:
    cases = cases_of(suites)
    reasons = Counter(case.result.line for case in cases if case.result.kind == "skipped")
    return Summary(
        counts={kind: sum(case.result.kind == kind for case in cases) for kind in SEVERITY},
        time=sum(suite.time for suite in suites),
        bad=tuple(case for kind in ("failure", "error") for case in cases if case.result.kind == kind),
        warned=tuple(case for case in cases if case.property(WARNING)),
        retried=tuple(case for case in cases if case.retries),
        skipped=tuple(reasons.most_common()),
        slowest=tuple(sorted(cases, key=lambda case: -case.time)[:SLOWEST]),
    )


def subjects_of(suites: Sequence[Suite]) -> tuple[Revision, ...]:
    """Whose runs the tests looked at, each once."""
    found: dict[Revision, None] = {}
    for case in cases_of(suites):
        name, version, revision, dirty = map(case.property, SUBJECT)
        if name is not None:
            found[Revision(name, version or "", revision, None if dirty is None else dirty == "true")] = None
    return tuple(found)


def text_lines(summary: Summary, subjects: Sequence[str] = ()) -> Iterator[str]:
    """`subjects`: a line on each, as `describe_revision` has it."""
    yield summary.headline
    for subject in subjects:
        yield f"subject  {subject}"
    for case in summary.bad:
        yield f"{case.result.kind:8} {case.identity}: {case.result.line}"
    for case in summary.warned:
        yield f"warning  {case.identity}: {case.property(WARNING)}"
    for case in summary.retried:
        yield f"retried  {case.identity}: {len(case.retries)} failed before: {case.retries[0].line}"
    for reason, count in summary.skipped:
        yield f"skipped  {count}: {reason}"
    for case in summary.slowest:
        yield f"slowest  {case.time:.2f} s {case.identity}"


def markdown_lines(summary: Summary, subjects: Sequence[str] = ()) -> Iterator[str]:
    yield f"### {summary.headline}"
    yield from _section("", [_plain(each) for each in subjects])
    yield from _section("Failures", [_item(case, case.result.line) for case in summary.bad])
    yield from _section("Warnings", [_item(case, case.property(WARNING) or "") for case in summary.warned])
    retried = [_item(each, f"{len(each.retries)} failed before: {each.retries[0].line}") for each in summary.retried]
    yield from _section("Retried", retried)
    yield from _section("Skipped", [f"{count}: {_plain(reason)}" for reason, count in summary.skipped])
    yield from _section("Slowest", [f"{case.time:.2f} s {_code(case.identity)}" for case in summary.slowest])


def _section(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield ""
        yield from [f"**{title}**", ""] if title else []
        yield from (f"- {item}" for item in items)


def _item(case: Case, says: str) -> str:
    kind = " (error)" if case.result.kind == "error" else ""
    return f"{_code(case.identity)}{kind}: {_plain(says)}"


def _code(text: str) -> str:
    """A code span, whatever backticks the text has."""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(text, quote=False))
