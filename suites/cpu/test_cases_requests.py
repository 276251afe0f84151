"""Public bug reports on requests, schedules, experts and configuration, each as what is right instead.

Sources are repository#thread: omni vllm-project/vllm-omni, sgl sgl-project/sglang, dyn ai-dynamo/dynamo, cdit
vipshop/cache-dit, dfs huggingface/diffusers, fv hao-ai-lab/FastVideo, dsyn modelscope/DiffSynth-Studio, wan22
Wan-Video/Wan2.2, mold utensils/mold, mstar mstar-project/mstar, xllm xLLM-AI/xllm, MOVA OpenMOSS/MOVA.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from wanref import CheckpointError, EngineDefaults, Output, Request, WanReference, open_checkpoint, resolve
from wanref.observe import Event, TensorEvent, TensorKey
from wanref.schedule import make_solver

pytestmark = pytest.mark.cpu

GOLDENS = json.loads((Path(__file__).parents[2] / "fixtures/goldens/schedules.json").read_text())
SCHEDULERS = ["unipc", "euler", "dpm++"]


@dataclass
class Bench:
    """An engine of one rank, and what it ran in its last request."""

    engine: WanReference
    keys: list[TensorKey]

    def run(self, **values: Any) -> Output:
        self.keys.clear()
        return self.engine(Request(**{"prompt": "a red square", "seed": 1, "output_type": "latent", **values}))

    def forwards(self, branch: str, expert: str | None = None) -> int:
        """How often the model has predicted for a branch."""
        return sum(k.block == "project" and k.branch == branch and expert in (None, k.expert) for k in self.keys)

    @property
    def solver_steps(self) -> int:
        return sum(key.block == "scheduler" for key in self.keys)


@pytest.fixture(scope="module")
def bench(tiny: Callable[..., Path]) -> Callable[..., Bench]:
    """`bench("dual")`: a tiny engine of that layout."""
    made: dict[tuple[str, str], Bench] = {}

    def make(layout: str, dtype: str = "float32") -> Bench:
        if (layout, dtype) not in made:
            keys: list[TensorKey] = []

            def observe(event: Event) -> None:
                if isinstance(event, TensorEvent):
                    keys.append(event.key)

            engine = WanReference.from_pretrained(tiny(layout=layout), dtype=dtype, observer=observe)
            made[layout, dtype] = Bench(engine, keys)
        return made[layout, dtype]

    return make


# Guidance and negative prompts.


def test_C5_an_omitted_guidance_scale_2_is_guidance_scale_in_both_stages(bench: Callable[..., Bench]) -> None:
    """omni#5615, omni#5415: an internal filler of 1.0 was taken for the user's, and the low stage lost its guidance."""
    dual = bench("dual")
    output = dual.run(steps=8, flow_shift=5.0, guidance_scale=4)
    assert [step.guidance_scale for step in output.schedule] == [4.0] * 8
    assert dual.forwards("cond") == dual.forwards("uncond") == 8


@pytest.mark.parametrize(
    ("asked", "effective", "negatives"),
    [(0, 0.0, 0), (0.0, 0.0, 0), (1, 1.0, 0), (1.0, 1.0, 0), (5, 5.0, 4), (None, 5.0, 4)],
)
def test_C7_0_and_1_and_integers_are_taken_as_they_are(
    bench: Callable[..., Bench], asked: float | None, effective: float, negatives: int
) -> None:
    """omni#922, omni#4998, omni#4999, dyn#9111, wan22 text2video.py: a falsy test replaced 0, isinstance broke on 1."""
    single = bench("single")
    output = single.run(steps=4, guidance_scale=asked)
    assert output.request.guidance_scale == effective
    assert output.request.sources["guidance_scale"] == ("engine" if asked is None else "request")
    assert (single.forwards("cond"), single.forwards("uncond")) == (4, negatives)


