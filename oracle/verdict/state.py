"""What a cache remembers when a request begins and ends: nothing of another request."""

from __future__ import annotations

from collections.abc import Iterator

from oracle.verdict.align import Aligned
from oracle.verdict.contracts import Contract
from oracle.verdict.finding import Cause, Finding, Spot


def check_states(one: Aligned, other: Aligned, contract: Contract) -> Iterator[Finding]:
    """A state that a request's end left behind, or that it began with and the reference did not."""
    alike = _cache(one) == _cache(other)  # a replay's cache is another one than that whose schedule it replays
    for (rank, request, moment), state in sorted(other.states.items()):
        if moment == "end" and state.digests:
            says = f"the cache still remembers {', '.join(sorted(state.digests))} after the request has ended"
            yield Finding("provenance", "state left over", Spot(request, rank=rank), says)
        began = one.states.get((rank, request, "begin")) if alike else None
        if moment == "begin" and began is not None and began.digests != state.digests:
            names = sorted(n for n in {*began.digests, *state.digests} if began.digests.get(n) != state.digests.get(n))
            says = f"the cache begins with another state of {', '.join(names)} than in the reference"
            # Without a history to leave anything, it is another cache than the one that was asked for.
            cause: Cause = "state left over" if contract.history else "configuration"
            yield Finding("provenance", cause, Spot(request, rank=rank), says)


def _cache(aligned: Aligned) -> tuple[object, object]:
    cache = aligned.manifest.get("cache") or {}
    return cache.get("method"), cache.get("options")
