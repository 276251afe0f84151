"""TeaCache, stage-local: reuse while the accumulated, rescaled change of a signal stays below a threshold.

How public engines differ (signal, eps, sign of the polynomial, forced steps, cap) is data: `DIALECTS`. They reproduce
those engines' decisions; the residual is always the block stack's. No collective takes part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from wanref import block
from wanref.caching.base import Begin, Judgement, Reason, StackCall
from wanref.caching.error import CacheError
from wanref.caching.rule import PlannedRule, Rule
from wanref.checkpoint import Expert
from wanref.topology import BRANCHES, Branch

Signal = Literal["timestep_embedding", "timestep_projection", "modulated_input"]
SignPolicy = Literal["signed", "abs", "clamp"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine decides. `forced` gives, for each signal it knows, the first and last steps always computed."""

    eps: float
    sign: SignPolicy
    forced: Mapping[Signal, tuple[int, int]]
    cap: float | None = None  # of the accumulator, in thresholds


_ORIGINAL: Mapping[Signal, tuple[int, int]] = {"timestep_projection": (5, 0), "timestep_embedding": (1, 1)}

DIALECTS: Mapping[str, Dialect] = {
    "teacache": Dialect(eps=0.0, sign="signed", forced=_ORIGINAL),
    "vllm-omni": Dialect(eps=1e-8, sign="abs", forced={"modulated_input": (1, 0)}),
    "sglang": Dialect(eps=0.0, sign="signed", forced=_ORIGINAL),
    "trt-llm": Dialect(eps=1e-8, sign="abs", forced=_ORIGINAL, cap=2.0),
}


@dataclass(frozen=True, slots=True)
class TeaCacheOptions:
    """One stage's rule for one expert.

    coefficients: of the polynomial, highest degree first. input_range: where it was calibrated; outside it the call is
    computed. first, last: steps of the expert that are always computed.
    """

    signal: Signal
    coefficients: tuple[float, ...]
    threshold: float
    eps: float
    sign: SignPolicy
    first: int
    last: int
    cap: float | None = None
    input_range: tuple[float, float] | None = None


def options_of(dialect: str, signal: Signal, coefficients: Sequence[float], threshold: float) -> TeaCacheOptions:
    """A dialect's rule. Raises CacheError for a signal that the dialect does not know."""
    rules = DIALECTS[dialect]
    if signal not in rules.forced:
        raise CacheError(f"teacache: signal={signal!r} is not one of dialect {dialect}: {', '.join(rules.forced)}.")
    first, last = rules.forced[signal]
    return TeaCacheOptions(signal, tuple(coefficients), threshold, rules.eps, rules.sign, first, last, rules.cap)


@dataclass
class _State:
    """What the rule remembers of one (expert, branch)."""

    position: int = 0
    accumulated: float = 0.0
    previous: torch.Tensor | None = None


@dataclass
class LiveRule:
    """Judges as it goes, by a signal that depends on the hidden states."""

    options: Mapping[Expert, TeaCacheOptions]
    counts: Mapping[Expert, int]
    states: dict[tuple[Expert, Branch], _State] = field(default_factory=dict)
    plan: None = None

    def judge(self, call: StackCall) -> Judgement:
        where, expert = call.where, call.where.step.expert
        options, state = self.options[expert], self.states.setdefault((expert, where.branch), _State())
        signal = block.modulated_input(call.stack.blocks[0], call.hidden, call.step.modulations[0])
        distance = None
        if state.previous is not None:
            distance = float(_relative_change(signal, state.previous, options.eps))
        else:
            _check_first(float(signal.sum(dtype=torch.float32)), options.signal, str(where))
        judgement = _judge(options, state.position, self.counts[expert], distance, state.accumulated, str(where))
        state.position, state.accumulated, state.previous = (
            state.position + 1,
            judgement.accumulated_after or 0.0,
            signal,
        )
        return judgement

    def state(self, expert: Expert, branch: Branch) -> Any:
        return self.states.get((expert, branch))


def _judge(
    options: TeaCacheOptions, position: int, count: int, distance: float | None, accumulated: float, where: str
) -> Judgement:
    """The decision, from numbers alone. A computed step sets the accumulator to 0."""
    if distance is not None and not math.isfinite(distance):
        raise CacheError(f"teacache: the change of the {options.signal} signal is {distance} at {where}.")
    before, threshold = accumulated, options.threshold

    def compute(reason: Reason, rescaled: float | None = None) -> Judgement:
        return Judgement("compute", reason, distance, rescaled, before, 0.0, threshold)

    if distance is None or position == 0:
        return compute("first")
    if position < options.first:
        return compute("warmup")
    if position >= count - options.last:
        return compute("last")
    if options.input_range is not None and not options.input_range[0] <= distance <= options.input_range[1]:
        return compute("range_guard")
    rescaled = _signed(_polynomial(options.coefficients, distance), options.sign)
    accumulated += rescaled
    if options.cap is not None:
        accumulated = min(accumulated, options.cap * threshold)
    if accumulated < threshold:
        return Judgement("reuse", "threshold", distance, rescaled, before, accumulated, threshold)
    return compute("threshold", rescaled)


