"""The command's own share of its start, each time in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fixtures.tiny import build_tiny
from suites.bench.figure import Figure, interleave, ratios

REPETITIONS = 3
# Both sides of the ratio leave at once: taking an interpreter with torch down is nobody's start.
IMPORTS = """
import os
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel

os._exit(42)
"""
COMMAND = "from oracle.cli import main; main()"
# The command itself, but for its progress bar, which ends the process where the first step begins.
UP_TO_FIRST_STEP = f"""
import os
from wanref import generate
from wanref.observe import StepEvent

class FirstStep(generate._StepBar):
    def __call__(self, event):
        if isinstance(event, StepEvent):
            os._exit(42)

generate._StepBar = FirstStep
{COMMAND}
"""


def measure() -> list[Figure]:
    """From the shell to the first denoising step on a tiny checkpoint, over the import of the classes it needs."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_tiny(Path(folder) / "tiny")
        output = str(Path(folder) / "latents.safetensors")
        arguments = ("generate", str(checkpoint), "--prompt", "a red square", "--steps", "2", "--output", output)
        times = interleave(
            REPETITIONS,
            {
                "first step": lambda: _seconds(42, UP_TO_FIRST_STEP, *arguments),
                "imports": lambda: _seconds(42, IMPORTS),
                "help": lambda: _seconds(0, COMMAND, "--help"),
            },
        )
    return [
        Figure(
            name="shell_to_first_step_s",
            values=ratios(times["first step"], times["imports"]),
            at_most=1.3,
            note=f"a ratio: {min(times['first step']):.1f} s over {min(times['imports']):.1f} s of imports, at best",
        ),
        Figure(name="help_s", values=times["help"], at_most=0.5, note="seconds"),
    ]


def _seconds(status: int, program: str, *arguments: str) -> float:
    started = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - started
    assert run.returncode == status, f"exit code {run.returncode}, not {status}: {run.stderr}"
    return seconds
