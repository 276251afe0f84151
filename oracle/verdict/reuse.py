"""What a trace itself shows of each reuse: whose residual it was, and whether the output is what reuse makes of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from oracle.evidence.trace import DecisionRecord, OriginRecord, TraceError
from oracle.verdict.align import EARLIER, Aligned, DecisionKey
from oracle.verdict.finding import Cause, Finding, Spot
from wanref.observe import TensorKey


def check_reuses(aligned: Aligned) -> Iterator[Finding]:
    """Findings about the provenance of every reuse, and, where tensors were kept, about its arithmetic."""
    latest: dict[tuple[int, str, str, int], int] = {}
    for key in sorted(aligned.decisions):
        decision = aligned.decisions[key]
        mine = (decision.request, decision.expert, decision.branch, decision.stage)
        rank = aligned.rank_of(decision.stage, decision.branch)
        spot = Spot(decision.request, decision.step, decision.expert, decision.branch, None, decision.stage, rank)
        if decision.verdict == "compute":
            latest[mine] = decision.step
            continue
        says = _foreign(decision, latest.get(mine))
        if says is not None:
            other = any(origin.request != decision.request for origin in decision.origins)
            cause: Cause = "state left over" if other else "provenance"
            yield Finding("provenance", cause, spot, says)
        elif _is_plain(aligned, decision) and aligned.outcomes.get(decision.request, {}).get(rank) == "done":
            try:
                adds_up = _adds_up(aligned, key, decision)
            except TraceError as error:
                yield Finding("coverage", "missing evidence", spot, f"its arithmetic cannot be looked at: {error}")
                continue
            if not adds_up:
                says = f"its output is not its input plus the residual of step {decision.origins[-1].step}"
                yield Finding("provenance", "arithmetic", spot, says)


def _foreign(decision: DecisionRecord, latest: int | None) -> str | None:
    """What is wrong about where the residuals come from."""
    if not decision.origins:
        return "reused a residual of unknown origin"
    for origin in decision.origins:
        for name in ("request", "branch", "expert", "stage"):
            found, wanted = getattr(origin, name), getattr(decision, name)
            if found != wanted:
                return f"reused a residual of {_named(name, found)}{_at(origin)}"
        if origin.step >= decision.step:
            return f"reused a residual of step {origin.step}, which had not been computed"
    if decision.origins[-1].step != latest:
        was = "nothing was computed before" if latest is None else f"step {latest} was the last that was computed"
        return f"reused a residual of step {decision.origins[-1].step}, but {was}"
    return None


def _named(name: str, value: object) -> str:
    if name == "request" and value == EARLIER:
        return "an earlier request"
    return {"branch": f"the {value} branch", "expert": f"the {value}-noise expert"}.get(name, f"{name} {value}")


def _at(origin: OriginRecord) -> str:
    return f" (step {origin.step})"


def _is_plain(aligned: Aligned, decision: DecisionRecord) -> bool:
    """One residual, added whole, in a dtype whose sums NumPy rounds alike."""
    options = (aligned.manifest.get("cache") or {}).get("options", {})
    blocks_behind = str(options.get("bn", "0")) != "0" or str(options.get("low_bn", "0")) != "0"
    kept = aligned.manifest["level"] == "tensor" and aligned.manifest["dtype"] == "float32"
    return kept and len(decision.origins) == 1 and not blocks_behind


def _adds_up(aligned: Aligned, key: DecisionKey, decision: DecisionRecord) -> bool:
    """out = in + (out' - in'), bitwise, where in and out are those of the skipped blocks and ' is the origin's step."""
    request, step, branch, stage = key
    blocks = aligned.topology.blocks(stage, aligned.manifest["layers"])
    base = blocks[0] + decision.computed_blocks - 1
    before: int | str = "embed" if base < 0 else base

    def value(at: int, block: int | str) -> np.ndarray:
        wanted = TensorKey(request, at, decision.expert, branch, block)  # type: ignore[arg-type]
        rank = aligned.rank_of(stage, branch)
        return aligned.array(wanted, rank)

    origin = decision.origins[-1].step
    residual = value(origin, blocks[-1]) - value(origin, before)
    return bool(np.array_equal(value(step, blocks[-1]), value(step, before) + residual))
