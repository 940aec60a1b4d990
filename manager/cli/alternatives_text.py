"""What was weighed for a change, as lines below its event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def alternatives_lines(fact: dict[str, Any]) -> Iterator[str]:
    """A line for each plan that was weighed, the one taken first."""
    for one in fact.get("alternatives", ()):
        step = "" if one["step_s"] is None else f": a step {one['step_s']:.3g} s"
        name = f"{one['name']} {one['shape']}{step}"
        if one["worth"] is None:
            yield f"{name}; {one['rejected'] or 'not weighed'}"
            continue
        yield (
            f"{name}, begins in {one['begins_s']:.3g} s, {3600 * one['changes_per_s']:.2g} losses an hour of "
            f"{one['change_s']:.3g} s each, worth {one['worth']:.4g} samples/s"
        )
