"""A claim that a test makes, judged: what came of it in one sentence, and the facts that a test report carries.

Traces are compared by `oracle.verdict.compare`; arrays by their bytes, in `oracle.report.arrays`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oracle.evidence.context_line import read_context_lines
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.revision import Revision
from oracle.evidence.trace import TraceError
from oracle.report.arrays import compare_arrays, measure_arrays, named_arrays
from oracle.verdict.align import Aligned, align, spot_of
from oracle.verdict.compare import compare
from oracle.verdict.contracts import CONTRACTS, Contract
from oracle.verdict.finding import Finding, Spot, Verdict
from oracle.verdict.localise import first_difference, locate
from oracle.verdict.logged import check_contexts
from oracle.verdict.runs import compare_runs
from oracle.verdict.twin import NATIVE, cached_folder, forced_folder, judge_triplet

SHOWN = 3
"""So many findings follow the sentence; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Claim:
    """`sentence`: what was shown, or where it first went wrong. `more`: what else was found. `facts`: by name, for a
    report's properties. `traces`: where one can look."""

    contract: str
    holds: bool
    sentence: str
    more: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    traces: Mapping[str, Path] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The sentence, what follows from it, and how to look for oneself."""
        lines = [self.sentence, *(f"  next: {each}" for each in self.more[:SHOWN])]
        if len(self.more) > SHOWN:
            lines.append(f"  and {len(self.more) - SHOWN} more findings")
        claim = CONTRACTS[self.contract].claim if self.contract in CONTRACTS else ""
        lines.append(f"contract   {self.contract}{f': {claim}' if claim else ''}")
        lines += [f"{name:10} {folder}" for name, folder in self.traces.items()]
        if "candidate" in self.traces:
            lines.append(f"look at    wanref trace show {shlex.quote(str(self.traces['candidate']))}")
        return "\n".join(lines)


def claim_equivalent(reference: Any, candidate: Any, contract: str, requests: tuple[int, int] | None = None) -> Claim:
    """Traces (folders, `Trace`, or what has a `.trace` and perhaps an `.output`), or arrays, alone or by name.

    Evidence with outputs, under a contract of bytes, is compared by both. Raises ValueError for another contract than
    the declared ones, TypeError for a trace held against arrays.
    """
    declared = _contract(contract)
    first, second = _trace_of(reference), _trace_of(candidate)
    if (first is None) != (second is None):
        raise TypeError(
            f"reference={type(reference).__name__} and candidate={type(candidate).__name__} are not accepted: give two "
            "traces or two sets of arrays."
        )
    if first is None or second is None:
        if declared.tensors != "bitwise" or declared.decisions == "verdicts" or requests is not None:
            raise ValueError(f"contract={contract!r} is not accepted for arrays: give 'rerun', or traces.")
        return _of_verdict(_bytes(contract, named_arrays(reference), named_arrays(candidate)))
    try:
        one, other = (open_trace(each) if isinstance(each, Path) else each for each in (first, second))
    except TraceError as error:
        return _missing(contract, error, (first, second))
    claim = _of_traces(one, other, compare(one, other, declared, requests))
    outputs = getattr(reference, "output", None), getattr(candidate, "output", None)
    if declared.tensors == "bitwise" and any(each is not None for each in outputs):
        left, right = ({} if each is None else named_arrays(each) for each in outputs)
        told = tuple(map(str, _bytes(contract, left, right).findings))
        if claim.holds and told:
            return replace(claim, holds=False, sentence=told[0], more=told[1:])
        return replace(claim, more=(*claim.more, *told))
    return claim


def claim_twins(folder: Path, cache: str) -> Iterator[Claim]:
    """A triplet: the forced run is the native one, and the cached run is what it says it is."""
    parts = {"forced": (NATIVE, forced_folder(cache)), "cached": (forced_folder(cache), cached_folder(cache))}
    held = {contract: (folder / one, folder / other) for contract, (one, other) in parts.items()}
    try:
        verdicts, loops = judge_triplet(folder, cache)
    except TraceError as error:
        yield _missing("forced", error, held["forced"])
        return
    for contract, verdict in verdicts.items():
        reference, candidate = map(open_trace, held[contract])
        claim = _of_traces(reference, candidate, verdict)
        differing = f"{len(loops.differing)} of {loops.calls}"
        yield replace(claim, facts={**claim.facts, "differs_from_open_loop": differing})


def claim_bounded(precise: Any, base: Any, candidate: Any) -> Claim:
    """T1: a module's outputs in bf16 or fp16 for the reference's inputs, measured by the base's own error.

    The limits are those before any calibration. Raises ToleranceError for what T1 cannot judge.
    """
    findings, worst, count = measure_arrays(named_arrays(precise), named_arrays(base), named_arrays(candidate))
    claim = _of_verdict(Verdict("kernels", tuple(findings), count))
    return replace(claim, facts={**claim.facts, **{name: f"{value:.4g}" for name, value in worst.items()}})


def claim_within_noise(base: Sequence[Any], head: Sequence[Any], locked: Any = None) -> Claim:
    """The noise band, for engines that do not repeat bitwise: at least 5 runs of the base, at level tensor."""
    opened = [[open_trace(folder) for folder in side] for side in (base, head)]
    verdict = compare_runs(opened[0], opened[1], None if locked is None else open_trace(locked))
    facts = {"p_value": f"{verdict.p_value:.4g}", "visible": f"{verdict.visible:.4g}", **_about(opened[1][0])}
    traces = {"reference": opened[0][0].folder, "candidate": opened[1][0].folder}
    return Claim("noise", verdict.kind == "same within noise", str(verdict), facts=facts, traces=traces)


def claim_schedule(log: str, trace: Any, request: int = 0) -> Claim:
    """The caches that an engine logged, against the schedule that it ran. Raises ValueError for a request that is not
    in the trace."""
    opened = open_trace(trace)
    aligned = align(opened)
    if request not in aligned.requests:
        raise ValueError(f"request={request} is not accepted: {opened.folder} has {len(aligned.requests)} requests.")
    facts = list(read_context_lines(log.splitlines()))
    layers = len(aligned.topology.blocks(0, aligned.manifest["layers"]))
    schedule = aligned.requests[request].schedule or ()
    findings = (
        list(check_contexts(facts, schedule, layers, aligned.topology.cfg))
        if facts
        else [Finding("coverage", "missing evidence", Spot(), "the log has no context line of Cache-DiT")]
    )
    claim = _of_verdict(Verdict("schedule", tuple(findings), len(facts)))
    told = claim.sentence if findings else f"{len(facts)} context lines fit their schedule"
    return replace(claim, sentence=told, facts=_about(opened), traces={"candidate": opened.folder})


def _contract(name: str) -> Contract:
    if name not in CONTRACTS:
        raise ValueError(f"contract={name!r} is not accepted: give one of {', '.join(CONTRACTS)}.")
    return CONTRACTS[name]


def _trace_of(operand: Any) -> Trace | Path | None:
    """None for arrays, which have a method of that name."""
    held = operand if isinstance(operand, (Trace, Path, str)) else getattr(operand, "trace", None)
    if isinstance(held, str):
        return Path(held)
    return held if isinstance(held, (Trace, Path)) else None


def _missing(contract: str, error: TraceError, held: tuple[Trace | Path, Trace | Path]) -> Claim:
    finding = Finding("coverage", "missing evidence", Spot(), str(error))
    folders = [each.folder if isinstance(each, Trace) else each for each in held]
    traces = dict(zip(("reference", "candidate"), folders, strict=True))
    return replace(_of_verdict(Verdict(contract, (finding,), 0)), traces=traces)


def _bytes(contract: str, reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> Verdict:
    return Verdict(contract, tuple(compare_arrays(reference, candidate)), len(reference.keys() & candidate.keys()))


def _of_verdict(verdict: Verdict) -> Claim:
    told = tuple(map(str, verdict.findings[1:]))
    first = {"first_divergence": "none" if verdict.first is None else str(verdict.first.spot)}
    return Claim(verdict.contract, verdict.holds, verdict.sentence, told, first)


def _of_traces(reference: Trace, candidate: Trace, verdict: Verdict) -> Claim:
    one, other = align(reference), align(candidate)
    location = locate(reference, candidate, verdict)
    key = first_difference(one, other)
    facts = {
        **_about(candidate),
        "keys": str(verdict.compared),
        "hits": str(verdict.hits),
        "misses": str(verdict.misses),
        "first_divergence": "none" if key is None else str(spot_of(key, other)),
        **{f"digest.{name}": digest for name, digest in (("reference", _digest(one)), ("candidate", _digest(other)))},
    }
    return Claim(
        verdict.contract,
        verdict.holds,
        verdict.sentence if location is None else location.sentence,
        tuple(map(str, verdict.findings[1:])),
        facts,
        {"reference": reference.folder, "candidate": candidate.folder},
    )


def _digest(aligned: Aligned) -> str:
    """Of the last latents, or of what was decoded from them."""
    final = [key for key in aligned.ordered if key.block in ("scheduler", "decode")]
    owner = aligned.owner(final[-1]) if final else None
    return "none" if owner is None else owner.record.digest


def subject_of(trace: Trace) -> Revision:
    """Whose run it is, as far as the manifest says."""
    said = trace.manifest.get("subject") or {}
    return Revision(said.get("name", ""), said.get("version", ""), said.get("revision"), said.get("dirty"))


def _about(trace: Trace) -> dict[str, str]:
    subject, manifest = subject_of(trace), trace.manifest
    said = {
        "subject": subject.name or None,
        "version": subject.version or None,
        "revision": subject.revision,
        "dirty": None if subject.dirty is None else str(subject.dirty).lower(),
        "topology": manifest["topology"],
        "dtype": manifest.get("dtype"),
        "cache": (manifest.get("cache") or {}).get("method", "none"),
    }
    return {name: str(value) for name, value in said.items() if value is not None}
