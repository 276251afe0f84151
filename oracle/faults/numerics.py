"""Arithmetic that is wrong in bf16, beside other kernels: bytes differ everywhere, and cannot tell it.

Each is planted at one place, or at one block in every step, beside a benign kernel of `oracle.faults.kernels`. What is
too small to be found so is in the docstring of `oracle.verdict.bounded`.
"""

from __future__ import annotations

from functools import partial

from oracle.faults import kernels, slips
from oracle.faults.fault import Fault, Points
from oracle.faults.plant import Plant, beside
from oracle.faults.scenario import Layout, bounded


def _fault(
    name: str,
    source: str,
    breaks: str,
    topology: str,
    kernel: Plant,
    plant: Plant,
    points: Points,
    layout: Layout = "single",
) -> Fault:
    scenario = bounded(topology, kernels.REQUESTS[0], layout)
    return Fault(f"numerics-{name}", "numerics", source, breaks, scenario, points, partial(beside, kernel, plant))


HALVES = partial(kernels.split_sums, 2)
KEYS = partial(kernels.permuted_keys, 5)
CHUNKS = partial(kernels.chunked_softmax, 5)

FAULTS = (
    _fault(
        "attention-gain",
        "P5: omni#2682",
        "a factor of 1.01 on what attention gives",
        "pp1cfg1",
        HALVES,
        partial(slips.attention_gain, block=3, step=2, branch="uncond"),
        Points("arithmetic", rank=0, step=2, branch="uncond", block=3),
    ),
    _fault(
        "softmax-of-a-wider-head",
        "T5: cdit#1113",
        "scores are scaled by the width of two heads",
        "pp1cfg2",
        HALVES,
        partial(slips.softmax_of_a_wider_head, block=0, step=2, branch="uncond"),
        Points("arithmetic", rank=1, step=2, branch="uncond", block=0),
    ),
    _fault(
        "last-key-lost",
        "T6: VeOmni#1139, dfs#12567",
        "attention leaves out the last token",
        "pp1cfg2",
        CHUNKS,
        partial(slips.last_key_lost, block=4, step=1, branch="uncond"),
        Points("arithmetic", rank=1, step=1, branch="uncond", block=4),
    ),
    _fault(
        "token-zeroed",
        "T6: VeOmni#1139",
        "one token of one block is zero",
        "pp2cfg1",
        CHUNKS,
        partial(slips.token_zeroed, block=4, step=1, branch="cond"),
        Points("arithmetic", rank=1, step=1, branch="cond", block=4),
    ),
    _fault(
        "text-of-the-other-branch",
        "T6: omni#1233",
        "one block's cross-attention reads the text of the other branch",
        "pp2cfg1",
        HALVES,
        partial(slips.text_of_the_other_branch, block=5, step=2, branch="uncond"),
        Points("arithmetic", rank=1, step=2, branch="uncond", block=5),
    ),
    _fault(
        "text-padding-left-out",
        "T6: para#36",
        "one block leaves out the padding of the text, to which Wan attends",
        "pp1cfg1",
        KEYS,
        partial(slips.padding_left_out, block=2, step=1, branch="cond"),
        Points("arithmetic", rank=0, step=1, branch="cond", block=2),
    ),
    _fault(
        "rotary-of-the-next-frame",
        "T6: dfs#12567",
        "one block's positions are off by a frame",
        "pp1cfg2",
        HALVES,
        partial(slips.rotary_of_the_next_frame, 3, block=2, step=0, branch="cond"),
        Points("arithmetic", rank=0, step=0, branch="cond", block=2),
    ),
    _fault(
        "rotary-left-out",
        "O2: kjn#281, comfy#7891",
        "a block's replacement takes no positions, in every step",
        "pp2cfg2",
        CHUNKS,
        partial(slips.rotary_left_out, block=1),
        Points("arithmetic", rank=0, step=0, branch="cond", block=1),
    ),
    _fault(
        "norm-over-a-shard",
        "T5: cdit#1113",
        "query and key are normed over half of the heads",
        "pp2cfg2",
        KEYS,
        partial(slips.norm_over_a_shard, block=3, step=3, branch="uncond"),
        Points("arithmetic", rank=3, step=3, branch="uncond", block=3),
    ),
    _fault(
        "attention-gate-left-out",
        "O2: kjn#281",
        "a block's replacement adds what attention gives without its gate",
        "pp2cfg2",
        HALVES,
        partial(slips.gate_left_out, "attn_gate", block=4, step=3, branch="uncond"),
        Points("arithmetic", rank=3, step=3, branch="uncond", block=4),
    ),
    _fault(
        "feed-forward-gate-left-out",
        "O2: comfy#7891",
        "a block adds its feed-forward without the gate, in every step",
        "pp2cfg1",
        kernels.patches_by_product,
        partial(slips.gate_left_out, "ffn_gate", block=1),
        Points("arithmetic", rank=0, step=0, branch="cond", block=1),
        "dual",
    ),
    _fault(
        "residual-added-twice",
        "K1: omni#5561",
        "a block adds what it computed twice",
        "pp2cfg2",
        CHUNKS,
        partial(slips.residual_added_twice, block=2, step=1, branch="cond"),
        Points("arithmetic", rank=0, step=1, branch="cond", block=2),
    ),
    _fault(
        "bias-left-out",
        "O2: kjn#281",
        "values without their bias",
        "pp2cfg1",
        HALVES,
        partial(slips.bias_left_out, block=0, step=3, branch="cond"),
        Points("arithmetic", rank=0, step=3, branch="cond", block=0),
    ),
    _fault(
        "weight-in-float8",
        "D3: trt#11964",
        "one linear's weights go through float8, in every step",
        "pp2cfg2",
        HALVES,
        partial(slips.weight_in_float8, block=4),
        Points("arithmetic", rank=1, step=0, branch="cond", block=4),
    ),
    _fault(
        "timestep-in-bfloat16",
        "D1: dsyn#562, dsyn#1025",
        "one stage rounds the timestep to bfloat16 before it embeds it",
        "pp2cfg1",
        HALVES,
        partial(slips.timestep_in_bfloat16, rank=1, step=0),
        Points("arithmetic", rank=1, step=0, block="embed"),
    ),
    _fault(
        "guidance-of-the-default",
        "C7: omni#922",
        "one step is guided by the default's scale, 5, and not by the request's, 4",
        "pp2cfg1",
        CHUNKS,
        partial(slips.guidance_of_the_default, step=2),
        Points("arithmetic", rank=1, step=2, block="combine"),
    ),
    _fault(
        "solver-in-bfloat16",
        "D3: omni#3956",
        "one step is taken from latents that were rounded to bfloat16",
        "pp1cfg1",
        HALVES,
        partial(slips.solver_in_bfloat16, step=1),
        Points("arithmetic", rank=0, step=1, block="scheduler"),
    ),
    _fault(
        "latents-in-bfloat16",
        "D3: omni#3956",
        "latents travel in bfloat16 at one step",
        "pp2cfg1",
        HALVES,
        partial(slips.latents_in_bfloat16, rank=0, step=1),
        Points("exchange", rank=0, step=1, block="scheduler"),
    ),
    _fault(
        "buffer-of-the-call-before",
        "T3: omni#2322",
        "a stage reads what it had received one call before",
        "pp2cfg2",
        CHUNKS,
        partial(slips.buffer_of_the_call_before, rank=1, step=2),
        Points("exchange", rank=1, step=2, branch="cond", block=2),
    ),
)
