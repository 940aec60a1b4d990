"""Slower networks in virtual time: what they cost GPipe and Varuna, and which pipeline depth they call for.

Both tables are of Varuna's own (Tables 5 and 3), with the same models by arithmetic on the same machines
(`examples/replay/make_calibration.py`: V100, m=4, 8192 samples a step). The paper gives no bandwidth but the
10 Gbit/s of its VMs' Ethernet, and says that routes between them go through "bottleneck switches, that in
practice limit bandwidth" (§7). `EFFECTIVE` is the only number fitted here, to the first row of Table 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from makara.examples.replay.make_calibration import M, calibration
from makara.morphing import Choice, Request, Slot, choose
from makara.pipeline import Schedule
from makara.simulator import Calibration, Link, warm_up

from .report import Row

TITLE = "simulated steps of 8192 samples over slower networks, beside Varuna's tables"
NUM_MICRO_BATCHES = 8192 // M
STATED, EFFECTIVE = 10e9 / 8, 1.6e9 / 8  # bytes a second; with the second a message takes 1.3 forwards
_GPU_BYTES = 16 * 10**9
_PAPER_SCHEDULES = {1.0: (0.6, 0.55), 1.5: (0.59, 0.48), 2.0: (0.59, 0.426)}  # Table 5, 8.3 B
_PAPER_DEPTHS = {36: (66.6, 65.88, 50.04), 100: (155.52, 164.34, 99.0)}  # Table 3, 2.5 B: P = 6, 9, 18


def rows() -> list[Row]:
    warm_up(wait=True)
    return [*_schedules(), *_depths()]


def _schedules() -> list[Row]:
    """8.3 billion parameters as 19×3, the shape of the paper's simulation: samples/s for each GPU."""
    found = [
        _row(f"paper, {times:g}x slower", varuna, gpipe, "-")
        for times, (varuna, gpipe) in _PAPER_SCHEDULES.items()
    ]
    for bytes_per_s in (EFFECTIVE, STATED):
        for times in _PAPER_SCHEDULES:
            model = calibration(72, 3072, 24, _link(bytes_per_s / times))
            varuna = _rate(model, Schedule.VARUNA, None)
            gpipe = _rate(model, Schedule.GPIPE, None)
            bounded = _rate(model, Schedule.GPIPE, _GPU_BYTES)
            name = f"{8 * bytes_per_s / 1e9:g} Gbit/s, {times:g}x slower"
            found.append(_row(name, varuna, gpipe, bounded))
    return found


def _row(name: str, varuna: float, gpipe: float, bounded: float | str) -> Row:
    return {
        "8.3 B, 19x3, samples/s/GPU": name,
        "Varuna": varuna,
        "GPipe": gpipe,
        "Varuna/GPipe": varuna / gpipe,
        "GPipe in 16 GB": bounded,
    }


def _rate(model: Calibration, schedule: Schedule, memory_bytes: int | None, depth: int = 19) -> float:
    """Without a bound on memory GPipe has every micro-batch in flight; with one it drains in between."""
    request = _request(model, depth * 3, memory_bytes or 2**60, schedule, depth)
    choice = choose(request)
    assert isinstance(choice, Choice), choice
    return 8192 / choice.predicted_s / (depth * 3)


def _depths() -> list[Row]:
    """2.5 billion parameters: samples/s by pipeline depth, and what the sweep over all depths comes to."""
    found: list[Row] = [
        _depth_row(f"paper, {num_gpus} GPUs", rates, "-") for num_gpus, rates in _PAPER_DEPTHS.items()
    ]
    for bytes_per_s in (STATED, EFFECTIVE, EFFECTIVE / 2):
        model = calibration(link=_link(bytes_per_s))
        for num_gpus in (12, 36, 100, 300):
            rates = [_fastest(model, num_gpus, depth) for depth in (6, 9, 18)]
            best = _fastest(model, num_gpus, None)
            name = f"{8 * bytes_per_s / 1e9:g} Gbit/s, {num_gpus} GPUs"
            found.append(_depth_row(name, [_per_s(one) for one in rates], best.plan.shape if best else "-"))
    return found


def _depth_row(name: str, rates: Sequence[float | str], best: str) -> Row:
    columns = dict(zip(("P=6", "P=9", "P=18"), rates, strict=True))
    return {"2.5 B, samples/s": name, **columns, "best of all": best}


def _per_s(choice: Choice | None) -> float | str:
    return "-" if choice is None else 8192 / choice.predicted_s


def _fastest(model: Calibration, num_gpus: int, depth: int | None) -> Choice | None:
    choice = choose(_request(model, num_gpus, _GPU_BYTES, Schedule.VARUNA, depth))
    return choice if isinstance(choice, Choice) else None


def _request(
    model: Calibration, num_gpus: int, memory_bytes: int, schedule: Schedule, depth: int | None
) -> Request:
    return Request(
        calibration=model,
        num_sections=model.num_sections,
        num_micro_batches=NUM_MICRO_BATCHES,
        workers=[Slot(f"vm{n}.0", f"vm{n}", memory_bytes) for n in range(num_gpus)],
        generation=1,
        schedule=schedule,
        recompute="on",
        pipeline_parallel_degree=depth,
    )


def _link(bytes_per_s: float) -> Link:
    return Link(latency_s=5e-4, bytes_per_s=bytes_per_s)
