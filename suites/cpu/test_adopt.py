"""`docs/adopt.md`, followed to the letter in a folder of its own, with the wheel that a reader would install."""

import os
import re
import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adopt.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


COMMANDS = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's repository, with an environment that has this one's libraries, but for wanref itself."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "wanref").symlink_to(ROOT)
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    python = str(folder / "env" / "bin" / "python")
    words = {"wanref": [str(folder / "env" / "bin" / "wanref")], "python": [python]}.get(
        program, [python, "-m", program]
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV", "ORACLE"))}
    # No index and no second copy of the libraries: what is installed is what lies in the checkout.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment = {**kept, **offline, "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*words, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_page_leads_from_nothing_to_a_failing_and_a_passing_test(repository: Path) -> None:
    install, fails, show, passes, summary = COMMANDS
    engine, tests = blocks("python")
    (sentence,) = blocks("text")

    done = run(install, repository)
    assert done.returncode == 0, done.stdout + done.stderr
    where = run('python -c "import oracle; print(oracle.__file__)"', repository).stdout
    assert where.startswith(str(repository / "env")), "the oracle is the one that was installed"

    (repository / "engine.py").write_text(engine)
    (repository / "test_cache.py").write_text(tests)
    failed = run(fails, repository)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "1 failed, 1 passed" in failed.stdout
    assert sentence.strip() in failed.stdout

    shown = run(show, repository)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "reuse" in shown.stdout

    (repository / "engine.py").write_text(engine.replace('return "residual"', "return branch"))
    passed = run(passes, repository)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "2 passed" in passed.stdout
    summed = run(summary, repository)
    assert summed.returncode == 0, summed.stdout + summed.stderr
