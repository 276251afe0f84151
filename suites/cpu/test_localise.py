"""A planted slip in one module, block or step is found where it is: by the first difference, and by the lock ladder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from oracle.evidence.lock import LOCKS, LockName, make_lock, module_ports
from oracle.evidence.probe import recording
from oracle.evidence.reader import Trace, open_trace
from oracle.evidence.trace import TraceError
from oracle.verdict.align import align
from oracle.verdict.localise import climb
from suites.support import defaults, load_engine
from suites.traced import ASKED
from wanref.denoise import RequestAborted
from wanref.observe import StepEvent, TensorKey
from wanref.pipeline import WanReference

pytestmark = pytest.mark.cpu


class Now:
    """Which step and how many calls of the stack into it the engine is, as an observer sees it."""

    def __init__(self) -> None:
        self.step = -1

    def __call__(self, event: object, /) -> None:
        if isinstance(event, StepEvent):
            self.step = event.step.index


def run(
    folder: Path,
    checkpoint: Path,
    plant: object = None,
    lock: LockName = "free",
    steps: int = 4,
    of: Trace | None = None,
) -> Trace:
    """Record one run with modules' ports, under a lock on `of`; no more than its first `steps` steps."""
    now = Now()
    engine = load_engine(checkpoint, defaults=defaults(), observer=now)

    def stop(event: object, /) -> None:
        now(event)
        if isinstance(event, StepEvent) and event.step.index + 1 == steps < 4:
            engine.abort()

    engine.observer = stop
    chosen = None
    if of is not None:
        one = align(of)
        chosen = make_lock(lock, of, {key: replicas[0].rank for key, replicas in one.tensors.items()})
    with (
        recording(engine, folder, "tensor", lock=chosen) as probe,
        module_ports(engine, probe),
        planted(engine, now, plant),
    ):
        try:
            engine(ASKED)
        except RequestAborted:
            assert steps < 4
    return open_trace(folder)


@contextmanager
def planted(engine: WanReference, now: Now, plant: object) -> Iterator[None]:
    if plant is None:
        yield
        return
    handle = plant(engine, now)  # type: ignore[operator]
    try:
        yield
    finally:
        handle.remove()


def gain_of_a_module(engine: WanReference, now: Now) -> torch.utils.hooks.RemovableHandle:
    """At step 2 the feed-forward of block 1 is a thousandth too large."""
    module = engine.stages["high"].transformer.blocks[1].ffn
    return module.register_forward_hook(
        lambda _, inputs, output: output * 1.001 if now.step == 2 else None, prepend=True
    )


def slip_of_a_projection(engine: WanReference, now: Now) -> torch.utils.hooks.RemovableHandle:
    """At step 1 the prediction's projection is a thousandth too large: no block has a part in it."""
    module = engine.stages["high"].transformer.proj_out
    return module.register_forward_hook(lambda _, inputs, output: output * 1.001 if now.step == 1 else None)


def drifting_state(engine: WanReference, now: Now) -> torch.utils.hooks.RemovableHandle:
    """From step 1 on, what is embedded depends on how often it was called: state that has no place."""
    calls = [0]

    def hook(_: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * (1 + 1e-4 * (calls[0] > 1))

    return engine.stages["high"].transformer.patch_embedding.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("plant", "step", "block", "lock"),
    [
        (gain_of_a_module, 2, 1, "module"),
        (slip_of_a_projection, 1, "project", "module"),
        (drifting_state, 1, "embed", "module"),
    ],
)
def test_a_slip_is_found_at_its_step_and_block_and_stays_under_every_lock(
    tiny: Callable[..., Path], tmp_path: Path, plant: object, step: int, block: int | str, lock: str
) -> None:
    reference = run(tmp_path / "reference", tiny())
    free = run(tmp_path / "free", tiny(), plant)
    reruns: list[tuple[str, int]] = []

    def record(name: str, steps: int) -> Trace:
        reruns.append((name, steps))
        return run(tmp_path / name, tiny(), plant, name, steps, reference)  # type: ignore[arg-type]

    location = climb(reference, free, "rerun", record)
    assert location is not None
    assert location.difference is not None
    assert (location.difference.step, location.difference.block, location.lock) == (step, block, lock)
    assert location.equal_until == step - 1
    assert f"latents equal until step {step - 1}" in location.sentence
    assert [steps for _, steps in reruns] == [step + 1] * len(reruns)  # nothing behind the first difference runs again
    assert {key.step for key in align(open_trace(tmp_path / "step")).tensors} == set(range(step + 1))


def test_locked_runs_without_a_slip_differ_nowhere(tiny: Callable[..., Path], tmp_path: Path) -> None:
    reference = run(tmp_path / "reference", tiny())
    for name in LOCKS[1:]:
        locked = align(run(tmp_path / name, tiny(), lock=name, of=reference))
        assert {k: r[0].record.digest for k, r in locked.tensors.items()} == {
            k: r[0].record.digest for k, r in align(reference).tensors.items()
        }


def test_a_lock_gives_what_follows_the_references_values(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Under the module lock a slip stays where it is: no later value differs. Under the step lock, no later step."""
    reference = run(tmp_path / "reference", tiny())
    one = align(reference)
    for name in ("step", "block", "module"):
        other = align(run(tmp_path / name, tiny(), gain_of_a_module, name, of=reference))  # type: ignore[arg-type]
        differing = [k for k in other.ordered if other.tensors[k][0].record.digest != one.tensors[k][0].record.digest]
        assert {key.step for key in differing} == {2}
        if name != "step":
            assert {key.block for key in differing} == {1}
        if name == "module":
            assert {key.port for key in differing} == {"ffn"}


def test_a_lock_on_a_reference_without_latents_is_refused_and_not_a_lock_of_nothing(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    reference = run(tmp_path / "reference", tiny())
    lock = make_lock("step", reference, {})
    assert lock is not None
    with pytest.raises(TraceError, match="would lock nothing"):
        lock(TensorKey(0, 0, "high", None, "scheduler"), torch.zeros(1))
