"""What a whole choice takes: GPT-2 2.5B, 8192 micro-batches of its times, on 128 and 10,000 workers."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

from makara.examples.replay.make_calibration import calibration
from makara.morphing import Choice, Request, Slot, choose
from makara.simulator import Calibration, warm_up

from .timing import Figure, timed

_REPEATS = 5


def sweeps() -> list[Figure]:
    """(what, median CPU seconds of the thread, repeats): other work may share the cores. Warm: code compiled.

    `first`: nothing is known of the calibration.
    """
    warm_up(wait=True)
    choose(request(128, uneven(0)))
    fresh = [request(128, uneven(seed)) for seed in range(1, 1 + _REPEATS)]
    known, jittery = request(128, uneven(0)), request(128, _jittery(uneven(0)))
    many = request(10_000, uneven(0))
    split = [request(128, _halved(uneven(seed))) for seed in range(1, 1 + _REPEATS)]
    many_split = request(10_000, _halved(uneven(0)))
    return [
        ("first sweep of a job, G=128 K=54 N=8192", *_median(fresh)),
        ("sweep, G=128 K=54 N=8192", *_median([known] * _REPEATS)),
        ("the same with 1 ms of jitter", *_median([jittery] * _REPEATS)),
        ("sweep, G=10000 K=54 N=8192", *_median([many] * _REPEATS)),
        ("first sweep of a job, G=128 K=54 N=8192, halves measured", *_median(split)),
        ("sweep, G=10000 K=54 N=8192, halves measured", *_median([many_split] * _REPEATS)),
    ]


def uneven(seed: int) -> Calibration:
    """Blocks whose times differ by up to 20 %."""
    draw, even = random.Random(seed), calibration()
    factors = [draw.uniform(1.0, 1.2) for _ in even.forward_s]
    return replace(
        even,
        forward_s=tuple(s * factor for s, factor in zip(even.forward_s, factors, strict=True)),
        backward_s=tuple(s * factor for s, factor in zip(even.backward_s, factors, strict=True)),
    )


def _halved(even: Calibration) -> Calibration:
    """I and W half a backward each, but for the first section, whose I nobody waits for."""
    half_s = tuple(seconds / 2 for seconds in even.backward_s[1:])
    return replace(
        even,
        input_s=(0.0, *half_s),
        weight_s=(even.backward_s[0], *half_s),
        pending_bytes=tuple(size // 4 for size in even.activation_bytes),
    )


def _jittery(even: Calibration) -> Calibration:
    link = replace(even.inter_vm, jitter_s=1e-3)
    return replace(even, inter_vm=link, intra_vm=link)


def request(num_workers: int, model: Calibration) -> Request:
    return Request(
        calibration=model,
        num_sections=model.num_sections,
        num_micro_batches=8192,
        workers=[Slot(f"vm{n}.0", f"vm{n}", 16 * 10**9) for n in range(num_workers)],
        generation=1,
    )


def _median(requests: list[Request]) -> tuple[float, int]:
    times: list[float] = []
    for request in requests:
        seconds, choice = timed(lambda request=request: choose(request), time.thread_time)
        assert isinstance(choice, Choice)
        times.append(seconds)
    return statistics.median(times), len(times)
