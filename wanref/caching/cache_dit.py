"""Cache-DiT's DBCache through the real `cache-dit` library, around one stage's blocks.

Nothing is enabled on a pipeline or a transformer, so no hook, patch or class attribute is left behind, and two engines
in one process do not know of each other. Each (expert, branch) gets a context of its own, so a branch is what it is
told to be and not a call's parity, and decisions stay on their rank although a process group is up.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from cache_dit import DBCacheConfig, ForwardPattern, TaylorSeerCalibratorConfig
from cache_dit.caching.cache_blocks import CachedBlocks, pattern_base
from cache_dit.caching.cache_contexts.cache_manager import CachedContextManager

from wanref.caching.base import Begin, Decision, Judgement, Origin, Reason, StackCall, Where, check_provenance
from wanref.caching.error import CacheError
from wanref.caching.state import digest_of
from wanref.checkpoint import Expert
from wanref.topology import BRANCHES, Branch

_NAME = "blocks"


@dataclass(frozen=True, slots=True)
class CacheDiTOptions:
    """One expert's DBCache, in the library's terms.

    fn, bn: first and last blocks of the stage that are always computed. max_warmup_steps: the expert's leading steps
    that are computed. max_cached_steps, max_continuous_cached_steps: caps, -1 for none. mask: a digit for each of the
    expert's steps; 1 computes, 0 may (mask_policy dynamic) or must (static) reuse. taylorseer_order: 0 is plain reuse
    of the residual.
    """

    fn: int = 1
    bn: int = 0
    threshold: float = 0.08
    max_warmup_steps: int = 8
    max_cached_steps: int = -1
    max_continuous_cached_steps: int = -1
    mask: str = ""
    mask_policy: str = "dynamic"
    taylorseer_order: int = 0


class CacheDiT:
    """The `BlockCache`. `forced` computes every call and keeps the library's verdict as a shadow."""

    def __init__(self, options: Mapping[Expert, CacheDiTOptions], forced: bool = False) -> None:
        self._options = options
        self._forced = forced
        self._slots: dict[tuple[Expert, Branch], _Slot] = {}

    def begin(self, begin: Begin) -> None:
        """Fresh contexts, each sized by its expert's own steps."""
        self._slots = {}
        for expert, steps in begin.schedule.split.items():
            if steps:
                options = self._options[expert]
                blocks = len(begin.stages[expert].stack)
                check_options(options, expert, blocks)
                _check_mask(options, expert, steps)
                for branch in BRANCHES:
                    self._slots[expert, branch] = _make_slot(options, blocks, steps, self._forced)

    def order(self, step: int, branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
        """DBCache decides as it goes: no order is known to be better."""
        return branches

    def run(self, call: StackCall) -> tuple[torch.Tensor, Decision]:
        where, slot = call.where, self._slots[call.where.step.expert, call.where.branch]
        for origin, shape, dtype in slot.origins:
            check_provenance(origin, shape, dtype, where, call.hidden)
        before, slot.manager.where = slot.manager.accumulated, where
        output: torch.Tensor = slot.blocks(call.hidden, call)
        reason, hit, difference = slot.manager.last
        judgement = Judgement(
            "reuse" if hit else "compute",
            reason,
            signal=difference,
            accumulated_before=before,
            accumulated_after=slot.manager.accumulated,
            threshold=slot.options.threshold,
        )
        if hit and not self._forced:
            return output, call.decided(judgement, self._forced, tuple(origin for origin, _, _ in slot.origins))
        origin = Origin(where.request, where.step.index, where.step.expert, where.branch, where.place.stage)
        # TaylorSeer of order n differentiates the last n + 1 computed residuals.
        depth = slot.options.taylorseer_order + 1
        slot.origins = [*slot.origins, (origin, call.hidden.shape, call.hidden.dtype)][-depth:]
        return output, call.decided(judgement, self._forced)

    def state(self) -> dict[str, str]:
        return {
            f"{expert}.{branch}": digest_of((slot.manager.get_context(_NAME), [o.step for o, _, _ in slot.origins]))
            for (expert, branch), slot in self._slots.items()
        }

    def end(self) -> None:
        self._slots = {}


def check_options(options: CacheDiTOptions, expert: Expert, blocks: int) -> None:
    """Raise CacheError for what the library would take and do wrongly, or without saving any work."""
    if options.fn < 1 or options.bn < 0:
        raise CacheError(f"cache-dit: fn={options.fn}, bn={options.bn} ({expert}) is not accepted: fn >= 1, bn >= 0.")
    if options.fn + options.bn >= blocks:
        raise CacheError(
            f"cache-dit: fn={options.fn} and bn={options.bn} ({expert}) leave none of this stage's {blocks} blocks to "
            "skip: give fewer, or fewer pipeline stages."
        )
    if options.mask_policy not in ("dynamic", "static"):
        raise CacheError(f"cache-dit: mask_policy={options.mask_policy!r} is not accepted: dynamic or static.")


def _check_mask(options: CacheDiTOptions, expert: Expert, steps: int) -> None:
    if options.mask and (len(options.mask) != steps or set(options.mask) - set("01") or options.mask[0] != "1"):
        raise CacheError(
            f"cache-dit: mask={options.mask!r} ({expert}) is not accepted: give 0 or 1 for each of the {steps} "
            "steps that this expert runs, the first a 1."
        )


@dataclass
class _Slot:
    """One (expert, branch): the library's blocks and context, and where its residuals come from."""

    options: CacheDiTOptions
    blocks: torch.nn.Module
    manager: _Manager
    origins: list[tuple[Origin, torch.Size, torch.dtype]] = field(default_factory=list)


class _Block(torch.nn.Module):
    """One block as the library wants it: a module whose forward takes and returns hidden states."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden_states: torch.Tensor, call: StackCall) -> torch.Tensor:
        return call.run(self.index, hidden_states)


class _Manager(CachedContextManager):  # type: ignore[misc]  # the library has no types
    """The library's own decisions, written down; under `forced`, overridden after they have been made."""

    def __init__(self, forced: bool) -> None:
        super().__init__(name=_NAME)
        self.forced = forced
        self.last: tuple[Reason, bool, float | None] = ("first", False, None)
        self.where: Where | None = None
        self._shadow_hit = False

    @property
    def accumulated(self) -> float:
        return float(self.get_context(_NAME).accumulated_residual_diff)

    def can_cache(self, states_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        """`states_tensor` is what the first blocks have just added to the hidden states."""
        hit = bool(super().can_cache(states_tensor, *args, **kwargs))
        diff = self.get_current_step_residual_diff()
        # The library takes a change that is NaN for a large one, and computes on. A negative one says that it compared
        # nothing, as None does: the residual is looked at in its place.
        compared = diff is not None and not diff < 0
        number = float(diff) if compared else float(states_tensor.sum(dtype=torch.float32))
        if not math.isfinite(number):
            name = "the change" if compared else "the sum"
            raise CacheError(f"cache-dit: {name} of the first blocks' residual is {number} at {self.where}.")
        self.last = (self._reason(hit, diff), hit, None if diff is None else float(diff))
        self._shadow_hit = hit and self.forced
        if self._shadow_hit:
            self.add_cached_step()  # the rule's counters and caps go by its own verdict
        return hit and not self.forced

    def set_Fn_buffer(self, *args: Any, **kwargs: Any) -> None:
        if not self._shadow_hit:
            super().set_Fn_buffer(*args, **kwargs)

    def set_Bn_buffer(self, *args: Any, **kwargs: Any) -> None:
        if not self._shadow_hit:
            super().set_Bn_buffer(*args, **kwargs)

    def _reason(self, hit: bool, diff: float | None) -> Reason:
        if self.is_in_warmup():
            return "warmup"
        if self.is_in_full_compute_steps() or (hit and diff is None):
            return "mask"
        if self.get_current_step() == 0:
            return "first"
        # At a threshold of 0 the library compares nothing.
        return "cap" if diff is None and self.get_context().get_residual_diff_threshold() > 0 else "threshold"


def _make_slot(options: CacheDiTOptions, blocks: int, steps: int, forced: bool) -> _Slot:
    manager = _Manager(forced)
    calibrator = None
    if options.taylorseer_order:
        calibrator = TaylorSeerCalibratorConfig(enable_calibrator=True, taylorseer_order=options.taylorseer_order)
    manager.new_context(
        name=_NAME,
        cache_config=DBCacheConfig(
            Fn_compute_blocks=options.fn,
            Bn_compute_blocks=options.bn,
            residual_diff_threshold=options.threshold,
            max_warmup_steps=options.max_warmup_steps,
            max_cached_steps=options.max_cached_steps,
            max_continuous_cached_steps=options.max_continuous_cached_steps,
            enable_separate_cfg=False,
            num_inference_steps=steps,
            steps_computation_mask=[int(digit) for digit in options.mask] or None,
            steps_computation_policy=options.mask_policy,
        ),
        calibrator_config=calibrator,
    )
    with _without_notices():
        cached = CachedBlocks(
            torch.nn.ModuleList(_Block(index) for index in range(blocks)),
            transformer=torch.nn.Module(),
            forward_pattern=ForwardPattern.Pattern_3,
            cache_prefix=_NAME,
            cache_context=_NAME,
            context_manager=manager,
        )
    # The library would average every difference over the default process group: stages and branches would decide
    # together, and with unequal numbers of comparisons wait for each other for ever.
    cached._is_parallelized = lambda: False
    return _Slot(options, cached, manager)


@contextmanager
def _without_notices() -> Iterator[None]:
    """The library prints a line for each set of blocks that it is given: one for each slot of each request."""
    logger = logging.getLogger(pattern_base.__name__)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
