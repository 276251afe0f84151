"""Several JUnit files of one run as one: of ranks, of workers, and of repeated attempts.

A test that several ranks ran becomes one case, as bad as the worst of them. Files of one rank, or of none, that have
the same test are attempts at it: the last one decides, and those that failed are kept as surefire keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from oracle.report.junit import Case, JUnitError, Result, Suite, cases_of, worst
from oracle.report.volatile import stable

RANK = "oracle.rank"
"""The property of its tests that says which rank a file is of, where its name does not: `junit-rank3.xml`."""

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)

Key = tuple[str, str, str]
"""(suite, classname, name)."""
Attempt = tuple[Case, ...]
"""What one file has of one test: pytest writes a second case where the teardown of a failed test fails, too."""


def merge_reports(reports: Mapping[Path, Sequence[Suite]], ranks: int | None = None) -> tuple[Suite, ...]:
    """One report of all files, by path. `ranks`: how many there were, if that is known: of a rank that left no file,
    every test lacks its result, and so does every test that a rank did not report.

    Raises JUnitError for ranks beyond `ranks`, or a test that is in files of ranks and in files of none.
    """
    of_file = {path: _rank_of(path, suites) for path, suites in reports.items()}
    found: dict[Key, dict[int | None, list[Attempt]]] = {}
    for path in _in_turn(reports):
        for key, attempt in _attempts(reports[path]).items():
            found.setdefault(key, {}).setdefault(of_file[path], []).append(attempt)
    seen = sorted({rank for rank in of_file.values() if rank is not None})
    if ranks is not None and (not seen or seen[-1] >= ranks):
        told = f"tell of {ranks_words(seen)}" if seen else "name no rank, as junit-rank0.xml does"
        raise JUnitError(f"ranks={ranks} is not accepted: the files {told}.")
    expected = seen if ranks is None else range(ranks)
    merged: dict[str, list[Case]] = {suite.name: [] for suites in reports.values() for suite in suites}
    for (suite, _, _), by_rank in found.items():
        merged[suite].append(_across({rank: _settled(attempts) for rank, attempts in by_rank.items()}, expected))
    return tuple(_suite(name, cases, reports, of_file) for name, cases in merged.items())


def _rank_of(path: Path, suites: Sequence[Suite]) -> int | None:
    named = _RANK_IN_NAME.search(path.stem)
    if named:
        return int(named[1])
    said = {value for case in cases_of(suites) if (value := case.property(RANK)) is not None}
    if len(said) > 1:
        raise JUnitError(f"file={str(path)!r} is not accepted: its tests are of ranks {', '.join(sorted(said))}.")
    return int(said.pop()) if said else None


def _in_turn(reports: Mapping[Path, Sequence[Suite]]) -> list[Path]:
    """By the time at which they began, so that an attempt is never taken for the one before it; else as given."""
    try:
        times = {path: [datetime.fromisoformat(each.timestamp or "") for each in reports[path]] for path in reports}
        return sorted(reports, key=lambda path: min(times[path]))
    except (ValueError, TypeError):  # one without a time, or some with a time zone and some without
        return list(reports)


def _attempts(suites: Sequence[Suite]) -> dict[Key, Attempt]:
    keyed: dict[Key, list[Case]] = {}
    for suite in suites:
        for case in suite.cases:
            keyed.setdefault((suite.name, case.classname, case.name), []).append(case)
    return {key: tuple(cases) for key, cases in keyed.items()}


def _settled(attempts: Sequence[Attempt]) -> Case:
    """One rank's attempts as one case. As surefire has it: where the last attempt passed, those that failed are flaky;
    where it failed, the first failure is the result, and the later ones are reruns. A skip settles nothing."""
    results = [worst([case.result for case in attempt]) for attempt in attempts]
    failed = [each for each in results if each.kind in ("failure", "error")]
    last = next((each for each in reversed(results) if each.kind != "skipped"), results[-1])
    result = failed[0] if last.kind in ("failure", "error") else last
    cases = [case for attempt in attempts for case in attempt]
    return replace(
        cases[-1],
        result=result,
        retries=(*(each for case in cases for each in case.retries), *(each for each in failed if each is not result)),
        time=sum(case.time for case in cases),
        properties=tuple(dict.fromkeys(each for case in cases for each in case.properties)),
        out="".join(dict.fromkeys(case.out for case in cases)),
        err="".join(dict.fromkeys(case.err for case in cases)),
    )


def _across(by_rank: Mapping[int | None, Case], expected: Sequence[int]) -> Case:
    """One case of all ranks, which says of each rank what came of it there."""
    cases = {rank: case for rank, case in by_rank.items() if rank is not None}
    first = next(iter(by_rank.values()))
    if None in by_rank:
        if cases:
            raise JUnitError(
                f"{first.identity} is in files of {ranks_words(sorted(cases))} and in files that name no rank: are "
                "those attempts, or ranks? Name the rank in every file, as junit-rank0.xml does."
            )
        return first
    if len(expected) == 1:
        return first
    results = {rank: case.result for rank, case in cases.items()}
    results |= {rank: Result("error", "has no result of this test") for rank in expected if rank not in cases}
    retries = [(rank, retry) for rank, case in sorted(cases.items()) for retry in case.retries]
    return replace(
        first,
        result=worst(list(_told(results))),
        retries=tuple(replace(retry, message=f"rank {rank}: {retry.message}") for rank, retry in retries),
        time=max(case.time for case in cases.values()),
        properties=(("oracle.ranks", ", ".join(map(str, sorted(cases)))), *_properties(cases)),
        out=_outputs({rank: case.out for rank, case in cases.items()}),
        err=_outputs({rank: case.err for rank, case in cases.items()}),
    )


def _told(results: Mapping[int, Result]) -> Iterator[Result]:
    """One result for the ranks that say the same, naming them; all their texts."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, result in sorted(results.items()):
        groups.setdefault((result.kind, stable(result.message)), []).append(rank)
    for (kind, _), ranks in groups.items():
        if kind != "passed":
            one = results[ranks[0]]
            texts = {rank: results[rank].text for rank in ranks}
            yield replace(one, message=f"{ranks_words(ranks)}: {one.message}", text=_outputs(texts))


