"""Peak memory of the weights of one rank, PP=2 over PP=1.

What counts is the highest resident memory (Linux's VmHWM) while a rank's part of the transformer is loaded, less the
resident memory before: parameters, and whatever loading holds beside them, such as pages of the mapped file. The text
encoder and the decoder, which PP does not split, are left out. Of the two stages the larger one counts.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from oracle.evidence.ranks import RankPool
from suites.bench.figure import Figure
from wanref import Topology, open_checkpoint
from wanref.weights import load_transformer


def measure(checkpoint: Path) -> list[Figure]:
    whole = _load_in_fresh_process(checkpoint, pp=1, stage=0)
    halves = [_load_in_fresh_process(checkpoint, pp=2, stage=stage) for stage in range(2)]
    peak, parameters = (max(values) for values in zip(*halves, strict=True))
    return [
        Figure(
            name="pp2_rank_weights_over_pp1",
            values=(peak / whole[0],),
            at_most=0.6,
            note=f"peak {peak >> 20} of {whole[0] >> 20} MiB; parameters alone {parameters / whole[1]:.2f}",
        )
    ]


def _load_in_fresh_process(checkpoint: Path, pp: int, stage: int) -> tuple[int, int]:
    # A pool of its own: its rank is forked from a server that has imported everything and loaded nothing.
    with RankPool() as pool:
        (measured,) = pool.run(1, _load, checkpoint, pp, stage)
    return measured


def _load(checkpoint: Path, pp: int, stage: int) -> tuple[int, int]:
    opened = open_checkpoint(checkpoint)
    blocks = Topology(pp=pp).blocks(stage, opened.transformer["num_layers"])
    before = _resident("VmRSS")
    model = load_transformer(
        opened.folder("high"), opened.transformer, blocks, dtype=torch.float32, device=torch.device("cpu")
    )
    parameters = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    peak = _resident("VmHWM") - before
    assert peak >= parameters, f"loading {parameters} bytes raised the peak by {peak}: an earlier peak hides it"
    return peak, parameters


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024
