"""Public bug reports on engines, topologies and dtypes, as small scenarios. Named after their rows; sources below."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.evidence.ranks import RankPool
from suites.support import Run, births, fingerprint, load_engine, observed, run_requests, settled
from wanref.checkpoint import CheckpointError, open_checkpoint
from wanref.denoise import RequestAborted
from wanref.observe import StepEvent
from wanref.request import EngineDefaults, Request
from wanref.resolver import resolve
from wanref.schedule import build_schedule, make_solver
from wanref.topology import parse_topology

pytestmark = pytest.mark.cpu

REQUEST = Request(prompt="a red square", height=32, width=32, frames=5, steps=6, guidance_scale=4.0, seed=7)


def branch_steps(run: Run, branch: str) -> list[int]:
    """The steps at which a branch ran."""
    return sorted({key.step for key in run.tensors if key.branch == branch})


# L: state between requests.


def abort_after_step_2(folder: Path) -> dict[str, Any]:
    engine = load_engine(folder, "pp2cfg2")
    engine(REQUEST)
    if engine.place.rank == 0:
        engine.observer = lambda e: engine.abort() if isinstance(e, StepEvent) and e.step.index == 2 else None
    stopped = None
    with births() as born:
        try:
            engine(REQUEST)
        except RequestAborted as aborted:
            stopped = aborted.step
        engine.observer = None
        alive = settled(born)
    return {"stopped": stopped, "alive": alive, "next": observed(engine, replace(REQUEST, seed=8, steps=3))}


def test_L7_after_an_abort_all_ranks_stopped_at_one_step_and_the_next_request_is_fresh(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    """vllm-omni#3167, #1156, #1769, #7844, ComfyUI#10308. The VAE half of the row is in test_sequences."""
    said = ranks.run(4, abort_after_step_2, tiny())
    ((fresh,),) = ranks.run(1, run_requests, tiny(), "pp1cfg1", "float32", [replace(REQUEST, seed=8, steps=3)])
    assert [each["stopped"] for each in said] == [3] * 4
    assert [each["alive"] for each in said] == [[]] * 4
    assert {each["next"].latents for each in said} == {fresh.latents}
    assert branch_steps(said[0]["next"], "cond") == [0, 1, 2]


@pytest.mark.parametrize("scheduler", ["unipc", "euler", "dpm++"])
def test_L9_solvers_of_interleaved_requests_do_not_mix(tiny: Callable[..., Path], scheduler: str) -> None:
    """sglang#23716, vllm-omni#6324."""
    opened, noise = open_checkpoint(tiny()), torch.Generator().manual_seed(0)
    asked = [replace(REQUEST, scheduler=scheduler, steps=n, flow_shift=shift) for n, shift in ((5, 3.0), (4, 12.0))]
    latents = [torch.randn(1, 4, 2, 4, 4, generator=noise) for _ in asked]
    predictions = [torch.randn(5, 1, 4, 2, 4, 4, generator=noise) for _ in asked]

    def stepping(which: int) -> Any:
        solver = make_solver(resolve(asked[which], EngineDefaults(), opened), opened)
        sample = latents[which]
        for index, timestep in enumerate(solver.timesteps):
            sample = solver.step(predictions[which][index], timestep, sample, return_dict=False)[0]
            yield fingerprint(sample)

    solo = [list(stepping(which)) for which in (0, 1)]
    together = [stepping(which) for which in (0, 1)]
    interleaved: list[list[Any]] = [[], []]
    for _ in range(5):
        for which in (0, 1):
            interleaved[which].extend([step] if (step := next(together[which], None)) else [])
    assert interleaved == solo
    assert [len(steps) for steps in solo] == [5, 4]


# C: branches.


@pytest.mark.parametrize("scale", [0, 0.0, 1, 1.0])
def test_C1_C7_a_scale_of_one_or_less_runs_no_negative_forward(
    ranks: RankPool, tiny: Callable[..., Path], scale: float
) -> None:
    """DiCache#8, vllm-omni#922, #4998, #4999, dynamo#9111."""
    ((run,),) = ranks.run(1, run_requests, tiny(), "pp1cfg1", "float32", [replace(REQUEST, guidance_scale=scale)])
    assert branch_steps(run, "uncond") == []
    assert branch_steps(run, "cond") == list(range(6))


def timed(folder: Path, requests: list[Request]) -> list[tuple[float, Run]]:
    engine = load_engine(folder, "pp2cfg2")
    runs = []
    for request in requests:
        started = time.monotonic()
        run = observed(engine, request)
        runs.append((time.monotonic() - started, run))
    return runs


