"""The `wanref` command as the tests call it: in this process, or as the console script that is installed."""

import sys
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from oracle.cli import app

WANREF = str(Path(sys.executable).with_name("wanref"))
PROMPT = "a red square moving left"
STEPS = 3
SHOW = ("--prompt", PROMPT, "--steps", str(STEPS), "--seed", "7")


def invoke(*arguments: object, **environment: str) -> Result:
    """Run it in this process; what it sets in the environment for the ranks that it starts is undone."""
    runner = CliRunner(env={"OMP_NUM_THREADS": "1", **environment})
    return runner.invoke(app, [str(argument) for argument in arguments], prog_name="wanref")
