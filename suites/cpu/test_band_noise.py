"""The band on real runs that do not repeat: how often it alarms for nothing, and what it sees.

Each run is a whole denoise of a random Wan transformer whose order of summation is drawn anew: the matmuls' inner
dimension in random pieces, the tokens of attention permuted, the threads (rarely) two, and now and then one unit in the
last place of a block's output. Nothing repeats from the first block on.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel

from fixtures.tiny import tiny_transformer
from oracle.verdict.band import BandVerdict, MappedRun, judge_band, judge_distances, measure_distances

pytestmark = pytest.mark.cpu

Key = tuple[int, str]
STEPS, BLOCKS, BASE, HEAD, RATE = 6, 3, 5, 3, 0.05
POOL, FAULTY = 60, 12
FAULT_AT: Key = (2, "block1")
linear, attention = F.linear, F.scaled_dot_product_attention


@contextmanager
def noisy(seed: int) -> Iterator[np.random.Generator]:
    """Sums in an order of its own."""
    draw = np.random.default_rng(seed)

    def split_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape[1] < 4:
            return linear(x, weight, bias)
        cut = int(draw.integers(1, weight.shape[1]))
        out = linear(x[..., :cut], weight[:, :cut]) + linear(x[..., cut:], weight[:, cut:])
        return out if bias is None else out + bias

    def permuted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        order = torch.from_numpy(draw.permutation(key.shape[2]))
        return attention(query, key[:, :, order], value[:, :, order], **options)

    threads = torch.get_num_threads()
    torch.set_num_threads(2 if draw.random() < 0.05 else 1)
    F.linear, F.scaled_dot_product_attention = split_linear, permuted  # type: ignore[assignment]
    try:
        yield draw
    finally:
        F.linear, F.scaled_dot_product_attention = linear, attention
        torch.set_num_threads(threads)


Fault = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@torch.no_grad()
def denoise(model: WanTransformer3DModel, seed: int, fault: Fault | None = None) -> MappedRun[Key]:
    """One run; `fault` changes what block 1 adds at step 2, and also sees what it added at the step before."""
    arrays: dict[Key, np.ndarray] = {}
    source = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 4, 1, 8, 8, generator=source)
    text = torch.randn(1, 6, 16, generator=source).to(model.dtype)
    step, before = 0, None

    def watch(index: int, inputs: Any, output: torch.Tensor, draw: np.random.Generator) -> torch.Tensor:
        nonlocal before
        if index == 1:
            added = output - inputs[0]
            if fault is not None and step == 2:
                output = inputs[0] + fault(added, before)
            before = added
        if draw.random() < 0.5:
            place = tuple(int(draw.integers(n)) for n in output.shape)
            output = output.clone()
            output[place] = torch.nextafter(output[place], torch.tensor(math.inf, dtype=output.dtype))
        arrays[step, f"block{index}"] = output.float().numpy().copy()
        return output

    with noisy(seed) as draw:
        hooks = [
            block.register_forward_hook(lambda _, inputs, output, i=i: watch(i, inputs, output, draw))
            for i, block in enumerate(model.blocks)
        ]
        try:
            for step in range(STEPS):
                time = torch.tensor([1000.0 * (1 - step / STEPS)])
                latents = latents - model(latents.to(model.dtype), time, text).sample.float() / STEPS
                arrays[step, "latents"] = latents.numpy().copy()
        finally:
            for hook in hooks:
                hook.remove()
    return MappedRun(arrays)


def gain(size: float) -> Fault:
    return lambda added, _: added * (1 + size)


def zeroed_token(added: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    return torch.cat((added[:, :3], added[:, 3:4] * 0, added[:, 4:]), dim=1)


def stale(added: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    assert before is not None
    return before


FAULTS: dict[str, Fault] = {f"gain {s:.0e}": gain(s) for s in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)}
FAULTS |= {"zeroed token": zeroed_token, "stale residual": stale}


class Pool:
    """Runs, and the distances between all of them, once: a comparison is a choice of rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = tiny_transformer(BLOCKS).to(dtype).eval()
        self.runs = [denoise(self.model, seed) for seed in range(POOL)]
        for number, fault in enumerate(FAULTS.values()):
            self.runs += [denoise(self.model, 1000 * (number + 1) + seed, fault) for seed in range(FAULTY)]
        self.distances = list(measure_distances(self.runs[:POOL], self.runs[POOL:]))

    def judge(self, chosen: np.ndarray, head: int = HEAD) -> BandVerdict[Key]:
        rows = [(key, pairs[np.ix_(chosen, chosen)]) for key, pairs in self.distances if pairs is not None]
        return judge_distances(rows, len(chosen) - head, head, RATE, must_see=math.inf)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(getattr(torch, request.param))


@pytest.mark.parametrize(("base", "head"), [(5, 3), (5, 2), (8, 4)])
def test_a_thousand_comparisons_of_base_with_base_keep_the_rate(pool: Pool, base: int, head: int) -> None:
    """The labels are drawn at random, so the alarms are independent, each of at most the rate: 3 sigma is binomial."""
    draw = np.random.default_rng(base * head)
    drawn = 1000 if (base, head) == (5, 3) else 300
    kinds = [pool.judge(draw.permutation(POOL)[: base + head], head).kind for _ in range(drawn)]
    alarms, sigma = kinds.count("outside noise"), math.sqrt(drawn * RATE * (1 - RATE))
    print(f"\n{base}+{head}: {alarms} alarms, {kinds.count('too noisy to say')} too noisy, of {drawn}")
    assert alarms <= drawn * RATE + 3 * sigma
    assert alarms > 0, "a band that never alarms would pass as well"


def test_what_it_sees(pool: Pool) -> None:
    """A fault far above the noise is always found, and where it is."""
    draw = np.random.default_rng(3)
    for number, name in enumerate(FAULTS):
        verdicts = []
        for _ in range(100):
            heads = POOL + number * FAULTY + draw.permutation(FAULTY)[:HEAD]
            verdicts.append(pool.judge(np.concatenate((draw.permutation(POOL)[:BASE], heads))))
        found = [v for v in verdicts if v.kind == "outside noise"]
        right = sum(v.key == FAULT_AT for v in found)
        seen = np.median([next(b for b in v.keys if b.key == FAULT_AT).visible for v in verdicts])
        noise = np.median([next(b for b in v.keys if b.key == FAULT_AT).base for v in verdicts])
        print(
            f"\n{name}: found {len(found)}, pointed right {right} of 100; noise {noise:.1e}, visible {seen:.1e}", end=""
        )
        early = sum(v.key is not None and pool_order(v) < 0 for v in found)
        assert early <= 100 * RATE + 3 * math.sqrt(100 * RATE), "keys before the fault are base against base"
        if name in ("gain 1e-01", "zeroed token", "stale residual"):
            assert len(found) == 100
            assert right >= 85, "the rest are early keys, bounded above"


def pool_order(verdict: BandVerdict[Key]) -> int:
    keys = [band.key for band in verdict.keys]
    assert verdict.key is not None
    return keys.index(verdict.key) - keys.index(FAULT_AT)


def test_the_whole_way_from_runs_to_a_verdict(pool: Pool) -> None:
    fault = pool.runs[POOL + list(FAULTS).index("zeroed token") * FAULTY :][:HEAD]
    assert judge_band(pool.runs[:5], fault).key == FAULT_AT
    assert judge_band(pool.runs[:5], pool.runs[5:8], must_see=math.inf).kind != "decisions changed"