def test_C9_absent_empty_and_given_negative_prompts_all_run_and_are_told_apart(bench: Callable[..., Bench]) -> None:
    """mstar#165, wan22 text2video.py: a missing negative prompt turned guidance off, an empty one became a default."""
    outputs, single = {}, bench("single")
    for source, negative in [("absent", None), ("empty", ""), ("text", "blue circle")]:
        outputs[source] = single.run(steps=2, guidance_scale=4, negative_prompt=negative)
        assert outputs[source].request.sources["negative_prompt"] == source
        assert single.forwards("uncond") == 2
    assert torch.equal(outputs["absent"].latents, outputs["empty"].latents)
    assert not torch.equal(outputs["empty"].latents, outputs["text"].latents)
    assert len({output.request.digest() for output in outputs.values()}) == 3


# Experts.


def test_E1_each_expert_is_told_the_steps_that_it_runs(bench: Callable[..., Bench]) -> None:
    """dfs#14025, dfs#14027, xllm#2226, cdit#210: each expert was told the whole count, though it runs a part."""
    dual = bench("dual")
    output = dual.run(steps=8, flow_shift=5.0, boundary_ratio=0.875)
    assert output.schedule.split == {"high": 4, "low": 4}
    assert {expert: dual.forwards("cond", expert) for expert in ("high", "low")} == output.schedule.split


def test_E4_the_boundary_is_of_shifted_timesteps_not_of_step_indices(bench: Callable[..., Bench]) -> None:
    """MOVA#32, fv#1370, fv#804, dsyn#806: 90/10 of the steps instead of the real share."""
    output = bench("dual").run(steps=40, flow_shift=12.0, boundary_ratio=0.875, guidance_scale=1)
    assert output.schedule.split == {"high": 26, "low": 14}


@pytest.mark.parametrize(
    ("layout", "boundary", "steps", "split"),
    [
        ("single", None, 3, (3, 0)),
        *(("dual", 0, 3, (3, 0)), ("dual", 1.0, 3, (0, 3)), ("dual", 1.0, 1, (0, 1))),
        *(("dual", None, 1, (1, 0)), ("dual", None, 2, (2, 0)), ("high only", None, 2, (2, 0))),
        *(("high only", 0, 3, (3, 0)), ("low only", 1.0, 3, (0, 3)), ("low only", 1.0, 1, (0, 1))),
    ],
)
def test_E5_an_expert_may_be_absent_or_have_no_step(
    bench: Callable[..., Bench], layout: str, boundary: float | None, steps: int, split: tuple[int, int]
) -> None:
    """omni#1392, dfs#12024, sgl#16962: the second model was dereferenced, a table asserted on a single step."""
    subject = bench(layout)
    output = subject.run(steps=steps, flow_shift=12.0, boundary_ratio=boundary)
    assert output.schedule.split == dict(zip(("high", "low"), split, strict=True))
    assert (subject.forwards("cond", "high"), subject.forwards("cond", "low")) == split
    assert torch.isfinite(output.latents).all()


@pytest.mark.parametrize(("layout", "boundary"), [("high only", 1.0), ("low only", 0.0), ("low only", None)])
def test_E5_an_expert_that_is_needed_and_missing_is_an_error(
    bench: Callable[..., Bench], tiny: Callable[..., Path], layout: str, boundary: float | None
) -> None:
    """The same reports: an error before any work, at build where the engine's own boundary asks for it."""
    subject = bench(layout)
    with pytest.raises(CheckpointError, match=r"-noise expert 2 of 2 steps, but .* has no 'transformer"):
        subject.run(steps=2, flow_shift=12.0, boundary_ratio=boundary)
    assert subject.keys == []
    if boundary is not None:
        with pytest.raises(CheckpointError, match=rf"boundary_ratio={boundary} \(engine\) runs the .* alone, which"):
            WanReference.from_pretrained(tiny(layout=layout), defaults=EngineDefaults(boundary_ratio=boundary))


@pytest.mark.parametrize("side", ["request", "engine"])
def test_E6_guidance_scale_is_the_high_noise_experts(tiny: Callable[..., Path], side: str) -> None:
    """wan22 text2video.py against dfs pipeline_wan.py: the native pair is (low, high), diffusers' is (high, low)."""
    scales = {"guidance_scale": 2, "guidance_scale_2": 6}
    asked, defaults = ({}, EngineDefaults(**scales)) if side == "engine" else (scales, EngineDefaults())
    engine = WanReference.from_pretrained(tiny(layout="dual"), defaults=defaults)
    output = engine(Request(prompt="a", steps=8, flow_shift=5.0, output_type="latent", **asked))
    assert [step.guidance_scale for step in output.schedule] == [2.0] * 4 + [6.0] * 4


