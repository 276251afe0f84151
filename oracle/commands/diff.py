"""`wanref diff`: runs that do not repeat, within their noise or not; or two outputs. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wanref.cli import app, console, usage_errors


@app.command(epilog="Example: `wanref diff base/0 base/1 base/2 base/3 base/4 --against head/0 --against head/1`")
def diff(
    base: Annotated[list[Path], typer.Argument(help="Traces of at least 5 runs at level tensor; or one output.")],
    against: Annotated[list[Path], typer.Option(help="A trace of the head, repeat, at least twice; or one output.")],
    locked: Annotated[Path | None, typer.Option(help="Trace of the schedule that every run was to replay.")] = None,
    alarm_rate: Annotated[float, typer.Option(help="Share of false alarms that is accepted.", min=0, max=1)] = 0.05,
) -> None:
    """Say whether runs that do not repeat are the same within their noise. Exit code 0 only if they are.

    Of two outputs (videos, folders of frames, latents) say how far apart they are. Exit code 0 only for equal bytes.
    """
    from oracle.evidence.outputs import is_output

    if any(map(is_output, (*base, *against))):
        _diff_outputs(base, against)
        return
    from oracle.evidence.reader import open_trace
    from oracle.verdict.runs import compare_runs

    with usage_errors():
        schedule = None if locked is None else open_trace(locked)
        verdict = compare_runs([*map(open_trace, base)], [*map(open_trace, against)], schedule, alarm_rate)
    console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"p {verdict.p_value:.4g}, alarm rate {verdict.alarm_rate:g} (so few runs allow {verdict.attainable:.4g} at "
        f"best); smallest visible relative distance {verdict.visible:.3g}",
        highlight=False,
        soft_wrap=True,
    )
    if verdict.kind != "same within noise":
        raise typer.Exit(1)


def _diff_outputs(base: list[Path], against: list[Path]) -> None:
    from oracle.campaign.metrics import WINDOW, ssim
    from oracle.evidence.outputs import read_output
    from oracle.verdict.outputs import compare_outputs, is_frames

    with usage_errors():
        if len(base) != 1 or len(against) != 1:
            raise ValueError(f"{len(base)} outputs against {len(against)} are not accepted: give one of each.")
        one, other = read_output(base[0]), read_output(against[0])
        difference = compare_outputs(one, other)
    facts = {
        "digests": " ".join(digest[:16] for digest in difference.digests),
        "differing": f"{difference.differing} of {difference.elements}",
        "MAE": f"{difference.mae:.6g}",
        "RMSE": f"{difference.rmse:.6g}",
        "relative": "none" if difference.relative is None else f"{difference.relative:.6g}",
        "largest": f"{difference.largest:.6g}",
    }
    if difference.psnr is not None:
        facts["PSNR"] = f"{difference.psnr:.4g} dB"
    if is_frames(one):
        large = min(one.shape[1:3]) >= WINDOW
        facts["SSIM"] = f"{ssim(one, other):.6f}" if large else f"none: frames are below {WINDOW} x {WINDOW}"
    for name, value in facts.items():
        console.print(f"{name:10} {value}", markup=False, highlight=False, soft_wrap=True)
    if not difference.same:
        raise typer.Exit(1)
