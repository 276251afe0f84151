"""T1 and T2 on a real bf16 DiT against the same weights in fp32: what each catches, and what each cannot.

The numbers of `equivalence.md`, again: unlocked, no rms sees a 1 % attention gain or a zeroed token; module-locked, T1
sees both.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel

from oracle.verdict.tolerance import (
    T1Limits,
    T1Measure,
    calibrate_t1,
    drift_limits,
    judge_t1,
    judge_t2,
    measure_t1,
    perturbation,
    relative_distance,
    start_limits,
    unit_roundoff,
)

pytestmark = pytest.mark.cpu

U = unit_roundoff("bfloat16")
BLOCKS, STEPS, FAULTY_BLOCK = 4, 8, 1
linear = F.linear
Change = Callable[[torch.Tensor], torch.Tensor]


def gain(output: torch.Tensor) -> torch.Tensor:
    return output * 1.01


def zeroed_token(output: torch.Tensor) -> torch.Tensor:
    output = output.clone()
    output[:, 17] = 0
    return output


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    torch.manual_seed(0)
    built = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=256,
        num_layers=BLOCKS,
        rope_max_seq_len=32,
    ).eval()
    # As a real checkpoint is: what diffusers keeps in float32 stays so.
    for name, parameter in built.named_parameters():
        if not any(part in WanTransformer3DModel._keep_in_fp32_modules for part in name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    return built


@torch.no_grad()
def predict(model: WanTransformer3DModel, latents: torch.Tensor, time: float = 700.0) -> torch.Tensor:
    text = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(2))
    dtype = model.patch_embedding.weight.dtype
    return model(latents.to(dtype), torch.tensor([time]), text.to(dtype)).sample


def latents_of(seed: int = 1) -> torch.Tensor:
    return torch.randn(1, 4, 2, 16, 16, generator=torch.Generator().manual_seed(seed))


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


@contextmanager
def faulty(module: torch.nn.Module, change: Change) -> Iterator[None]:
    hook = module.register_forward_hook(lambda _module, _inputs, output: change(output))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def linear_as(run: Callable[..., torch.Tensor]) -> Iterator[None]:
    F.linear = run  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = linear


@contextmanager
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def permuted_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seed: int) -> torch.Tensor:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    return linear(x[..., order], weight[:, order], bias)


def chunked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Split over the inner dimension, each part summed by itself, as split-K kernels do: partial sums in fp32."""
    parts = zip(x.float().chunk(4, -1), weight.float().chunk(4, -1), strict=True)
    total = sum(linear(part, columns) for part, columns in parts)
    assert isinstance(total, torch.Tensor)
    return (total if bias is None else total + bias.float()).to(x.dtype)


