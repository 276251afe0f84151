"""Slips of arithmetic, exchange and rounding, each at the places that its keywords name: coordinates of `HERE`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from oracle.faults.plant import HERE, around
from wanref import block, denoise, pipeline
from wanref.exchange import Exchange
from wanref.stage import Stage

Planted = AbstractContextManager[None]
Place = dict[str, Any]


def _there(owner: Any, name: str, place: Place, wrapper: Callable[..., Any]) -> Planted:
    """`wrapper` at one place alone."""

    def call(original: Any, *args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options) if HERE.at(**place) else original(*args, **options)

    return around(owner, name, call)


@contextmanager
def _changed(parameter: Any, value: Any) -> Iterator[None]:
    kept, parameter.data = parameter.data, value
    try:
        yield
    finally:
        parameter.data = kept


def attention_gain(**place: Any) -> Planted:
    return _there(block, "dispatch_attention_fn", place, lambda original, *a, **o: original(*a, **o) * 1.01)


def softmax_of_a_wider_head(**place: Any) -> Planted:
    return _there(block, "dispatch_attention_fn", place, lambda original, q, *a, **o: original(q * 0.5**0.5, *a, **o))


def last_key_lost(**place: Any) -> Planted:
    def attend(original: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return original(query, key[:, :-1], value[:, :-1], **options)

    return _there(block, "dispatch_attention_fn", place, attend)


def token_zeroed(**place: Any) -> Planted:
    def run(original: Any, *args: Any) -> Any:
        hidden = original(*args)
        hidden[:, 17] = 0
        return hidden

    return _there(block, "run_block", place, run)


def text_of_the_other_branch(**place: Any) -> Planted:
    texts: dict[int, Any] = {}

    def attend(original: Any, attn: Any, hidden: Any, text: Any) -> Any:
        if HERE.branch == "cond":
            texts[HERE.block] = text
        return original(attn, hidden, texts[HERE.block] if HERE.at(**place) else text)

    return around(block, "_cross_attention", attend)


def padding_left_out(**place: Any) -> Planted:
    def attend(original: Any, attn: Any, hidden: Any, text: Any) -> Any:
        return original(attn, hidden, block.TextKV(text.key[:, :-4], text.value[:, :-4]))

    return _there(block, "_cross_attention", place, attend)


def rotary_of_the_next_frame(frames: int, **place: Any) -> Planted:
    def attend(original: Any, attn: Any, hidden: Any, rotary: Any) -> Any:
        return original(attn, hidden, rotary.roll(-rotary.shape[1] // frames, 1))

    return _there(block, "_self_attention", place, attend)


def rotary_left_out(**place: Any) -> Planted:
    return _there(block, "_rotate", place, lambda original, x, rotary: x)


def norm_over_a_shard(**place: Any) -> Planted:
    def attend(original: Any, attn: Any, hidden: Any, rotary: Any) -> Any:
        # RMS over half of the heads, where diffusers has all of them: as if each of two ranks normed its own.
        norm = type(attn.norm_q)

        def forward(whole: Any, module: Any, x: Any) -> Any:
            root = x.float().unflatten(-1, (2, -1)).square().mean(-1, keepdim=True).add(1e-6).rsqrt()
            return ((x.float().unflatten(-1, (2, -1)) * root).flatten(-2) * module.weight.float()).to(x.dtype)

        with around(norm, "forward", forward):
            return original(attn, hidden, rotary)

    return _there(block, "_self_attention", place, attend)


def gate_left_out(gate: str, **place: Any) -> Planted:
    def run(original: Any, module: Any, hidden: Any, text: Any, modulation: Any, rotary: Any) -> Any:
        open_gate = torch.ones_like(getattr(modulation, gate))
        return original(module, hidden, text, replace(modulation, **{gate: open_gate}), rotary)

    return _there(block, "run_block", place, run)


def residual_added_twice(**place: Any) -> Planted:
    def run(original: Any, module: Any, hidden: Any, *args: Any) -> Any:
        output = original(module, hidden, *args)
        return output + (output - hidden)

    return _there(block, "run_block", place, run)


def bias_left_out(**place: Any) -> Planted:
    def attend(original: Any, attn: Any, *args: Any) -> Any:
        with _changed(attn.to_v.bias, torch.zeros_like(attn.to_v.bias)):
            return original(attn, *args)

    return _there(block, "_self_attention", place, attend)


def weight_in_float8(**place: Any) -> Planted:
    def run(original: Any, module: Any, *args: Any) -> Any:
        weight = module.ffn.net[2].weight
        scale = weight.float().abs().max() / 448  # the largest number of e4m3
        rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
        with _changed(weight, rounded.to(weight.dtype)):
            return original(module, *args)

    return _there(block, "run_block", place, run)


def timestep_in_bfloat16(**place: Any) -> Planted:
    def prepare(original: Any, stage: Any, timestep: Any, *args: Any) -> Any:
        return original(stage, timestep.to(torch.bfloat16).to(timestep.dtype), *args)

    return _there(Stage, "prepare_step", place, prepare)


def guidance_of_the_default(**place: Any) -> Planted:
    def combine(original: Any, job: Any, step: Any, *args: Any) -> Any:
        return original(job, replace(step, guidance_scale=5.0), *args)

    return _there(denoise, "_combine", place, combine)


def solver_in_bfloat16(**place: Any) -> Planted:
    def make(original: Any, *args: Any) -> Any:
        solver = original(*args)

        step = solver.step

        def rounded(prediction: Any, timestep: Any, latents: Any, **options: Any) -> Any:
            return step(prediction, timestep, latents.bfloat16().float() if HERE.at(**place) else latents, **options)

        solver.step = rounded
        return solver

    return around(pipeline, "make_solver", make)


def latents_in_bfloat16(**place: Any) -> Planted:
    return _there(Exchange, "receive", place, lambda original, *args: original(*args).bfloat16().float())


def buffer_of_the_call_before(**place: Any) -> Planted:
    received: list[Any] = []

    def receive(original: Any, *args: Any) -> Any:
        received.append(original(*args))
        return received[-2].clone() if HERE.at(**place) else received[-1].clone()

    return around(Exchange, "receive", receive)
