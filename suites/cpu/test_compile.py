"""With `compile=True` one graph serves every block, step count and cache: nothing is compiled again. Counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from suites.cached import BASE, cache_for, check_fired, run_cached
from suites.support import load_engine

pytestmark = pytest.mark.cpu

CACHES = (
    None,
    "teacache:coefficients=1/0,dialect=teacache,threshold=0.3",
    "teacache:coefficients=1/0,dialect=vllm-omni,threshold=0.3",
    "cache-dit:threshold=0.5",
    "cache-dit:threshold=0.5,taylorseer_order=1",
    "fixed:steps=*.*=3+20-24",
)


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """Graphs as dynamo hands them to a backend; this one runs them as they are, and saves a minute of inductor."""
    graphs: list[torch.fx.GraphModule] = []
    compile_with_inductor = torch.compile

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compile_with_inductor(function, backend=counting, **options)
    )
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["single", "dual"])
def test_step_counts_and_caches_in_turn_compile_nothing_after_the_first_request_of_a_shape(
    tiny: Callable[..., Path], compiled_graphs: list[torch.fx.GraphModule], layout: str
) -> None:
    engine = load_engine(tiny(layout=layout), compile=True)
    counts: list[int] = []
    for request in (BASE, replace(BASE, width=48)):
        run_cached(engine, replace(request, steps=27), None)
        counts.append(len(compiled_graphs))
        for steps in (27, 40, 50):
            for text in CACHES:
                ran = run_cached(engine, replace(request, steps=steps), text and cache_for(text, layout, 1))
                if text is not None:
                    check_fired([ran])
                assert len(compiled_graphs) == counts[-1], (steps, text)
    assert 0 < counts[0] < counts[1], "a new shape is compiled: the counter counts"
    assert counts[0] == 1, "one graph for all blocks of all experts"
    assert torch._dynamo.utils.counters["graph_break"] == {}
