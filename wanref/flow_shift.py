"""`flow_shift_by_steps`: which flow shift an engine uses for which step count, as engines configure it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wanref.option import check_flow_shift


def parse_flow_shift_by_steps(value: str | Mapping[int, float]) -> dict[int, float]:
    """Parse `"27:12,40:5"` or a mapping of step counts to flow shifts.

    Raises ValueError, naming the entry, for an empty map, a duplicate step count, and whatever is not a step count of
    at least 1 with a finite shift above 0.
    """
    if not isinstance(value, str | Mapping):
        raise ValueError(
            f"flow_shift_by_steps={value!r} is not accepted: give a mapping or a text such as '27:12,40:5'."
        )
    entries: Iterable[tuple[object, object]] = value.items() if isinstance(value, Mapping) else _split(value)
    shifts: dict[int, float] = {}
    for steps, shift in entries:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(
                f"flow_shift_by_steps: step count {steps!r} is not accepted: give an integer of at least 1."
            )
        if steps in shifts:
            raise ValueError(f"flow_shift_by_steps: {steps} steps are given twice ({shifts[steps]} and {shift}).")
        shifts[steps] = check_flow_shift(f"flow_shift_by_steps[{steps}]", shift)
    if not shifts:
        raise ValueError(
            "flow_shift_by_steps is empty: give STEPS:SHIFT pairs, for instance '27:12,40:5', or leave it out."
        )
    return shifts


def check_mapped(steps: int, shift_map: Mapping[int, float], what: str) -> None:
    if steps not in shift_map:
        mapped = ", ".join(map(str, sorted(shift_map)))
        raise ValueError(f"steps={steps} ({what}) is not in this engine's flow_shift_by_steps: give one of {mapped}.")


def _split(text: str) -> Iterable[tuple[object, object]]:
    for entry in text.split(",") if text.strip() else ():
        steps, colon, shift = entry.partition(":")
        try:
            pair = int(steps), float(shift)
        except ValueError:
            colon = ""
        if not colon:
            raise ValueError(f"flow_shift_by_steps: {entry!r} is not STEPS:SHIFT, for instance '27:12'.")
        yield pair
