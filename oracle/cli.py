"""The `wanref` command, to which the oracle adds its verbs.

The console script points here, so that wanref itself needs no import of the oracle.
"""

from __future__ import annotations

from wanref.cli import app


def main() -> None:
    app(prog_name="wanref")
