"""Two aligned traces in, findings out: configuration, coverage, decisions, provenance, tensors, output.

Imports neither torch nor diffusers. At level `digest` and above a tensor's bytes are compared by their digests, and no
tensor is read, but for a bounded contract's, which are measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from oracle.evidence.reader import Trace
from oracle.evidence.trace import DecisionRecord, OriginRecord
from oracle.verdict.align import Aligned, Replica, align, layer_of, only, place_of, same_value, spot_of
from oracle.verdict.bounded import check_bounded, check_locked_coverage, check_runs
from oracle.verdict.configuration import check_configuration
from oracle.verdict.contracts import CONTRACTS, Contract
from oracle.verdict.coverage import check_coverage
from oracle.verdict.finding import LAYERS, Finding, Spot, Verdict
from oracle.verdict.replayed import check_replay
from oracle.verdict.reuse import check_reuses
from oracle.verdict.state import check_states
from oracle.verdict.tolerance import T1Limits


def compare(
    reference: Trace,
    candidate: Trace,
    contract: Contract | str,
    requests: tuple[int, int] | None = None,
    precise: Trace | None = None,
    limits: T1Limits | None = None,
) -> Verdict:
    """The candidate held against the reference. `requests`: only this request of the one and that of the other.

    precise, for a bounded contract alone: the float32 run on which the two others were locked; see
    `oracle.verdict.bounded`. limits: those of a calibration, instead of `start_limits`. Raises ValueError where precise
    is missing or has no use, and what `check_runs` raises.
    """
    contract = CONTRACTS[contract] if isinstance(contract, str) else contract
    bounded = contract.tensors == "bounded"
    if bounded and precise is None:
        raise ValueError(
            f"contract={contract.name!r} is bounded, and is not judged by bytes: give precise, a float32 run of the "
            "same weights and request, on which both runs were locked at each module."
        )
    if not bounded and (precise is not None or limits is not None):
        raise ValueError(
            f"contract={contract.name!r} takes neither precise nor limits: its tensors are {contract.tensors}, and "
            "those are for bounded ones."
        )
    one, other = align(reference), align(candidate)
    exact = None if precise is None else align(precise)
    if requests is not None:
        one, other = only(one, requests[0]), only(other, requests[1])
        exact = exact and only(exact, requests[0])
    if exact is not None:
        check_runs(exact, one, other)
    found = [
        *check_configuration(one, other, contract),
        *(check_locked_coverage if bounded else check_coverage)(one, other, contract),
        *_decisions(one, other, contract),
        *check_replay(other),
        *check_replay(one, "reference: "),
        *check_reuses(other),
        *check_states(one, other, contract),
        *_tensors(one, other, contract),
        *(check_bounded(exact, one, other, limits) if exact is not None else ()),
    ]
    compared = len(one.tensors.keys() & other.tensors.keys())
    verdicts = [decision.verdict for decision in other.decisions.values()]
    found += [Finding("coverage", "missing evidence", Spot(), "not one value was compared")] if not compared else []
    return Verdict(
        contract.name,
        _sorted(found, contract),
        compared,
        verdicts.count("reuse"),
        verdicts.count("compute"),
    )


def _sorted(found: list[Finding], contract: Contract) -> tuple[Finding, ...]:
    """By layer, and in one layer by time. Where history alone differs, that is the cause of what follows from it."""
    if contract.cause is not None:
        found = [
            replace(f, cause=contract.cause) if f.layer in ("decisions", "tensors", "output", "provenance") else f
            for f in found
        ]
    return tuple(sorted(found, key=_when))


def _when(finding: Finding) -> tuple[Any, ...]:
    """What has no place comes behind what has one, but where a whole request was asked for otherwise: that explains
    its steps."""
    spot = finding.spot
    nowhere = -1 if finding.layer == "configuration" else 1 << 30
    step = nowhere if spot.step is None else spot.step
    return LAYERS.index(finding.layer), spot.request, step, place_of(spot.block), spot.stage or 0, spot.branch or ""


def _decisions(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    if contract.decisions == "none":
        return
    for key in sorted(one.decisions.keys() | other.decisions.keys(), key=lambda k: (k[0], k[1], k[3], k[2])):
        a, b = one.decisions.get(key), other.decisions.get(key)
        request, step, branch, stage = key
        spot = Spot(request, step, None, branch, stage=stage, rank=other.rank_of(stage, branch))
        if a is None or b is None:
            yield Finding("decisions", "decision", spot, f"decided {'here' if a is None else 'in the reference'} only")
        elif contract.decisions == "verdicts":
            if a.verdict != b.verdict:
                yield Finding("decisions", "decision", spot, f"{b.verdict}, and {a.verdict} in the reference")
        elif (says := _difference(a, b)) is not None:
            yield Finding("decisions", "decision", replace(spot, expert=b.expert), says)


def _difference(a: DecisionRecord, b: DecisionRecord) -> str | None:
    if a.verdict != b.verdict or a.reason != b.reason:
        return f"{b.verdict} ({b.reason}), and {a.verdict} ({a.reason}) in the reference"
    for name in ("expert", "shadow", "threshold", "signal", "rescaled", "accumulated_before", "accumulated_after"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} is {getattr(b, name)}, and {getattr(a, name)} in the reference"
    if [_plain(o) for o in a.origins] != [_plain(o) for o in b.origins]:
        return f"reuses {[_plain(o) for o in b.origins]}, and {[_plain(o) for o in a.origins]} in the reference"
    return None


def _plain(origin: OriginRecord) -> tuple[int, str, str, int]:
    return (origin.step, origin.expert, origin.branch, origin.stage)


def _tensors(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    """Values that are not finite, which are wrong wherever they also are, and, where bytes are claimed, other bytes."""
    for key in other.ordered:
        a, b = one.owner(key), other.owner(key)
        if b is None:
            continue
        differs = contract.tensors == "bitwise" and a is not None and not same_value(a, b)
        if not differs and not b.record.nan and not b.record.inf:
            continue
        yield Finding(layer_of(key, other), "arithmetic", replace(spot_of(key, other), rank=b.rank), _how(a or b, b))


def _how(a: Replica, b: Replica) -> str:
    for name in ("dtype", "shape"):
        left, right = getattr(a.record, name), getattr(b.record, name)
        if left != right:
            return f"its {name} is {right}, and {left} in the reference"
    if b.record.nan or b.record.inf:
        return f"{b.record.nan} NaN and {b.record.inf} infinite elements"
    if a.record.rms is not None and b.record.rms is not None:
        return f"other bytes than the reference (rms {b.record.rms:.6g}, and {a.record.rms:.6g} there)"
    return "other bytes than the reference"
