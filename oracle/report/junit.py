"""JUnit files as plain values, read and written whole. junitparser knows the XML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree.ElementTree import ParseError

import junitparser
from junitparser import xunit2

from oracle.evidence.writer import write_whole

Kind = Literal["passed", "skipped", "failure", "error"]
SEVERITY: tuple[Kind, ...] = ("passed", "skipped", "failure", "error")
"""From best to worst. `failure`: the test said no. `error`: it did not come to say anything."""

# Its types are of parts of it only: read as Any.
_parser: Any = junitparser
_xunit2: Any = xunit2

_FINAL: dict[Kind, Any] = {"error": _parser.Error, "failure": _parser.Failure, "skipped": _parser.Skipped}
_FLAKY: dict[Kind, Any] = {"error": _xunit2.FlakyError, "failure": _xunit2.FlakyFailure}
_RERUN: dict[Kind, Any] = {"error": _xunit2.RerunError, "failure": _xunit2.RerunFailure}
_KINDS: dict[Any, Kind] = {tag: kind for tags in (_FINAL, _FLAKY, _RERUN) for kind, tag in tags.items()}


class JUnitError(ValueError):
    """A file that is not there, or is not a JUnit file."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a test, or of one attempt at it. `message` is what to say of it, `text` all that is known."""

    kind: Kind = "passed"
    message: str = ""
    type: str = ""
    text: str = ""

    @property
    def line(self) -> str:
        """The first line that says something."""
        return next((line.strip() for line in f"{self.message}\n{self.text}".splitlines() if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Case:
    """A test. `retries` are its attempts that failed and are not its result; seconds in `time`."""

    classname: str
    name: str
    result: Result = Result()
    retries: tuple[Result, ...] = ()
    time: float = 0.0
    properties: tuple[tuple[str, str], ...] = ()
    file: str | None = None
    line: str | None = None
    out: str = field(default="", repr=False)
    err: str = field(default="", repr=False)

    @property
    def identity(self) -> str:
        return f"{self.classname}::{self.name}" if self.classname else self.name

    def property(self, name: str) -> str | None:
        return next((value for known, value in self.properties if known == name), None)


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that ran together. `timestamp` as its writer had it, in ISO 8601."""

    name: str
    cases: tuple[Case, ...]
    time: float = 0.0
    timestamp: str | None = None
    hostname: str | None = None
    properties: tuple[tuple[str, str], ...] = ()


class _TestCase(_xunit2.TestCase):  # type: ignore[misc]
    """With the attributes that pytest's xunit1 has, and GitLab shows."""

    file = _parser.Attr()
    line = _parser.Attr()


def worst(results: Sequence[Result]) -> Result:
    """All of them as one: as bad as the worst, with what each that did not pass has to say, the worst first."""
    told = sorted((each for each in results if each.kind != "passed"), key=lambda each: -SEVERITY.index(each.kind))
    if not told:
        return Result()
    message = "\n".join(dict.fromkeys(each.message for each in told if each.message))
    text = "\n\n".join(each.text for each in told if each.text)
    return Result(told[0].kind, message, told[0].type, text)


def cases_of(suites: Iterable[Suite]) -> tuple[Case, ...]:
    return tuple(case for suite in suites for case in suite.cases)


def read_report(path: Path) -> tuple[Suite, ...]:
    """Every suite that has tests, nested ones on one level. Raises JUnitError."""
    try:
        xml = _xunit2.JUnitXml.fromfile(str(path))
        return tuple(suite for each in xml for suite in _suites(each))
    except (OSError, ParseError, _parser.JUnitXmlError, ValueError) as error:
        raise JUnitError(f"file={str(path)!r} is not accepted: no JUnit file: {error}") from error


def write_report(path: Path, suites: Sequence[Suite]) -> None:
    """Whole or not at all."""
    xml = _xunit2.JUnitXml("tests")
    for suite in suites:
        xml.append(_suite_element(suite))
    xml.update_statistics()
    # The sum of all tests' seconds, as junitparser has it, is not how long a suite ran.
    for element, suite in zip(xml, suites, strict=True):
        element.time = round(suite.time, 3)
    xml.time = round(sum(suite.time for suite in suites), 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: xml.write(str(draft)))


def strict(suites: Iterable[Suite]) -> tuple[Suite, ...]:
    """For readers that hold to junit-10.xsd of Jenkins' xUnit plugin, which has no properties, file or line of a test:
    the properties become lines of its output, as `[[PROPERTY|name=value]]`."""

    def plain(case: Case) -> Case:
        lines = "".join(f"[[PROPERTY|{name}={value}]]\n" for name, value in case.properties)
        return replace(case, properties=(), file=None, line=None, out=lines + case.out)

    return tuple(replace(suite, cases=tuple(map(plain, suite.cases))) for suite in suites)


def _suites(element: Any) -> Iterator[Suite]:
    nested = [suite for each in element.testsuites() for suite in _suites(each)]
    cases = tuple(_case(_TestCase.fromelem(each)) for each in element.iterchildren(_xunit2.TestCase))
    if cases or not nested:
        about = element.time or 0.0, element.timestamp, element.hostname, _properties(element)
        yield Suite(element.name or "", cases, *about)
    yield from nested


def _case(element: Any) -> Case:
    results = [each for each in element if type(each) in _KINDS]
    finals = [_result(each) for each in results if not isinstance(each, _xunit2.InterimResult)]
    retries = [_result(each) for each in results if isinstance(each, _xunit2.InterimResult)]
    return Case(
        classname=element.classname or "",
        name=element.name or "",
        result=worst(finals),
        retries=tuple(retries),
        time=element.time or 0.0,
        properties=_properties(element),
        file=element.file,
        line=element.line,
        out=_text(element.child(_parser.SystemOut)),
        err=_text(element.child(_parser.SystemErr)),
    )


def _result(element: Any) -> Result:
    stack = _text(element.child(_xunit2.StackTrace)) if isinstance(element, _xunit2.InterimResult) else ""
    return Result(_KINDS[type(element)], element.message or "", element.type or "", stack or _text(element))


def _text(element: Any) -> str:
    return "" if element is None else element.text or ""


def _properties(element: Any) -> tuple[tuple[str, str], ...]:
    held = element.child(_parser.Properties)
    return () if held is None else tuple((each.name or "", each.value or "") for each in held)


def _suite_element(suite: Suite) -> Any:
    element = _xunit2.TestSuite(suite.name)
    _set(element, timestamp=suite.timestamp, hostname=suite.hostname)
    _append_properties(element, suite.properties)
    for case in suite.cases:
        element.append(_case_element(case))
    return element


def _case_element(case: Case) -> Any:
    element = _TestCase(case.name, case.classname, round(case.time, 3))
    _set(element, file=case.file, line=case.line)
    _append_properties(element, case.properties)
    if case.result.kind != "passed":
        element.append(_result_element(_FINAL[case.result.kind], case.result))
    tags = _RERUN if case.result.kind in ("failure", "error") else _FLAKY
    for retry in case.retries:
        element.append(_result_element(tags[retry.kind], retry))
    for tag, text in ((_parser.SystemOut, case.out), (_parser.SystemErr, case.err)):
        if text:
            element.append(tag(text))
    return element


def _result_element(tag: Any, result: Result) -> Any:
    element = tag(result.message, result.type)
    if not issubclass(tag, _xunit2.InterimResult):
        element.text = result.text
        return element
    element.type = result.type or result.kind  # surefire's schema wants one
    element.stack_trace = result.text
    return element


def _set(element: Any, **attributes: str | None) -> None:
    for name, value in attributes.items():
        if value is not None:
            setattr(element, name, value)


def _append_properties(element: Any, properties: Iterable[tuple[str, str]]) -> None:
    held = _parser.Properties()
    for name, value in properties:
        held.add_property(_parser.Property(name, value))
    if properties:
        element.append(held)
