"""Whether each recorded decision is the one that its rule makes of the recorded numbers.

This needs no reference, so that a wrong one does not pass for the truth. A signal is taken as it was recorded: whether
it is the right one is seen by comparing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oracle.evidence.trace import DecisionRecord
from oracle.verdict.align import Aligned
from oracle.verdict.decisions import DBCacheTerms, Ruling, TeaCacheTerms, rule_dbcache, rule_fixed, rule_teacache
from oracle.verdict.finding import Finding, Spot
from oracle.verdict.terms import DECIDING, Terms, TermsError, terms_of

_Group = tuple[int, str, str, int]
"""(request, expert, branch, stage): what one state of a rule belongs to."""


def check_replay(aligned: Aligned, name: str = "") -> Iterator[Finding]:
    """The first decision of each rule state that is not its rule's, and what hinders the replay: missing evidence.

    A forced run's shadow verdicts are replayed. Of methods that are not known here, and of traces without any decision,
    nothing is said. name: what to begin each sentence with.
    """
    cache = aligned.manifest.get("cache") or {}
    if cache.get("method") not in DECIDING or not aligned.decisions:
        return
    groups = _groups(aligned)
    hindered: set[str] = set()
    for group, steps in groups.items():
        try:
            finding = _replay(aligned, group, steps, terms_of(cache, *group[1:]))
        except TermsError as error:
            finding = Finding("coverage", "missing evidence", Spot(), str(error))
            if finding.says in hindered:  # which is the same for every branch and request
                continue
            hindered.add(finding.says)
        if finding is not None:
            yield replace(finding, says=f"{name}{finding.says}")
    scheduled = {(request, step, branch, stage) for (request, _, branch, stage), s in groups.items() for step in s}
    for request, step, branch, stage in sorted(aligned.decisions.keys() - scheduled):
        spot = Spot(request, step, None, branch, None, stage, aligned.rank_of(stage, branch))
        yield Finding("decisions", "decision", spot, f"{name}decided here, where the schedule runs nothing")


def _groups(aligned: Aligned) -> dict[_Group, list[int]]:
    """The steps at which the schedule calls each rule state, in order."""
    groups: dict[_Group, list[int]] = {}
    for request, begun in aligned.requests.items():
        for step in begun.schedule or ():
            for branch in ("cond", "uncond") if step["guidance_scale"] > 1 else ("cond",):
                for stage in range(aligned.topology.pp):
                    groups.setdefault((request, step["expert"], branch, stage), []).append(step["index"])
    return groups


def _replay(aligned: Aligned, group: _Group, steps: Sequence[int], terms: Terms) -> Finding | None:
    """The first call that did not go by its rule. Where one has gone another way, all that follow do."""
    request, expert, branch, stage = group
    rank = aligned.rank_of(stage, branch)
    forced = bool(aligned.manifest["cache"].get("forced"))
    found = [aligned.decisions.get((request, step, branch, stage)) for step in steps]
    rulings = _rulings(terms, [decision.signal for decision in found if decision is not None], steps)
    before = 0.0
    for index, (step, decision) in enumerate(zip(steps, found, strict=True)):
        spot = Spot(request, step, expert, branch, None, stage, rank)
        if decision is None:
            # Of a request that was cut short, which is said elsewhere, the last decisions are not there to be missed.
            if not any(found[index:]) and aligned.outcomes.get(request, {}).get(rank) != "done":
                return None
            says = "no decision is recorded here, so that none after it can be replayed"
            return Finding("coverage", "missing evidence", spot, says)
        if index == 0 and decision.signal is not None:
            says = "its first call was compared with what is not of this request, expert and branch"
            return Finding("decisions", "provenance", spot, says)
        try:
            ruling = next(rulings)
        except ValueError as error:
            return Finding("decisions", "decision", spot, str(error))
        wrong = _wrong(decision, ruling, terms, before, forced)
        if wrong is not None:
            return Finding("decisions", "decision", spot, wrong)
        before = ruling.accumulated
    return None


def _rulings(terms: Terms, signals: Sequence[float | None], steps: Sequence[int]) -> Iterator[Ruling]:
    if isinstance(terms, TeaCacheTerms):
        return rule_teacache(terms, signals, len(steps))
    if isinstance(terms, DBCacheTerms):
        return rule_dbcache(terms, signals)
    return rule_fixed(terms, steps)


def _wrong(decision: DecisionRecord, ruling: Ruling, terms: Terms, before: float, forced: bool) -> str | None:
    """What the call went by, what it decided, what it left: the first of them that is not the rule's."""
    if isinstance(terms, frozenset):
        return _verdict(decision, ruling, forced)
    return (
        _number(decision, {"threshold": terms.threshold, "accumulated_before": before})
        or _verdict(decision, ruling, forced)
        or _number(decision, {"rescaled": ruling.rescaled, "accumulated_after": ruling.accumulated})
    )


def _verdict(decision: DecisionRecord, ruling: Ruling, forced: bool) -> str | None:
    """Under `forced` it is the rule's own verdict that counts, which was overridden."""
    said = decision.shadow if forced else decision.verdict
    if said is None:
        return "the rule's own verdict, which was overridden, is not recorded"
    if forced and decision.verdict != "compute":
        return "reused, though every call was to be forced to compute"
    if said == ("reuse" if ruling.reuses else "compute"):
        return None
    did = f"{'would have ' if forced else ''}{'reused' if said == 'reuse' else 'computed'}"
    return f"{did}, though the rule {'reuses' if ruling.reuses else 'computes'} here ({ruling.why})"


def _number(decision: DecisionRecord, wanted: Mapping[str, float | None]) -> str | None:
    """Held to the last bit. An engine may record fewer numbers than wanref does."""
    for name, number in wanted.items():
        recorded = getattr(decision, name)
        if recorded is not None and recorded != number:
            return f"{name} is {recorded}, and {number} by the rule"
    return None
