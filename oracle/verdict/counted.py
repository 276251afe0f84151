"""The decisions of a cache that goes by the number of its calls alone, replayed."""

from __future__ import annotations

from oracle.evidence.subjects import CountedRule
from oracle.verdict.align import Aligned


def replay_counted(aligned: Aligned, rule: CountedRule) -> tuple[str | None, int]:
    """What is wrong first, None if nothing is, and how many decisions were held against the rule."""
    schedule = {step["index"]: step["expert"] for step in aligned.requests[0].schedule or ()}
    tracks: dict[tuple[str, str], int] = {}
    for _, step, branch, _ in sorted(aligned.decisions):
        call = tracks.get((schedule[step], branch), 0)
        tracks[schedule[step], branch] = call + 1
        wanted = "compute" if call < rule.first or (call - rule.first + 1) % (rule.between + 1) == 0 else "reuse"
        found = aligned.decisions[0, step, branch, 0].verdict
        if found != wanted:
            return f"step {step}, {branch}: {found}, where call {call} of its expert and branch is to {wanted}", 0
    return None, len(aligned.decisions)
