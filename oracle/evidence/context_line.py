"""What engines log of Cache-DiT: its context lines, such as `DBCache_F1B0_W4I1M0MC3_R0.24_N17_CFG1`, read as facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LINE = re.compile(
    r"(?P<method>DBCache|DBPrune)_F(?P<fn>\d+)B(?P<bn>\d+)"
    r"_W(?P<warmup>\d+)I(?P<interval>\d+)M(?P<most>\d+)MC(?P<in_a_row>\d+)"
    r"_R(?P<threshold>\d+(?:\.\d+)?(?:e-?\d+)?)"
    r"(?:_SCM(?P<mask>[01]+)_(?P<policy>dynamic|static))?"
    r"(?:_N(?P<steps>\d+))?"
    r"(?:_FR(?P<refresh>\d+)_(?:once|repeat))?"
    r"(?:_CFG(?P<separate_cfg>[01]))?"
    r"(?:_P\d+(?:\.\d+)?)?(?:_(?:T\d+O\d+|DMDH\w+|FoCa|NONE))?"  # of a summary: pruned share, calibrator
    r"(?![\w.])"
    r"|(?P<unread>(?:DBCache|DBPrune)_F\d\S*)"
)


class ContextLineError(ValueError):
    """A line that begins as a context line of Cache-DiT does, and goes on otherwise."""


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """The options of one cached transformer, as Cache-DiT 1.5 prints them.

    most, in_a_row: the largest number of reused steps, in all and in a row. The line prints 0 both for 0 and for no
    limit, and None stands for either. mask: 1 computes. steps, separate_cfg: None where the line has none.
    """

    text: str
    line: int
    method: str
    fn: int
    bn: int
    warmup: int
    interval: int
    most: int | None
    in_a_row: int | None
    threshold: float
    mask: str | None
    static: bool
    steps: int | None
    refresh: int | None
    separate_cfg: bool | None


def read_context_lines(log: Iterable[str]) -> Iterator[ContextFacts]:
    """Every context in a log, in order, with its line's number. Raises ContextLineError for one of another form."""
    for number, line in enumerate(log, 1):
        for found in _LINE.finditer(line):
            if found["unread"]:
                raise ContextLineError(
                    f"line {number}: {found['unread']!r} is not a context line that this reader knows."
                )
            yield _facts(found, number)


def _facts(found: re.Match[str], line: int) -> ContextFacts:
    def number(name: str) -> int | None:
        return None if found[name] is None else int(found[name])

    return ContextFacts(
        text=found[0],
        line=line,
        method=found["method"],
        fn=int(found["fn"]),
        bn=int(found["bn"]),
        warmup=int(found["warmup"]),
        interval=int(found["interval"]),
        most=int(found["most"]) or None,
        in_a_row=int(found["in_a_row"]) or None,
        threshold=float(found["threshold"]),
        mask=found["mask"],
        static=found["policy"] == "static",
        steps=number("steps"),
        refresh=number("refresh"),
        separate_cfg=None if found["separate_cfg"] is None else found["separate_cfg"] == "1",
    )