def test_C8_without_guidance_no_rank_waits_for_a_branch_that_does_not_exist(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    """sglang#23198, TensorRT-LLM#16384. A one-step warm-up without guidance first, as engines do it."""
    unguided = replace(REQUEST, guidance_scale=1)
    by_rank = ranks.run(4, timed, tiny(), [replace(unguided, steps=1), unguided, REQUEST])
    for warm_up, off, on in by_rank:
        assert max(warm_up[0], off[0]) < 5.0
        assert off[1].idle_ranks == (2, 3)
        assert on[1].idle_ranks == ()
    assert len({off[1].latents for _, off, _ in by_rank}) == 1
    ((serial,),) = ranks.run(1, run_requests, tiny(), "pp1cfg1", "float32", [unguided])
    assert by_rank[0][1][1].latents == serial.latents


def test_C9_an_absent_an_empty_and_a_given_negative_prompt_all_run_the_negative_branch(
    ranks: RankPool, tiny: Callable[..., Path]
) -> None:
    """mstar#165, Wan2.2 text2video.py."""
    requests = [replace(REQUEST, negative_prompt=negative) for negative in (None, "", "stripes")]
    (runs,) = ranks.run(1, run_requests, tiny(), "pp1cfg1", "float32", requests)
    assert [branch_steps(run, "uncond") for run in runs] == [list(range(6))] * 3
    absent, empty, text = (run.latents for run in runs)
    assert absent == empty, "both embed as the empty text"
    assert text != empty
    sources = [resolve(r, EngineDefaults(), open_checkpoint(tiny())).sources["negative_prompt"] for r in requests]
    assert sources == ["absent", "empty", "text"]


# E: experts.


@pytest.mark.parametrize(
    ("changes", "split"),
    [
        ({"boundary_ratio": None}, {"high": 2, "low": 4}),
        ({"boundary_ratio": 0.0}, {"high": 6, "low": 0}),
        ({"boundary_ratio": 1.0}, {"high": 0, "low": 6}),
        ({"steps": 1}, {"high": 1, "low": 0}),
        ({"steps": 2, "flow_shift": 12}, {"high": 2, "low": 0}),
    ],
)
@pytest.mark.parametrize("topology", ["pp1cfg1", "pp2cfg2"])
def test_E5_an_expert_without_steps_is_no_trouble(
    ranks: RankPool, tiny: Callable[..., Path], topology: str, changes: dict[str, Any], split: dict[str, int]
) -> None:
    """vllm-omni#1392, diffusers#12024, sglang#16962."""
    request = replace(REQUEST, **changes)
    by_rank = ranks.run(
        parse_topology(topology).world_size, run_requests, tiny(layout="dual"), topology, "float32", [request]
    )
    last = next(run for (run,) in by_rank if run.rank == run.owner)
    ran = [key.expert for key in last.tensors if key.block == "scheduler"]
    assert {expert: ran.count(expert) for expert in ("high", "low")} == split


@pytest.mark.parametrize(("layout", "lacking"), [("high only", "transformer_2"), ("low only", "transformer")])
def test_E5_a_needed_expert_that_is_missing_is_refused(tiny: Callable[..., Path], layout: str, lacking: str) -> None:
    engine = load_engine(tiny(layout=layout))
    with pytest.raises(CheckpointError, match=rf"gives the \w+-noise expert \d of 6 steps.*no '{lacking}'"):
        engine(REQUEST)
    forced = {"transformer": 0.0, "transformer_2": 1.0}[lacking]
    with pytest.raises(CheckpointError, match="lacks"):
        load_engine(tiny(layout=layout), defaults=EngineDefaults(boundary_ratio=forced))


def test_V4_prompts_times_videos_come_in_prompt_order_each_with_its_own_texts_and_noise(
    tiny: Callable[..., Path],
) -> None:
    """diffusers#13693, #14170, TensorRT-LLM#12350. Each video is that of the same batch of its own prompt alone."""
    engine = load_engine(tiny())
    prompts, negatives, seeds = (
        ("a red square", "a blue circle moving left"),
        ("stripes", "the dots over"),
        (1, 2, 3, 4),
    )
    batch = replace(REQUEST, prompt=prompts, negative_prompt=negatives, videos_per_prompt=2, seed=seeds)
    output = engine(batch)
    assert output.video is not None
    assert output.video.shape == (4, 5, 32, 32, 3)
    for index in range(4):
        alone = replace(
            REQUEST,
            prompt=(prompts[index // 2],) * 4,
            negative_prompt=(negatives[index // 2],) * 4,
            seed=(seeds[index],) * 4,
        )
        single = engine(alone)
        assert single.video is not None
        assert fingerprint(output.video[index]) == fingerprint(single.video[index])
    assert len({fingerprint(video) for video in output.video}) == 4


# M: what may be compared with what.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_M2_a_video_of_a_batch_is_bit_equal_to_itself_in_another_batch_of_the_same_shape(
    tiny: Callable[..., Path], dtype: str
) -> None:
    """vllm-omni#5676, sglang#29269. Only the same batch shape makes a control."""
    engine = load_engine(tiny(), dtype=dtype)
    one, other = (
        replace(REQUEST, prompt=("a red square", second), seed=(1, 9 + n))
        for n, second in enumerate(("dots", "a blue circle"))
    )
    first, again = engine(one).latents, engine(other).latents
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[1], again[1])


def test_C5_every_step_of_both_experts_is_guided_when_the_second_scale_is_left_out(
    tiny: Callable[..., Path],
) -> None:
    """vllm-omni#5615, #5415."""
    engine = load_engine(tiny(layout="dual"))
    run = observed(engine, REQUEST)
    assert branch_steps(run, "uncond") == list(range(6))
    assert {key.expert for key in run.tensors if key.branch == "uncond"} == {"high", "low"}


def test_D1_the_timestep_reaches_the_embedding_unrounded(tiny: Callable[..., Path]) -> None:
    """DiffSynth-Studio#562, #1025, mold#786, #811. bfloat16 would make 1000, 936, ... of 999, 937, ..."""
    engine = load_engine(tiny(), dtype="bfloat16")
    seen: list[float] = []
    stage = engine.stages["high"]
    hook = stage.transformer.condition_embedder.timesteps_proj.register_forward_pre_hook(
        lambda _, arguments: seen.extend(arguments[0].tolist())
    )
    engine(REQUEST)
    hook.remove()
    opened = open_checkpoint(tiny())
    resolved = resolve(REQUEST, EngineDefaults(), opened)
    schedule = build_schedule(resolved, opened, make_solver(resolved, opened))
    assert seen == [step.timestep for step in schedule]
    assert any(float(torch.tensor(float(t)).bfloat16()) != t for t in seen)