def _check_first(total: float, signal: Signal, where: str) -> None:
    """The first signal has no change in which a value that is not finite would show, and all later ones have."""
    if not math.isfinite(total):
        raise CacheError(f"teacache: the {signal} signal is not finite at {where}: its sum is {total}.")


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _signed(value: float, sign: SignPolicy) -> float:
    if sign == "abs":
        return abs(value)
    return max(value, 0.0) if sign == "clamp" else value


def _relative_change(current: torch.Tensor, previous: torch.Tensor, eps: float) -> torch.Tensor:
    """mean|x - prev| / (mean|prev| + eps), in float32."""
    current, previous = current.float(), previous.float()
    return (current - previous).abs().mean() / (previous.abs().mean() + eps)


@dataclass(frozen=True, slots=True)
class TeaCache:
    """Makes the rule of a request: options for each stage and expert."""

    options: Mapping[tuple[int, Expert], TeaCacheOptions]

    def __call__(self, begin: Begin) -> Rule:
        """Raises CacheError if a stage has no options for an expert of the schedule."""
        counts = {expert: count for expert, count in begin.schedule.split.items() if count}
        stages = range(begin.place.topology.pp)
        for stage in stages:
            for expert in counts:
                if (stage, expert) not in self.options:
                    raise CacheError(
                        f"teacache: no coefficients for stage {stage} of the {expert}-noise expert. Every stage and "
                        "expert needs its own: give them, or load a profile that has them."
                    )
        if len({(o.signal, o.eps) for (_, e), o in self.options.items() if e in counts}) > 1:
            raise CacheError("teacache: signal and eps must be the same on every stage and for every expert.")
        here = {expert: self.options[begin.place.stage, expert] for expert in counts}
        if any(options.signal == "modulated_input" for options in here.values()):
            return LiveRule(here, counts)
        changes = _timestep_changes(begin, here)
        plan: dict[tuple[int, Branch], dict[int, Judgement]] = {}
        for stage in stages:
            judged = self._judge_all(begin, stage, counts, changes)
            for branch in BRANCHES:
                plan[stage, branch] = {s.index: judged[s.index] for s in begin.schedule if branch == "cond" or s.guided}
        return PlannedRule(plan)

    def _judge_all(
        self, begin: Begin, stage: int, counts: Mapping[Expert, int], changes: Mapping[Expert, list[float | None]]
    ) -> dict[int, Judgement]:
        """One stage's judgements of all steps. Both branches see the same timesteps, so they judge alike."""
        judged: dict[int, Judgement] = {}
        positions = dict.fromkeys(counts, 0)
        accumulated = dict.fromkeys(counts, 0.0)
        for step in begin.schedule:
            expert, position = step.expert, positions[step.expert]
            where = f"step {step.index}, stage {stage}, {expert}-noise expert (both branches)"
            judgement = _judge(
                self.options[stage, expert],
                position,
                counts[expert],
                changes[expert][position],
                accumulated[expert],
                where,
            )
            judged[step.index] = judgement
            positions[expert], accumulated[expert] = position + 1, judgement.accumulated_after or 0.0
        return judged


def _timestep_changes(begin: Begin, options: Mapping[Expert, TeaCacheOptions]) -> dict[Expert, list[float | None]]:
    """The changes of a signal that depends on the timestep alone, for each expert's steps, with one copy to the host.

    Each step's embedding is computed at its own shape, as in the loop: a batch of timesteps rounds otherwise.
    """
    numbers: list[torch.Tensor] = []
    for expert, rule in options.items():
        previous: torch.Tensor | None = None
        for step in begin.schedule:
            if step.expert != expert:
                continue
            timesteps = torch.tensor(step.timestep, device=begin.device).expand(begin.batch)
            embedding, projection = begin.stages[expert].time_embedding(timesteps, begin.dtype)
            current = embedding if rule.signal == "timestep_embedding" else projection
            # An expert's first signal has no change. Its sum travels in that place, to be seen to be finite.
            if previous is None:
                numbers.append(current.sum(dtype=torch.float32))
            else:
                numbers.append(_relative_change(current, previous, rule.eps))
            previous = current
    values = iter(torch.stack(numbers).tolist())
    changes: dict[Expert, list[float | None]] = {}
    for expert, rule in options.items():
        total, *rest = (next(values) for _ in range(begin.schedule.split[expert]))
        index = next(step.index for step in begin.schedule if step.expert == expert)
        _check_first(total, rule.signal, f"step {index}, both branches, all stages, {expert}-noise expert")
        changes[expert] = [None, *rest]
    return changes
