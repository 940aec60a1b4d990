"""Seconds that calls take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
Figure = tuple[str, float, int]
"""What was called, the median of its seconds, and of how many calls."""


def timed(call: Callable[[], Value], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Value]:
    """(seconds, value) of a call."""
    began = clock()
    value = call()
    return clock() - began, value


def median(
    call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, int]:
    """(median seconds, `repeats`); if there are several calls, one before them does not count."""
    if repeats > 1:
        call()
    return statistics.median(timed(call, clock)[0] for _ in range(repeats)), repeats
