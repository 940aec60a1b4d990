"""What planning takes for 24 to 10,000 workers: alike, some slow, short of memory, pipelines unequal."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

from makara.morphing import Choice, Request, Risk, Slot, choose
from makara.simulator import warm_up

from .report import Row
from .sweeps import request, uneven
from .timing import timed

TITLE = "planning by number of workers, GPT-2 2.5B, N=8192"
SIZES = 24, 96, 384, 1536, 10_000
_RISK = Risk(losses_per_s=1 / 600, mean_size=8.0, redo_s=60.0, redo_steps=5.5, form_s=10.0)


def rows() -> list[Row]:
    """Of each kind and number: CPU seconds of the first choice of a calibration, and by which power of the
    number they grew since the last."""
    warm_up(wait=True)
    choose(request(128, uneven(0)))
    found: list[Row] = []
    for what in ("equal", "slow", "memory-bound", "unequal"):
        before: tuple[int, float] | None = None
        for number in SIZES:
            question = asked(what, number)
            seconds, choice = timed(lambda one=question: choose(one), time.thread_time)
            assert isinstance(choice, Choice)
            power = math.log(seconds / before[1], number / before[0]) if before else float("nan")
            shape = choice.candidate.shape
            found.append(
                {"workers": what, "number": number, "CPU s": seconds, "power": power, "chosen": shape}
            )
            before = number, seconds
    return found


def asked(what: str, number: int) -> Request:
    """Every worker on a VM of its own, and losses of eight VMs on average every ten minutes."""
    one, draw = replace(request(number, uneven(number)), risk=_RISK), random.Random(number)
    if what == "slow":
        paces = [draw.uniform(1.1, 1.6) if draw.random() < 0.05 else 1.0 for _ in one.workers]
        slots = [replace(slot, slowdown=pace) for slot, pace in zip(one.workers, paces, strict=True)]
        return replace(one, workers=slots)
    if what == "memory-bound":
        return replace(one, workers=[Slot(slot.worker, slot.vm, 7 * 10**9) for slot in one.workers])
    return replace(one, unequal_pipelines="auto") if what == "unequal" else one