def ranks_words(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 1 and 3`, `ranks 0 to 3`; sorted."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _outputs(texts: Mapping[int, str]) -> str:
    return "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(texts.items()) if text)


def _properties(cases: Mapping[int, Case]) -> Iterator[tuple[str, str]]:
    """Those that all ranks have alike, once; others under the name of their rank."""
    held = {rank: [each for each in case.properties if each[0] != RANK] for rank, case in sorted(cases.items())}
    everywhere = set.intersection(*(set(each) for each in held.values()))
    yield from (each for each in dict.fromkeys(next(iter(held.values()))) if each in everywhere)
    for rank, properties in held.items():
        yield from ((f"rank{rank}.{name}", value) for name, value in properties if (name, value) not in everywhere)


def _suite(
    name: str, cases: Sequence[Case], reports: Mapping[Path, Sequence[Suite]], of_file: Mapping[Path, int | None]
) -> Suite:
    """Ranks ran beside each other, a rank's attempts one after the other."""
    seconds: dict[int | None, float] = {}
    parts = [(of_file[path], suite) for path, suites in reports.items() for suite in suites if suite.name == name]
    for rank, suite in parts:
        seconds[rank] = seconds.get(rank, 0.0) + suite.time
    return Suite(
        name,
        tuple(cases),
        max(seconds.values()),
        min((suite.timestamp for _, suite in parts if suite.timestamp), default=None),
        ", ".join(sorted({suite.hostname for _, suite in parts if suite.hostname})) or None,
        tuple(dict.fromkeys(each for _, suite in parts for each in suite.properties)),
    )
