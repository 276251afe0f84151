"""Verdicts as JUnit cases: what holds passes, what is refuted fails, what was not shown is an error."""

from pathlib import Path

import pytest

from oracle.report.junit import Result, read_report, write_report
from oracle.report.verdicts import as_suite
from oracle.verdict.finding import Finding, Spot, Verdict
from oracle.verdict.matrix import Row

pytestmark = pytest.mark.cpu

HOLDS = Row("pp1cfg1", "", Verdict("used engine", (), 40), "used engine: holds at 40 keys")
FAILS = Row(
    "pp2cfg1",
    "teacache",
    Verdict(
        "cached",
        (Finding("provenance", "provenance", Spot(step=3, branch="cond"), "reused a residual of the uncond branch"),),
        44,
        hits=5,
        misses=7,
    ),
    "step 3, cond: reused a residual of the uncond branch",
)
UNSHOWN = Row(
    "pp2cfg2", "", Verdict("run", (Finding("coverage", "missing evidence", Spot(), "rank 3 hung"),), 0), "hung"
)


def test_a_claim_is_a_case_with_its_sentence_and_what_was_missing_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    write_report(file, [as_suite("demo", [HOLDS, FAILS, UNSHOWN], 12.5)])
    (suite,) = read_report(file)
    assert suite.time == 12.5
    holds, fails, unshown = suite.cases
    assert (holds.classname, holds.name, holds.result.kind) == ("demo.pp1cfg1", "used engine", "passed")
    assert (fails.classname, fails.name) == ("demo.pp2cfg1.teacache", "cached")
    assert fails.result == Result("failure", FAILS.sentence, "provenance", f"provenance: {FAILS.verdict.findings[0]}")
    assert dict(fails.properties) == {
        "oracle.topology": "pp2cfg1",
        "oracle.cache": "teacache",
        "oracle.keys": "44",
        "oracle.hits": "5",
        "oracle.misses": "7",
        "oracle.first_divergence": "step 3, cond",
    }
    assert (unshown.result.kind, unshown.result.message) == ("error", "hung")
