"""What planning and sums cost: schedules, a simulation, the whole choice, exact against fast sums."""

from __future__ import annotations

import torch
from makara.morphing import Request, Rerouted, Slot, choose, reroute
from makara.pipeline import Plan, Schedule, grid
from makara.pipeline.schedules import orders
from makara.pipeline.traffic import own_part
from makara.simulator import simulate
from makara.worker.sections.grad_sums import ExactSum, FastSum

from .made_up import model, stages
from .one_step import one_step
from .report import Row
from .sweeps import sweeps
from .timing import Figure, median

TITLE = "planning, one step in virtual time (the paper's simulator: 376 to 660 ms), gradient sums; medians"
PARAMETERS = {"w": (1 << 20,)}


def rows() -> list[Row]:
    measured = [*planning(), *rerouting(), *one_step(), *sweeps(), *sums()]
    return [{"what": what, "median ms": 1000 * seconds, "of": repeats} for what, seconds, repeats in measured]


def planning() -> list[Figure]:
    """Schedules, one simulated mini-batch, and the whole choice that a morph waits for."""
    calibration = model((0.01,) * 36)
    rows: list[Figure] = []
    for schedule in Schedule:
        plan = grid(stages(36, 36), 4, 512, schedule=schedule, recompute=True)
        rows.append((f"order of {schedule}, P=36 D=4 N=512", *median(lambda plan=plan: orders(plan), 3)))
    plan = grid(stages(36, 9), 4, 512, recompute=True)
    rows.append(("simulate, P=9 D=4 N=512", *median(lambda: simulate(plan, calibration), 3)))
    for workers in (6, 16, 32):
        slots = [Slot(f"vm{n}.0", f"vm{n}", 16 << 30) for n in range(workers)]
        request = Request(
            calibration=calibration,
            num_sections=36,
            num_micro_batches=128,
            workers=slots,
            generation=1,
        )
        rows.append((f"choose among P x D, G={workers} K=36 N=128", *median(lambda r=request: choose(r), 3)))
    return rows


def rerouting() -> list[Figure]:
    """What a death costs before the next step's first operation, if peers take the dead worker's work."""
    calibration, depth, replicas = model((0.01,) * 36), 36, 3
    whole = grid(stages(36, depth), replicas, 2048, window=2 * depth)
    dead, peer = depth + 7, 7
    found = reroute(whole, [dead])
    assert isinstance(found, Rerouted)
    plan, shape = found.plan, f"P={depth} D={replicas} N=2048, one worker dead"
    value = plan.to_json()
    return [
        (f"reroute, {shape}", *median(lambda: reroute(whole, [dead]), 3)),
        (f"its JSON read and checked, {shape}", *median(lambda: Plan.from_json(value), 3)),
        (f"order and messages of a peer, {shape}", *median(lambda: own_part(plan, peer), 3)),
        (f"simulate, {shape}", *median(lambda: simulate(plan, calibration, timeline=False), 3)),
    ]


def sums() -> list[Figure]:
    """Adding one micro-batch's gradient of a million parameters: exact against floating point."""
    gradient = torch.randn(PARAMETERS["w"])
    exact, fast = ExactSum(PARAMETERS, {"w": 64}), FastSum(PARAMETERS)
    exact.reset({"w": 2.0**40})
    fast.reset({})
    return [
        ("add 1 M gradients, exact", *median(lambda: exact.add("w", gradient), 20)),
        ("add 1 M gradients, fast", *median(lambda: fast.add("w", gradient), 20)),
    ]
