"""Steps in slots, F = I = W = 1, without a fault and rerouted: emulated workers beside the simulation.

The pipelines of SlipStream's figures 3 to 6: three of four stages, six micro-batches each.
"""

from __future__ import annotations

from dataclasses import replace

from makara.morphing import Rerouted, reroute
from makara.pipeline import Plan, Range, grid
from makara.simulator import Calibration, Link, simulate

from .emulated.fleet import Fleet, fleet, in_fresh_process
from .emulated.models import Emulated, slots
from .emulated.networks import IDEAL
from .made_up import in_halves, model
from .report import Row

SLOT_S = 0.100
DEPTH, REPLICAS, NUM_MICRO_BATCHES = 4, 3, 18
WINDOW = 2 * DEPTH
STEPS = 5
LATE_S = 0.005
"""What each operation and each message may come late by, in slots, in the simulation beside the exact one."""
PIPELINE = 1
"""That which loses a worker."""
TITLE = (
    f"a step of {REPLICAS} pipelines x {DEPTH} stages x {NUM_MICRO_BATCHES // REPLICAS} micro-batches, "
    f"F = I = W = 1 slot of {1e3 * SLOT_S:.0f} ms, asleep; simulated and measured slots"
)


def rows() -> list[Row]:
    return in_fresh_process(_rows_of, slots(SLOT_S, DEPTH))


def _rows_of(model: Emulated) -> list[Row]:
    with fleet(model, DEPTH * REPLICAS, NUM_MICRO_BATCHES) as workers:
        return [
            _row(workers, dead_stage, halves)
            for dead_stage in (None, *range(DEPTH))
            for halves in (False, True)
        ]


def _row(workers: Fleet, dead_stage: int | None, halves: bool) -> Row:
    plan, names = _plan(halves), workers.names
    if dead_stage is not None:
        found = reroute(plan, [PIPELINE * DEPTH + dead_stage])
        assert isinstance(found, Rerouted), found
        plan, names = found.plan, tuple(names[rank] for rank in found.survivors)
    exact = _in_slots()
    simulated = simulate(plan, exact).pipeline_s
    late = simulate(plan, replace(exact, operation_s=LATE_S, message_s=LATE_S)).pipeline_s
    measured = workers.run(plan, IDEAL, STEPS, workers=names)
    return {
        "dead": "nobody" if dead_stage is None else f"stage {dead_stage} of one pipeline",
        "backwards": "I and W" if halves else "whole",
        "simulated slots": simulated,
        f"each {LATE_S:g} late": late,
        "measured slots": measured.step_s / SLOT_S,
        "measured / simulated": measured.step_s / SLOT_S / simulated,
        "measured / late": measured.step_s / SLOT_S / late,
        "spread %": 100 * measured.spread,
    }


def _plan(halves: bool) -> Plan:
    ranges = [Range(stage + (stage > 0), stage + 2) for stage in range(DEPTH)]  # the first has two sections
    return grid(ranges, REPLICAS, NUM_MICRO_BATCHES, window=WINDOW, halves=halves)


def _in_slots() -> Calibration:
    """Of `slots`, with a slot of a second, and nothing else that takes time."""
    free = Link(latency_s=0.0, bytes_per_s=1e18)
    return replace(
        in_halves(model((0.0, *(1.0,) * DEPTH))),
        optimizer_s=(0.0,) * (DEPTH + 1),
        device_kind="cpu",
        inter_vm=free,
        intra_vm=free,
    )