# Schedulers.


def test_S1_the_shift_is_applied_once_and_ends_with_its_request(bench: Callable[..., Bench]) -> None:
    """omni#7576, dfs#13243: constructor and set_timesteps both shifted; the first fix disabled shifting elsewhere."""
    single, (golden,) = bench("single"), (row for row in GOLDENS["timesteps"] if row["steps"] == 40)
    default = single.run(steps=40, guidance_scale=1)
    shifted = single.run(steps=40, guidance_scale=1, flow_shift=golden["flow_shift"])
    assert [step.timestep for step in shifted.schedule] == golden["unipc"]
    # diffusers 0.42 starts at 1 less 1e-6, which no shift moves. The reports' .9999166 is of a grid that starts at .999
    assert shifted.schedule.steps[0].sigma == pytest.approx(1 - 1e-6, abs=1e-7)
    again = single.run(steps=40, guidance_scale=1)
    assert again.schedule == default.schedule != shifted.schedule
    assert torch.equal(again.latents, default.latents)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_S1_every_scheduler_heeds_the_shift_and_may_set_its_timesteps_again(
    tiny: Callable[..., Path], scheduler: Any
) -> None:
    """The same reports: the shift had become a no-op in two sibling pipelines."""
    checkpoint, timesteps = open_checkpoint(tiny()), []
    for shift in (3.0, 5.0):
        request = Request(prompt="a", steps=8, scheduler=scheduler, flow_shift=shift)
        solver = make_solver(resolve(request, EngineDefaults(), checkpoint), checkpoint)
        timesteps.append(solver.timesteps.tolist())
        solver.set_timesteps(8)
        assert solver.timesteps.tolist() == timesteps[-1]
    assert timesteps[0] != timesteps[1]


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_S3_the_steps_that_were_asked_are_the_steps_that_run(
    bench: Callable[..., Bench], scheduler: str, steps: int
) -> None:
    """omni#7197, omni#5882, omni#804: 8 steps asked, 7 run."""
    single = bench("single")
    output = single.run(steps=steps, scheduler=scheduler, guidance_scale=1)
    assert len(output.schedule) == single.solver_steps == single.forwards("cond") == steps
    assert torch.isfinite(output.latents).all()


def test_S3_an_unknown_solver_is_refused(bench: Callable[..., Bench]) -> None:
    """omni#804: another solver than the one asked for, by default."""
    with pytest.raises(ValueError, match=r"scheduler='heun' is not accepted: give one of unipc, euler, dpm\+\+"):
        bench("single").run(steps=4, scheduler="heun")


# Precision.


@pytest.mark.parametrize(("scheduler", "expected"), [("unipc", [999, 937, 833, 625]), ("euler", None)])
def test_D1_the_embedding_sees_the_timesteps_of_the_schedule_in_bfloat16_too(
    bench: Callable[..., Bench], scheduler: str, expected: list[int] | None
) -> None:
    """dsyn#562, dsyn#1025, mold#786, mold#811: cast to bfloat16 first, they were 1000, 936, 832, 624."""
    single, seen = bench("single", "bfloat16"), []
    projection = single.engine.stages["high"].transformer.condition_embedder.timesteps_proj
    hook = projection.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    output = single.run(steps=4, flow_shift=5.0, scheduler=scheduler, videos_per_prompt=2, guidance_scale=1)
    hook.remove()
    timesteps = [step.timestep for step in output.schedule]
    assert timesteps == (expected or timesteps)
    assert [rows.tolist() for rows, _ in seen] == [[timestep] * 2 for timestep in timesteps]
    assert torch.tensor(timesteps).bfloat16().tolist() != timesteps
    assert {embedded.dtype for _, embedded in seen} == {torch.float32}
