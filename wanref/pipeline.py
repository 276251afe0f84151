"""The engine: one checkpoint, one topology, many requests in turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from wanref.caching.base import Begin, BlockCache, identity_of
from wanref.caching.error import CacheError
from wanref.caching.registry import build_cache
from wanref.caching.spec import CacheSpec, parse_cache
from wanref.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from wanref.denoise import Job, RequestAborted, Texts, denoise
from wanref.exchange import Exchange, ExchangeError
from wanref.launch import join
from wanref.liveness import Liveness, RankFailure
from wanref.noise import draw_noise
from wanref.observe import Event, Observer, RequestEvent, StateEvent
from wanref.option import DEVICES, DTYPES, check_choice
from wanref.output import Output
from wanref.parts import Parts, load_parts_together, needed_experts
from wanref.plan import Plan, Refused, agree_on_plan, latents_shape
from wanref.request import EngineDefaults, Request, ResolvedRequest
from wanref.resolver import resolve
from wanref.schedule import Schedule, build_schedule, make_solver
from wanref.topology import Branch, Place, Topology, idle_ranks, parse_topology


class WanReference:
    """Build with `from_pretrained`, call with a `Request`. With several ranks it is SPMD: every rank does both."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        defaults: EngineDefaults,
        exchange: Exchange,
        parts: Parts,
        dtype: torch.dtype,
        observer: Observer | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.defaults = defaults
        self.exchange = exchange
        self.stages = parts.stages
        self.dtype = dtype
        self.observer = observer
        self._text_encoder = parts.text_encoder
        self._decoder = parts.decoder
        self._abort = threading.Event()
        self._requests = 0
        self._failure: str | None = None
        self._mounted: tuple[CacheSpec, BlockCache] | None = None
        self._liveness = Liveness(self.place.rank, self.topology.world_size) if self.topology.world_size > 1 else None

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        topology: str | Topology = "pp1cfg1",
        dtype: str = "float32",
        vae_dtype: str = "float32",
        device: str = "cpu",
        defaults: EngineDefaults | None = None,
        observer: Observer | None = None,
        cache: str | CacheSpec | None = None,
        compile: bool = False,
    ) -> WanReference:
        """Load this rank's part of a checkpoint: a folder in diffusers layout, or a hub id `org/name@revision`.

        dtype: of transformers and text encoder; what diffusers keeps in float32 stays there. vae_dtype: Wan decodes in
        float32. device: `cpu` or `cuda`; with several ranks each takes the GPU of its LOCAL_RANK. cache: see `mount`.
        compile: blocks by torch.compile, one graph for all of them; faster, and no longer bitwise equal to diffusers.

        Raises ValueError for whatever cannot be honoured, before any weights are read: also where the world size is not
        the topology's (start ranks with torchrun or `wanref.launch.launch`; nothing is spawned here).
        """
        grid = parse_topology(topology) if isinstance(topology, str) else topology
        check_choice("dtype", dtype, DTYPES)
        check_choice("vae_dtype", vae_dtype, DTYPES)
        check_choice("device", device, DEVICES)
        defaults = EngineDefaults() if defaults is None else defaults
        checkpoint = open_checkpoint(source)
        experts = needed_experts(checkpoint, defaults)
        grid.blocks(0, checkpoint.transformer["num_layers"])
        if cache is not None:
            cache = parse_cache(cache) if isinstance(cache, str) else cache
            build_cache(cache, checkpoint, grid)
        rank, mesh = join(grid, device)
        place = grid.place(rank)
        target = torch.device(device)
        if device == "cuda":
            target = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(target)
        exchange = Exchange(place, mesh, target)
        dtypes = getattr(torch, dtype), getattr(torch, vae_dtype)
        parts = load_parts_together(exchange, checkpoint, experts, *dtypes, compiled=compile)
        engine = cls(checkpoint, defaults, exchange, parts, dtypes[0], observer)
        if cache is not None:
            engine.mount(cache)
        return engine

    @property
    def place(self) -> Place:
        return self.exchange.place

    @property
    def topology(self) -> Topology:
        return self.place.topology

    @property
    def device(self) -> torch.device:
        return self.exchange.device

    @property
    def cache(self) -> CacheSpec | None:
        """The mounted cache."""
        return None if self._mounted is None else self._mounted[0]

    def mount(self, cache: str | CacheSpec) -> None:
        """Mount a cache: `METHOD:option=value,...`, a profile's path, or a CacheSpec. With several ranks, on all.

        Raises CacheError for one that cannot be honoured, and if one is mounted already.
        """
        spec = parse_cache(cache) if isinstance(cache, str) else cache
        if self._mounted is not None:
            raise CacheError(
                f"cache={spec.method!r}: {self._mounted[0].method!r} is mounted. Unmount it first: one at a time."
            )
        self._mounted = spec, build_cache(spec, self.checkpoint, self.topology)

    def unmount(self) -> None:
        """Take the cache off. Nothing of it stays."""
        self._mounted = None

    def abort(self) -> None:
        """Ask the running request to stop before its next step; from any thread, on any rank. Without one: nothing."""
        self._abort.set()

    def __call__(self, request: Request | Sequence[Request]) -> Output:
        """Run one request, or a batch of requests as one.

        Raises ValueError for what cannot be honoured and RequestAborted after `abort`, on every rank; the engine goes
        on after both. With one rank it goes on after any exception. With several, an exception on one rank or a lost
        rank raises RankFailure on every rank, naming it, and the engine is over.
        """
        if self._failure is not None:
            raise RankFailure(f"this engine is over: {self._failure}. Build a new one.")
        self._abort.clear()
        self.exchange.begin(self.observer)
        try:
            return self._run(request) if self._liveness is None else self._run_with_others(request, self._liveness)
        except Refused as refused:
            raise refused.cause from None
        finally:
            self._end_cache()  # also of a request that was refused

    def _run_with_others(self, request: Request | Sequence[Request], liveness: Liveness) -> Output:
        with liveness.beating():
            try:
                return self._run(request)
            except (Refused, RequestAborted):
                raise
            except BaseException as error:
                self._failure = self._end(error, liveness)
                if not isinstance(error, Exception):
                    raise  # KeyboardInterrupt, SystemExit: the others are told, this process does as it was bid
                raise RankFailure(f"{self._failure}. The engine is over on every rank; build a new one.") from error

    @torch.no_grad()
    def _run(self, request: Request | Sequence[Request]) -> Output:
        plan = agree_on_plan(lambda: self._plan(request), self.exchange)
        ordinal, self._requests = self._requests, self._requests + 1
        outcome = "failed"
        self._emit(RequestEvent(ordinal, plan.request, plan.schedule))
        self._emit_state(ordinal, "begin")
        try:
            output = self._generate(ordinal, plan)
            outcome = "done"
        except RequestAborted:
            outcome = "aborted"
            raise
        finally:
            self.exchange.abandon()
            self._end_cache()
            self._emit_state(ordinal, "end")
            self._emit(RequestEvent(ordinal, plan.request, plan.schedule, outcome))
        return output

    def _generate(self, ordinal: int, plan: Plan) -> Output:
        request, place = plan.request, self.place
        job = Job(
            ordinal=ordinal,
            schedule=plan.schedule,
            solver=plan.solver,
            stages=self.stages,
            texts=self._prepare_texts(plan),
            dtype=self.dtype,
            exchange=self.exchange,
            observer=self.observer,
            aborting=self._abort.is_set,
            cache=None if self._mounted is None else self._mounted[1],
        )
        latents = denoise(job, self._draw_latents(request))
        wants_video = request.output_type == "video"
        video = self._decoder.decode(latents) if wants_video and self._decoder is not None else None
        # Nobody returns before the owner has decoded: a failure there is everybody's.
        self.exchange.agree(False)
        return Output(
            video=video,
            latents=latents,
            request=request,
            schedule=plan.schedule,
            topology=self.topology,
            rank=place.rank,
            owner=self.topology.pp - 1,
            idle_ranks=idle_ranks(self.topology, plan.schedule.guided),
            decisions=tuple(job.decisions),
        )

    def _plan(self, request: Request | Sequence[Request]) -> Plan:
        resolved = resolve(request, self.defaults, self.checkpoint)
        solver = make_solver(resolved, self.checkpoint, self.device)
        schedule = build_schedule(resolved, self.checkpoint, solver)
        for expert, steps in schedule.split.items():
            if steps and expert not in self.stages:
                raise CheckpointError(
                    f"boundary_ratio={resolved.boundary_ratio} needs the {expert}-noise expert, which this engine did "
                    f"not load: its own boundary_ratio is {self.defaults.boundary_ratio}."
                )
        if self._text_encoder is not None:
            for texts in (resolved.prompts, resolved.negative_prompts):
                self._text_encoder.check_length(texts, resolved.max_sequence_length)
        if self._mounted is not None:
            self._begin_cache(*self._mounted, resolved, schedule)
        return Plan(resolved, schedule, solver)

    def _begin_cache(self, spec: CacheSpec, cache: BlockCache, request: ResolvedRequest, schedule: Schedule) -> None:
        """Part of planning, so that what a cache refuses on one rank is refused on all before any work."""
        shape = latents_shape(request, self.checkpoint)
        begin = Begin(schedule, self.place, self.stages, shape, self.dtype, self.device)
        if spec.profile is not None:
            spec.profile.check(identity_of(begin, self.checkpoint.identity()))
        cache.begin(begin)

    def _end_cache(self) -> None:
        if self._mounted is not None:
            self._mounted[1].end()

    def _prepare_texts(self, plan: Plan) -> Texts:
        """Rank 0 encodes; every rank projects to the keys and values of its own blocks and branches."""
        request = plan.request
        embeds: dict[Branch, torch.Tensor] = {"cond": self._encode(request, request.prompts)}
        if plan.schedule.guided:
            embeds["uncond"] = self._encode(request, request.negative_prompts)
        return {
            (expert, branch): self.stages[expert].prepare_text(embeds[branch])
            for expert, steps in plan.schedule.split.items()
            for branch in self.place.branches(plan.schedule.guided)
            if steps
        }

    def _encode(self, request: ResolvedRequest, texts: Sequence[str]) -> torch.Tensor:
        embeds = None
        if self._text_encoder is not None:
            embeds = self._text_encoder.encode(texts, request.videos_per_prompt, request.max_sequence_length)
            embeds = embeds.to(self.dtype)
        shape = (request.videos, request.max_sequence_length, self.checkpoint.transformer["text_dim"])
        return self.exchange.broadcast(embeds, shape, self.dtype, source=0)

    def _draw_latents(self, request: ResolvedRequest) -> torch.Tensor:
        shape = latents_shape(request, self.checkpoint)
        # Drawn once and sent, seeded or not: a caller's generators need not be in step on all ranks.
        noise = draw_noise(request.noise, shape, self.device) if self.place.rank == 0 else None
        return self.exchange.broadcast(noise, shape, torch.float32, source=0)

    def _emit(self, event: Event) -> None:
        if self.observer is not None:
            self.observer(event)

    def _emit_state(self, ordinal: int, moment: Literal["begin", "end"]) -> None:
        if self.observer is not None and self._mounted is not None:
            self.observer(StateEvent(ordinal, moment, self._mounted[1].state()))

    def _end(self, error: BaseException, liveness: Liveness) -> str:
        """Find out who failed and let the others know, then wake them by closing the connections."""
        if isinstance(error, ExchangeError):
            failure = liveness.diagnose()
        else:
            failure = liveness.report(f"rank {self.place.rank} failed: {type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
        return failure
