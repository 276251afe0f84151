"""Verdicts as the test cases of a JUnit file: one a claim, so that CI shows where a matrix fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from oracle.report.junit import Case, Result, Suite
from oracle.verdict.matrix import Row


def as_suite(name: str, rows: Sequence[Row], seconds: float) -> Suite:
    """Claims of one verification. What could not be shown is an error: it is neither held nor refuted."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return Suite(name, tuple(_case(name, row) for row in rows), seconds, began)


def _case(name: str, row: Row) -> Case:
    verdict = row.verdict
    result = Result()
    if not verdict.holds:
        missing = verdict.first is not None and verdict.first.cause == "missing evidence"
        text = "\n".join(f"{finding.layer}: {finding}" for finding in verdict.findings)
        result = Result("error" if missing else "failure", row.sentence, verdict.layer or "", text)
    return Case(
        classname=".".join(filter(None, (name, row.topology, row.cache))),
        name=verdict.contract,
        result=result,
        properties=tuple(_properties(row)),
    )


def _properties(row: Row) -> Iterator[tuple[str, str]]:
    verdict = row.verdict
    yield "oracle.topology", row.topology
    yield "oracle.cache", row.cache or "none"
    yield "oracle.keys", str(verdict.compared)
    yield "oracle.hits", str(verdict.hits)
    yield "oracle.misses", str(verdict.misses)
    if verdict.first is not None:
        yield "oracle.first_divergence", str(verdict.first.spot)
