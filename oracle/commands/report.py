"""`wanref report`: a page of what `wanref verify` left. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanref.cli import app, console, usage_errors


@app.command(epilog="Example: `wanref report traces --output report.html`")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the traces of `wanref verify`.")],
    output: Annotated[Path | None, typer.Option(help="NAME.html; default: report.html in the folder.")] = None,
) -> None:
    """Judge the traces anew, and show all of it on one HTML page that needs no network.

    Exit code 0 if the page was written, whatever it shows: whether the claims hold is `verify`'s to say.
    """
    from oracle.report.page import NAME, write_page
    from oracle.verdict.matrix import read_matrix

    target = folder / NAME if output is None else output
    with usage_errors():
        read_matrix(folder)
        if target.suffix != ".html" or target.is_dir() or not target.parent.is_dir():
            raise ValueError(f"output={str(target)!r} is not accepted: give NAME.html in a folder that exists.")
    page = write_page(folder, target)
    for line in (page.headline, *(f"stale: {says}" for says in page.stale), f"page     {target}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
