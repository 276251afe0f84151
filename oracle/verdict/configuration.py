"""Whether two runs were asked for the same: request, schedule, scheduler, cache, surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oracle.evidence.trace import RequestRecord
from oracle.verdict.align import Aligned
from oracle.verdict.contracts import Contract
from oracle.verdict.finding import Finding, Spot

_MANIFEST = (
    *("checkpoint", "scheduler", "block_epsilon", "layers", "dtype", "cache", "topology", "world_size"),
    *("device", "threads", "libraries", "python"),
)
_FREE = ("sources", "overridden")  # who decided a value is no part of the value


def check_configuration(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    for name in _MANIFEST:
        a, b = one.manifest.get(name), other.manifest.get(name)
        if a != b and name not in contract.may_differ:
            yield Finding("configuration", "configuration", Spot(), f"{name} is {b!r}, and {a!r} in the reference")
    if len(one.requests) != len(other.requests):
        counts = len(other.requests), len(one.requests)
        yield Finding("configuration", "configuration", Spot(), "{} requests, and {} in the reference".format(*counts))
    for a_request, b_request in zip(one.requests.values(), other.requests.values(), strict=False):
        yield from _request(a_request, b_request)


def _request(a: RequestRecord, b: RequestRecord) -> Iterator[Finding]:
    spot = Spot(b.request)
    resolved_a, resolved_b = a.resolved or {}, b.resolved or {}
    for name in sorted({*resolved_a, *resolved_b} - {*_FREE}):
        if resolved_a.get(name) != resolved_b.get(name):
            says = f"{name} is {resolved_b.get(name)!r}, and {resolved_a.get(name)!r} in the reference"
            yield Finding("configuration", "configuration", spot, says)
    steps_a, steps_b = a.schedule or (), b.schedule or ()
    if len(steps_a) != len(steps_b):
        says = f"{len(steps_b)} steps run, and {len(steps_a)} in the reference"
        yield Finding("configuration", "configuration", spot, says)
    for step_a, step_b in zip(steps_a, steps_b, strict=False):
        for name in step_a:
            if step_a[name] != step_b.get(name):
                where = replace(spot, step=int(step_b["index"]), expert=str(step_b["expert"]))
                says = f"{name} is {step_b.get(name)!r}, and {step_a[name]!r} in the reference"
                yield Finding("configuration", "configuration", where, says)
