"""What changes in a message from one run to the next, and says nothing of what went wrong."""

from __future__ import annotations

import re

_TIME = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_RULES = (
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<address>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?\b"), "<time>"),
    (re.compile(r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b"), "<time>"),
    (re.compile(rf"\b{_TIME} ?(?:ns|us|µs|ms|s|sec|secs|seconds?|min|minutes?|h|hours?)\b"), "<time>"),
    # The folder of a file moves; its name stays, unless it was drawn at random.
    (re.compile(r"(?<![\w.~])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+~\[\]=,-]+)*[/\\](?=[\w.@+~-])"), "<folder>/"),
    (re.compile(r"\btmp[a-z0-9_]{8}\b"), "<random>"),
    # A digest has digits and letters: a number has no letters, a word no digits.
    (re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b"), "<digest>"),
    (re.compile(r"\b(pid|process|thread)([ =:]+)\d+\b", re.IGNORECASE), r"\1\2<number>"),
    (re.compile(r"\b(localhost|\d+\.\d+\.\d+\.\d+):\d+\b"), r"\1:<port>"),
    (re.compile(r"\bgw\d+\b"), "<worker>"),
)


def stable(message: str) -> str:
    """The message without paths' folders, digests, addresses, times, and numbers of processes, ports and workers."""
    for pattern, stands_for in _RULES:
        message = pattern.sub(stands_for, message)
    return message
