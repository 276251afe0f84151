"""A stock `diffusers.WanPipeline` as a subject, with or without somebody's cache: observed by hooks, and not changed.

Forward hooks see every call of a transformer, what enters its first block and what leaves each, and whether a block's
self-attention and feed-forward ran. Of the scheduler, `step` is watched on the instance while a request runs. Nothing
of it computes, so the bytes are those of an unobserved run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from oracle.evidence.emitter import Emitter, Engine
from oracle.evidence.reader import open_trace
from oracle.evidence.stock_calls import LEAVES, Call, Seen, origins_of
from oracle.evidence.subjects import Evidence, Subject, Target
from oracle.evidence.trace import DecisionRecord, OriginRecord
from wanref.checkpoint import Expert
from wanref.observe import TensorKey

if TYPE_CHECKING:
    from oracle.evidence.mounts import Mount
    from wanref import Request

EXPERTS: dict[str, Expert] = {"transformer": "high", "transformer_2": "low"}


def quiet() -> None:
    """No progress bars and notes of the libraries: a table is to be read beside them."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def load_stock(folder: Path | str, dtype: str = "float32", **components: Any) -> Any:
    """As diffusers' documentation of Wan loads it: the VAE in float32."""
    from diffusers import AutoencoderKLWan, WanPipeline

    # The name that older releases know, too.
    vae = AutoencoderKLWan.from_pretrained(Path(folder) / "vae", torch_dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(folder, vae=vae, torch_dtype=getattr(torch, dtype), **components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_arguments(request: Request) -> dict[str, Any]:
    """The request as a user of diffusers writes it. Only what is asked for is handed on."""

    def plain(texts: str | Sequence[str] | None) -> str | list[str] | None:
        return texts if texts is None or isinstance(texts, str) else list(texts)

    asked = {
        "prompt": plain(request.prompt),
        "negative_prompt": plain(request.negative_prompt),
        "height": request.height,
        "width": request.width,
        "num_frames": request.frames,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "guidance_scale_2": request.guidance_scale_2,
        "max_sequence_length": request.max_sequence_length,
        "generator": None if request.seed is None else generators(request.seed),
    }
    return {"num_videos_per_prompt": request.videos_per_prompt} | {k: v for k, v in asked.items() if v is not None}


def generators(seed: int | Sequence[int]) -> torch.Generator | list[torch.Generator]:
    """One for all videos, or one for each, as diffusers takes them."""
    if isinstance(seed, Sequence):
        return [torch.Generator().manual_seed(each) for each in seed]
    return torch.Generator().manual_seed(seed)


class _OfTheCaller(Exception):
    pass


class Stock:
    """mount: somebody's cache, mounted at once and never taken off. facts: more for the manifest."""

    def __init__(self, pipe: Any, mount: Mount | None = None) -> None:
        self.pipe = pipe
        self.name = "stock diffusers" if mount is None else f"stock diffusers, {mount.name}"
        self._mount = mount
        # A cache may put others in their place, so they are kept before it is mounted.
        self._blocks = {name: list(getattr(pipe, name).blocks) for name in EXPERTS if getattr(pipe, name) is not None}
        if mount is not None:
            mount.enable(pipe)

    def run(self, request: Request, folder: Path) -> Evidence:
        """Raises whatever the pipeline does, and then leaves no trace."""
        seen = Seen(next(len(blocks) for blocks in self._blocks.values()))
        arguments = stock_arguments(request)
        if request.output_type == "latent":
            arguments["output_type"] = "latent"
        with self._observed(seen):
            frames = self.pipe(**arguments).frames
        video = None if request.output_type == "latent" else np.asarray(frames, dtype=np.float32)
        self._write(seen, request, folder)
        claimed = None if self._mount is None or self._mount.claims is None else self._mount.claims(self.pipe)
        latents = seen.latents[-1].float().numpy()
        return Evidence(open_trace(folder), latents, video, seen.work(), claimed)

    def fail(self, request: Request) -> None:
        """Let the request fail behind its second step, as a callback of its caller's may."""

        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step:
                raise _OfTheCaller
            return tensors

        with suppress(_OfTheCaller):
            self.pipe(**stock_arguments(request), output_type="latent", callback_on_step_end=callback)

    def enable(self, mount: Mount) -> None:
        """Put a cache on a pipeline that has none."""
        mount.enable(self.pipe)
        self._mount, self.name = mount, f"stock diffusers, {mount.name}"

    def disable(self) -> None:
        """Take the cache off."""
        if self._mount is not None:
            self._mount.disable(self.pipe)

    @contextmanager
    def _observed(self, seen: Seen) -> Iterator[None]:
        with ExitStack() as stack:
            for name, blocks in self._blocks.items():
                transformer = getattr(self.pipe, name)
                hooks = [
                    transformer.register_forward_pre_hook(seen.enters(EXPERTS[name]), with_kwargs=True),
                    transformer.register_forward_hook(seen.leaves),
                    transformer.norm_out.register_forward_pre_hook(seen.end_of_blocks),
                    blocks[0].register_forward_pre_hook(seen.first_block),
                    blocks[0].attn1.register_forward_hook(seen.attention),
                ]
                for index, block in enumerate(blocks):
                    hooks.append(block.register_forward_hook(seen.block(index)))
                    hooks += [
                        block.get_submodule(leaf).register_forward_hook(seen.leaf(index, m))
                        for m, leaf in LEAVES.items()
                    ]
                for hook in hooks:
                    stack.callback(hook.remove)
            scheduler = self.pipe.scheduler
            scheduler.step = seen.stepping(scheduler.step)
            stack.callback(delattr, scheduler, "step")  # the method of its class comes back
            yield

    def _write(self, seen: Seen, request: Request, folder: Path) -> None:
        cache = None if self._mount is None else {"method": self._mount.name, "options": dict(self._mount.options)}
        engine = Engine(
            name="diffusers.WanPipeline",
            version=version("diffusers"),
            layers=seen.layers,
            dtype=str(self.pipe.transformer.dtype if self.pipe.transformer else self.pipe.transformer_2.dtype)[6:],
            cache=cache,
            facts={"threads": torch.get_num_threads(), "device": "cpu"},
        )
        emitter = Emitter(folder, engine, level="tensor")
        scales = {"high": request.guidance_scale, "low": request.guidance_scale_2 or request.guidance_scale}
        sigmas = self.pipe.scheduler.sigmas
        schedule = [
            {
                "index": index,
                "timestep": timestep,
                "sigma": float(sigmas[index]),
                "expert": expert,
                "guidance_scale": 5.0 if scales[expert] is None else scales[expert],
            }
            for index, (timestep, expert) in enumerate(seen.steps)
        ]
        resolved = {name: getattr(request, name) for name in ("prompt", "height", "width", "frames", "steps", "seed")}
        number = emitter.begin(schedule, resolved)
        for call in seen.calls:
            _write_call(emitter, number, call, seen, caching=cache is not None)
            if call is seen.calls[-1] or seen.calls[seen.calls.index(call) + 1].step != call.step:
                at = TensorKey(number, call.step, call.expert, None, "combine")
                emitter.tensor(at, seen.combined[call.step])
                emitter.tensor(TensorKey(number, call.step, call.expert, None, "scheduler"), seen.latents[call.step])
        emitter.end(number)
        emitter.close()


def _write_call(emitter: Emitter, request: int, call: Call, seen: Seen, caching: bool) -> None:
    def key(block: int | str) -> TensorKey:
        return TensorKey(request, call.step, call.expert, call.branch, block)

    whole = sum(index in call.ran["attn1"] and index in call.ran["ffn"] for index in range(seen.layers))
    assert call.first is not None
    assert call.last is not None
    emitter.tensor(key("embed"), call.first)
    if caching:
        emitter.decision(_decision(request, call, whole, seen))
    for index in range(seen.layers - 1):
        if index in call.ran["ffn"]:
            emitter.tensor(key(index), call.outputs[index])
    emitter.tensor(key(seen.layers - 1), call.last, "computed" if whole == seen.layers else "reused")
    emitter.tensor(key("project"), call.prediction)


def _decision(request: int, call: Call, whole: int, seen: Seen) -> DecisionRecord:
    reused = whole < seen.layers
    origins = tuple(
        OriginRecord(request, each.step, each.expert, each.branch, 0)
        for each in (origins_of(call, seen) if reused else ())
    )
    numbers = dict.fromkeys(("signal", "rescaled", "accumulated_before", "accumulated_after", "threshold"))
    return DecisionRecord(
        request=request,
        step=call.step,
        expert=call.expert,
        branch=call.branch,
        stage=0,
        verdict="reuse" if reused else "compute",
        reason="observed",
        shadow=None,
        computed_blocks=whole,
        origins=origins,
        **numbers,
    )


def stock_target(folder: Path | str, mount: Mount | None, dtype: str = "float32") -> Target:
    """What `wanref audit` looks at: the stock pipeline from a folder, under that cache."""

    def make(cache: Mount | None) -> Callable[[], Subject]:
        return lambda: Stock(load_stock(folder, dtype), cache)

    if mount is None:
        return Target("diffusers", make(None), fail=Stock.fail)
    forced = None if mount.forced is None else make(mount.forced)
    return Target(
        name=mount.name,
        fresh=make(mount),
        plain=make(None),
        forced=forced,
        fail=Stock.fail,
        disable=Stock.disable,
        enable=lambda subject: subject.enable(mount),
        rule=mount.rule,
    )
