"""Session fixtures of the suites: ranks that many tests reuse, and tiny checkpoints built when first asked for.

torch is imported only when a test asks for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fixtures.tiny import TinySpec
    from oracle.evidence.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes over gloo, one pool for each pytest worker."""
    from oracle.evidence.ranks import RankPool

    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(layout="dual", ...)`: the folder of the tiny checkpoint of that spec, built once a session."""
    from fixtures.tiny import TinySpec, build_tiny
    from suites.support import silence

    silence()
    built: dict[TinySpec, Path] = {}

    def checkpoint(**options: Any) -> Path:
        spec = TinySpec(**options)
        if spec not in built:
            built[spec] = build_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", spec)
        return built[spec]

    return checkpoint