def unfused_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The bias added after the product was rounded."""
    return linear(x, weight) if bias is None else linear(x, weight) + bias


def linear_of(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias=None: run(x, weight, bias)


VARIANTS: dict[str, Callable[[], Any]] = {
    "two threads": two_threads,
    "math attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "permuted sums": lambda: linear_as(linear_of(partial(permuted_linear, seed=0))),
    "permuted otherwise": lambda: linear_as(linear_of(partial(permuted_linear, seed=1))),
    "split K": lambda: linear_as(linear_of(chunked_linear)),
    "bias apart": lambda: linear_as(linear_of(unfused_linear)),
}


class Locked:
    """One attention module, given the reference's inputs in both precisions."""

    def __init__(self, model: WanTransformer3DModel) -> None:
        self.module = model.blocks[FAULTY_BLOCK].attn1
        exact = copy.deepcopy(model).float()
        self.inputs: tuple[Any, ...] = ()
        hook = exact.blocks[FAULTY_BLOCK].attn1.register_forward_hook(self.keep)
        predict(exact, latents_of())
        hook.remove()
        first, *others = self.inputs
        self.inputs = (first.to(torch.bfloat16), *others)
        with torch.no_grad():
            self.reference = array(exact.blocks[FAULTY_BLOCK].attn1(self.inputs[0].float(), *others))
        self.base = self.run()

    def keep(self, _module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
        self.inputs = inputs

    @torch.no_grad()
    def run(self) -> np.ndarray:
        return array(self.module(*self.inputs))

    def measure(self) -> T1Measure:
        return measure_t1(self.reference, self.base, self.run(), U)


@pytest.fixture(scope="module")
def locked(model: WanTransformer3DModel) -> Locked:
    return Locked(model)


@pytest.fixture(scope="module")
def limits(locked: Locked) -> T1Limits:
    measures = []
    for name, variant in VARIANTS.items():
        with variant():
            measures.append(locked.measure())
        print(f"\n{name}: {measures[-1]}", end="")
    locked.module.fuse_projections()
    measures.append(locked.measure())
    locked.module.unfuse_projections()
    print(f"\nfused qkv: {measures[-1]}", end="")
    return calibrate_t1(measures)


def test_real_benign_variants_calibrate_under_the_cap(limits: T1Limits) -> None:
    print(f"\n{limits}")
    assert 1.25 <= limits.rho <= 2.5
    assert limits.beta == U


@pytest.mark.parametrize(("change", "caught_by"), [(gain, {"rho", "beta"}), (zeroed_token, {"token_rho"})])
def test_module_locked_t1_catches_what_unlocked_misses(
    model: WanTransformer3DModel, locked: Locked, limits: T1Limits, change: Change, caught_by: set[str]
) -> None:
    with faulty(locked.module, change):
        measure = locked.measure()
        free = predict(model, latents_of())
    print(f"\nlocked {change.__name__}: {measure}")
    assert caught_by <= dict(judge_t1(measure, limits)).keys()
    assert caught_by <= dict(judge_t1(measure, start_limits(U))).keys()
    exact = array(predict(copy.deepcopy(model).float(), latents_of()))
    unlocked = measure_t1(exact, array(predict(model, latents_of())), array(free), U)
    print(f"unlocked {change.__name__}: {unlocked}")
    assert unlocked.rho < 2, "unlocked, the arithmetic of the other modules hides it"


def free_run(model: WanTransformer3DModel, start: torch.Tensor, change: Change | None = None) -> list[np.ndarray]:
    """A denoise of 8 Euler steps in bf16; `change` is of block 1's output, at step 4 only."""
    latents, out = start, []
    for step in range(STEPS):
        if change is not None and step == 4:
            with faulty(model.blocks[FAULTY_BLOCK], change):
                velocity = predict(model, latents, 1000.0 * (1 - step / STEPS))
        else:
            velocity = predict(model, latents, 1000.0 * (1 - step / STEPS))
        latents = latents - velocity.float() / STEPS
        out.append(latents.numpy())
    return out


def test_t2_catches_a_lost_block_and_misses_a_stale_residual(model: WanTransformer3DModel) -> None:
    base = free_run(model, latents_of())

    def drift(run: list[np.ndarray]) -> list[float]:
        return [relative_distance(b, c) for b, c in zip(base, run, strict=True)]

    start = latents_of()
    starts = [start + torch.from_numpy(perturbation(tuple(start.shape), U, seed)) for seed in range(3)]
    allowed = drift_limits([drift(free_run(model, other)) for other in starts], kappa=2)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.blocks[FAULTY_BLOCK].register_forward_hook(lambda _m, i, o: seen.append((i[0], o)))
    free_run(model, start)
    hook.remove()
    stale = seen[3][1] - seen[3][0]
    after_stale = drift(free_run(model, start, lambda _: seen[4][0] + stale))
    after_loss = drift(free_run(model, start, lambda output: output * 3))
    print(f"\nlimits {allowed}\nstale {after_stale}\nlost {after_loss}")
    assert max(after_stale) > 0
    assert judge_t2(after_stale, allowed) is None, "T2 is not supposed to see this: that is why it never stands alone"
    assert judge_t2(after_loss, allowed) == 4
