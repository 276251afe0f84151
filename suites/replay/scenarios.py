"""What is run in a release's environment, and what the oracle says of it: the same on both sides of a fix.

python -m suites.replay.scenarios SCENARIO FOLDER prints the package versions and what was found, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from fixtures.tiny import build_tiny, tiny_transformer
from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.mounts import mounts
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.stock import quiet, stock_target
from oracle.report.claim import claim_bounded
from oracle.verdict.audit import audit
from oracle.verdict.compare import compare
from wanref.observe import TensorKey
from wanref.request import Request

REQUEST = Request(
    prompt="a red square",
    height=32,
    width=32,
    frames=5,
    steps=8,
    guidance_scale=4.0,
    seed=7,
    max_sequence_length=16,
    output_type="latent",
)
SIGMAS = (0.9, 0.6, 0.3)
SHIFT = 3.0


def two_pipelines(folder: Path) -> Iterator[str]:
    yield from _audited(folder, "cache-dit", ("repeats", "lifecycle"))


def enabled_late(folder: Path) -> Iterator[str]:
    yield from _audited(folder, "first-block-cache", ("enabled late",))


def plain_prompt(folder: Path) -> Iterator[str]:
    yield from _audited(folder, None, ("runs",))


def stochastic_euler(folder: Path) -> Iterator[str]:
    """The same request twice: one seed, one trace."""
    traces = [_euler(folder / name, stochastic_sampling=True) for name in ("once", "again")]
    yield from map(str, compare(traces[0], traces[1], "rerun").findings)


def given_timesteps(folder: Path) -> Iterator[str]:
    """The schedule that ran against the one that was asked for."""
    asked = [1000 * sigma for sigma in SIGMAS]
    ran = _euler(folder / "ran", asked, shift=SHIFT)
    wanted = _euler(folder / "asked", asked, shift=SHIFT, told=asked)
    yield from map(str, compare(wanted, ran, "rerun").findings)


def timesteps_and_sigmas(folder: Path) -> Iterator[str]:
    """The schedule that ran against the one that its own sigmas tell."""
    asked = [1000 * sigma for sigma in SIGMAS]
    ran = _euler(folder / "ran", asked, shift=SHIFT)
    own = _euler(folder / "own", asked, shift=SHIFT, by_sigma=True)
    yield from map(str, compare(own, ran, "rerun").findings)


def rotary_in_bf16(folder: Path) -> Iterator[str]:
    """T1 of the rotary tables' own use: one self-attention, for the same inputs, beside one with float32 tables."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    precise = tiny_transformer(blocks=1, head_dim=16).eval()
    precise.save_pretrained(folder / "transformer")
    base, candidate = (
        WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16).eval()
        for _ in range(2)
    )
    for (_, own), (_, exact) in zip(base.rope.named_buffers(), precise.rope.named_buffers(), strict=True):
        own.data = exact.data.clone()
    latents, hidden = torch.randn(1, 4, 6, 16, 16), torch.randn(1, 384, 32)
    outputs = []
    with torch.no_grad():
        for model in (precise, base, candidate):
            attention, rotary = model.blocks[0].attn1, model.rope(latents)
            outputs.append(attention(hidden.to(attention.to_q.weight.dtype), None, None, rotary))
    claim = claim_bounded(outputs[0], outputs[1], outputs[2])
    if not claim.holds:
        yield claim.sentence


SCENARIOS: dict[str, Callable[[Path], Iterator[str]]] = {
    each.__name__: each
    for each in (
        two_pipelines,
        enabled_late,
        stochastic_euler,
        given_timesteps,
        timesteps_and_sigmas,
        plain_prompt,
        rotary_in_bf16,
    )
}


def _audited(folder: Path, mount: str | None, checks: tuple[str, ...]) -> Iterator[str]:
    quiet()
    checkpoint = build_tiny(folder / "checkpoint")
    target = stock_target(checkpoint, None if mount is None else mounts(8)[mount])
    request = replace(REQUEST, steps=8)
    for result in audit(target, request, folder / "runs"):
        if result.check in ("runs", *checks) and result.holds is False:
            yield f"{result.check}: {result.says}"


def _euler(
    folder: Path,
    timesteps: list[float] | None = None,
    told: list[float] | None = None,
    by_sigma: bool = False,
    **options: object,
) -> Trace:
    """A few steps of the solver, as a trace. told, by_sigma: which timesteps its schedule names."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(**({"num_inference_steps": 4} if timesteps is None else {"timesteps": timesteps}))
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 4, 1, 4, 4, generator=generator)
    sigmas = scheduler.sigmas.tolist()
    named = told or ([1000 * sigma for sigma in sigmas] if by_sigma else scheduler.timesteps.tolist())
    emitter = Emitter(folder, Engine("diffusers.FlowMatchEuler", version("diffusers"), layers=1))
    steps = list(enumerate(scheduler.timesteps))
    request = emitter.begin(
        [
            {"index": i, "timestep": round(named[i], 2), "sigma": sigmas[i], "expert": "high", "guidance_scale": 1}
            for i, _ in steps
        ]
    )
    for index, timestep in steps:
        prediction = latents * 0.1
        for branch, block in (("cond", "embed"), ("cond", 0), ("cond", "project"), (None, "combine")):
            emitter.tensor(TensorKey(request, index, "high", branch, block), prediction)
        latents = scheduler.step(prediction, timestep, latents, generator=generator, return_dict=False)[0]
        emitter.tensor(TensorKey(request, index, "high", None, "scheduler"), latents)
    emitter.end(request)
    emitter.close()
    return open_trace(folder)


def main() -> None:
    name, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        found = list(SCENARIOS[name](Path(scratch)))
    print(json.dumps({"versions": {each: version(each) for each in ("diffusers", "cache-dit")}, "found": found}))


if __name__ == "__main__":
    main()
