"""What holds of a subject that nobody here wrote, and what does not: each check runs it anew, and compares.

Every check is about a claim that a cache makes by being one. Imports neither torch nor diffusers: the subject does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oracle.evidence.subjects import CountedRule, Evidence, Subject, Target
from oracle.verdict.align import align, spot_of
from oracle.verdict.counted import replay_counted
from oracle.verdict.first_block import replay_first_block
from oracle.verdict.localise import first_difference
from oracle.verdict.reuse import check_reuses

if TYPE_CHECKING:
    from wanref import Request

CHECKS = (
    "runs",
    "fires",
    "repeats",
    "lifecycle",
    "after a failure",
    "enabled late",
    "forced twin",
    "provenance",
    "decisions",
    "guidance off",
    "claims",
    "disabled",
    "neighbours",
)
UNKNOWN = "unknown origin"


@dataclass(frozen=True, slots=True)
class Result:
    """holds: None where the check says nothing of this subject, and `says` why."""

    check: str
    holds: bool | None
    says: str


def audit(
    target: Target, request: Request, folder: Path, done: Callable[[str], object] = lambda check: None
) -> Iterator[Result]:
    """All checks in the order of CHECKS. request: small, with guidance and a seed. folder: for traces, new.

    A subject that raises fails that check, with what it raised: it may be what was to be shown.
    """
    tried = _Audit(target, request, folder)
    for check in CHECKS:
        try:
            result = getattr(tried, check.replace(" ", "_"))()
        except Exception as error:
            result = Result(check, False, f"{type(error).__name__}: {error}".splitlines()[0])
        done(check)
        yield replace(result, check=check)
        if check == "runs" and not result.holds:
            return


class _Audit:
    """Each check is a method, and what several need is run once."""

    def __init__(self, target: Target, request: Request, folder: Path) -> None:
        self._target = target
        self._request = request
        self._other = replace(request, prompt=f"not {request.prompt}", seed=1234)
        self._folder = folder
        self._runs = 0
        self._first: Evidence | None = None

    def runs(self) -> Result:
        subject = self._target.fresh()
        self._first = self._run(subject, self._request)
        return _result(True, f"{len(align(self._first.trace).ordered)} values recorded")

    def fires(self) -> Result:
        if self._target.plain is None:
            return _result(None, "it has no cache")
        saved, calls = _saved(self._evidence)
        return _result(0 < saved < calls, f"work was saved in {saved} of {calls} calls")

    def repeats(self) -> Result:
        return self._same(self._evidence, self._run(self._target.fresh(), self._request), "a fresh run")

    def lifecycle(self) -> Result:
        subject = self._target.fresh()
        self._run(subject, self._request)
        # Another prompt, fewer steps and another size: whatever is left of them would be seen.
        fewer = replace(self._other, steps=max(2, (self._request.steps or 4) // 2), frames=1)
        self._run(subject, fewer)
        return self._same(self._evidence, self._run(subject, self._request), "the third of A, B, A")

    def after_a_failure(self) -> Result:
        if self._target.fail is None:
            return _result(None, "it cannot be made to fail")
        subject = self._target.fresh()
        # Another seed of the same prompt: what is left of it is near enough to be taken for this one's.
        self._target.fail(subject, replace(self._request, seed=1234))
        return self._same(self._evidence, self._run(subject, self._request), "a run after one that failed")

    def enabled_late(self) -> Result:
        """The cache on a pipeline that has run without one."""
        if self._target.enable is None or self._target.plain is None:
            return _result(None, "it has no cache")
        subject = self._target.plain()
        self._run(subject, self._other)
        self._target.enable(subject)
        return self._same(self._evidence, self._run(subject, self._request), "a run with a cache that came later")

    def forced_twin(self) -> Result:
        if self._target.forced is None or self._target.plain is None:
            return _result(None, "it has no option to reuse nothing")
        twin = self._run(self._target.forced(), self._request)
        saved, calls = _saved(twin)
        if saved:
            return _result(False, f"it was told to reuse nothing, and saved work in {saved} of {calls} calls")
        return self._same(self._plain(self._request), twin, "the forced twin")

    def provenance(self) -> Result:
        """Of each reuse whose origin is known by its value: same branch, same expert, the last computed one."""
        if self._target.plain is None:
            return _result(None, "it has no cache")
        aligned = align(self._evidence.trace)
        reuses = [decision for decision in aligned.decisions.values() if decision.verdict == "reuse"]
        known = [decision for decision in reuses if decision.origins]
        wrong = [finding for finding in check_reuses(aligned) if UNKNOWN not in finding.says and not _rounds(finding)]
        if wrong:
            return _result(False, f"{wrong[0]} ({len(wrong)} of {len(reuses)} reuses)")
        says = f"of {len(reuses)} reuses {len(known)} took what their own branch and expert computed last"
        return _result(True if known else None, says if known else f"{says}: what it makes new is not looked at")

    def decisions(self) -> Result:
        """Against our replay of its rule, by counts, or from what entered and left its first block."""
        if self._target.rule is None:
            return _result(None, "its rule is not replayed here")
        aligned, rule = align(self._evidence.trace), self._target.rule
        wrong, count = (
            replay_counted(aligned, rule) if isinstance(rule, CountedRule) else replay_first_block(aligned, rule)
        )
        if wrong is not None:
            return _result(False, wrong)
        return _result(True, f"{count} decisions are those of its rule")

    def guidance_off(self) -> Result:
        """One branch: the same claims, and A again behind it."""
        alone = replace(self._request, guidance_scale=1.0, guidance_scale_2=None)
        subject = self._target.fresh()
        evidence = self._run(subject, alone)
        branches = {branch for places in (evidence.work or {}).values() for _, branch in places}
        if "uncond" in branches:
            return _result(False, "the uncond branch was run all the same")
        saved, calls = _saved(evidence)
        if evidence.claimed is not None and evidence.claimed != saved:
            return _result(False, f"it claims {evidence.claimed} hits, and saved work in {saved} of {calls} calls")
        return self._same(self._evidence, self._run(subject, self._request), "a guided run behind it")

    def claims(self) -> Result:
        claimed = self._evidence.claimed
        saved, calls = _saved(self._evidence)
        if claimed is None:
            return _result(None, "it keeps no statistics")
        return _result(claimed == saved, f"it claims {claimed} hits, and saved work in {saved} of {calls} calls")

    def disabled(self) -> Result:
        if self._target.disable is None:
            return _result(None, "it has no cache")
        subject = self._target.fresh()
        self._run(subject, self._other)
        self._target.disable(subject)
        return self._same(self._plain(self._request), self._run(subject, self._request), "a run after it was disabled")

    def neighbours(self) -> Result:
        """A second subject in the process, without a cache, and the first one again."""
        if self._target.plain is None:
            return _result(None, "it has no cache")
        subject, plain = self._target.fresh(), self._target.plain()
        self._run(subject, self._request)
        beside = self._same(self._plain(self._request), self._run(plain, self._request), "a plain one beside it")
        if not beside.holds:
            return beside
        return self._same(self._evidence, self._run(subject, self._request), "the cached one, beside a plain one")

    @property
    def _evidence(self) -> Evidence:
        assert self._first is not None, "`runs` comes first"
        return self._first

    def _plain(self, request: Request) -> Evidence:
        assert self._target.plain is not None
        return self._run(self._target.plain(), request)

    def _run(self, subject: Subject, request: Request) -> Evidence:
        self._runs += 1
        return subject.run(request, self._folder / f"run{self._runs:02d}")

    def _same(self, reference: Evidence, candidate: Evidence, what: str) -> Result:
        """Bitwise, at every value that both traces have, and at the end."""
        one, other = align(reference.trace), align(candidate.trace)
        key = first_difference(one, other)
        if key is not None:
            return _result(False, f"{what} first differs at {spot_of(key, other)}")
        if not _equal(reference, candidate):
            return _result(False, f"{what} ends in other latents, though no recorded value differs")
        return _result(True, f"{what} has the same bytes")


def _result(holds: bool | None, says: str) -> Result:
    return Result("", holds, says)


def _equal(one: Evidence, other: Evidence) -> bool:
    pairs = [(one.output.get(name), other.output.get(name)) for name in one.output.keys() | other.output.keys()]
    return all(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)


def _saved(evidence: Evidence) -> tuple[int, int]:
    """In how many calls of a transformer a module of some block did not run, and calls in all."""
    if evidence.work is not None:
        most = max(count for places in evidence.work.values() for count in places.values())
        places = {place for counts in evidence.work.values() for place in counts}
        return sum(any(counts[place] < most for counts in evidence.work.values()) for place in places), len(places)
    decisions = align(evidence.trace).decisions.values()
    return sum(decision.verdict == "reuse" for decision in decisions), len(decisions)


def _rounds(finding: object) -> bool:
    """Whether it is about the last bit of a sum, which another library may take in another order."""
    return getattr(finding, "cause", "") == "arithmetic"
