"""What a rank that does not come back waits for, and whom that one waits for in its turn.

Read off the rank's own stack when the question comes: a run that goes well pays nothing for it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wanref.exchange import Exchange
from wanref.observe import ExchangeEvent
from wanref.schedule import Step

_TOWARDS = {"send": "to", "delivered": "to", "receive": "from"}
"""Exchanges between two ranks. All others are collective: every rank of a group enters the same one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands.

    place: its innermost function, with file and line. waits: the exchange that it is in. step: the index of the step
    that it is at, None between steps. left: of the last step that it has left, -1 before the first.
    """

    place: str
    waits: ExchangeEvent | None = None
    step: int | None = None
    left: int = -1


def read_standing(thread: int) -> Standing:
    """Of the thread of this process that has this identifier."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[thread])]
    code, line = frames[0].f_code, frames[0].f_lineno
    place = f"{code.co_name} ({Path(code.co_filename).name}:{line})"
    values = [frame.f_locals.get("step") for frame in frames]
    step = next((value.index for value in values if isinstance(value, Step)), None)
    waits = None
    for frame in frames:
        exchange = frame.f_locals.get("self")
        if isinstance(exchange, Exchange):
            # An observer is told of an exchange before the call: while it is, the rank is not in the call yet.
            observed = frame.f_code is Exchange._emit.__code__
            waits = exchange.log[-1] if exchange.log and not observed and not exchange.log[-1].completed else None
            break
    if step is None:
        return Standing(place, waits)
    # The loop agrees before each step and broadcasts after the last one: who waits there is at none.
    if waits is not None and waits.kind == "agree":
        return Standing(place, waits, left=step - 1)
    if waits is not None and waits.kind == "broadcast":
        return Standing(place, waits, left=step)
    return Standing(place, waits, step, step - 1)


def tell_stall(rank: int, standings: Mapping[int, Standing | None], ended: Mapping[int, str]) -> str:
    """What `rank` waits for, and so on along the ranks that wait, to one that does not or to a ring of them.

    standings: of the ranks that did not come back, None for one that does not answer. ended: of the others, as
    `has returned`.
    """
    told = [rank]
    clauses = [_clause(standings[rank], None)]
    while (peer := _awaited(told[-1], standings)) is not None:
        if peer in told:
            return "; ".join(clauses) + ": a deadlock"
        said = ended[peer] if peer in ended else _clause(standings[peer], standings[told[-1]])
        clauses.append(f"rank {peer} {said}")
        told.append(peer)
    return "; ".join(clauses)


def _awaited(rank: int, standings: Mapping[int, Standing | None]) -> int | None:
    """The first rank that has not entered the exchange that `rank` waits in."""
    standing = standings.get(rank)
    if standing is None or standing.waits is None:
        return None
    return next((peer for peer in standing.waits.peers if not _is_there(peer, rank, standing.waits, standings)), None)


def _is_there(peer: int, rank: int, waits: ExchangeEvent, standings: Mapping[int, Standing | None]) -> bool:
    """Numbers count the exchanges of one rank, so that a collective one is known by its kind and its ranks."""
    other = standings.get(peer)
    if waits.kind in _TOWARDS or other is None or other.waits is None:
        return False
    return other.waits.kind == waits.kind and {peer, *other.waits.peers} == {rank, *waits.peers}


def _clause(standing: Standing | None, waiting: Standing | None) -> str:
    """`waiting`: of the rank that waits for this one, which may be at a step that this one has left."""
    if standing is None:
        return "does not answer: it holds its interpreter"
    words = []
    if waiting is not None and waiting.step is not None and standing.left >= waiting.step:
        words.append(f"has left step {waiting.step} and")
    if standing.waits is None:
        words.append(f"is in {standing.place}")
    else:
        words.append(f"waits in {_name(standing.waits)}")
    if standing.step is not None:
        words.append(f"at step {standing.step}")
    return " ".join(words)


def _name(waits: ExchangeEvent) -> str:
    ranks = f"rank{'s' if len(waits.peers) > 1 else ''} {', '.join(map(str, waits.peers))}"
    return f"{waits.kind} #{waits.sequence} {_TOWARDS.get(waits.kind, 'with')} {ranks}"
