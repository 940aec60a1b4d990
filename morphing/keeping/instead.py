"""The plan that ran, rerouted around those who are gone, as a candidate beside the plan that is fastest.

A rerouted plan is a candidate like any other, predicted by the same simulation. Nothing moves for it, so it
begins at once; the other's workers first load what they lack. `worths` says which to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...pipeline import Plan, Range, Schedule
from ...simulator import Calibration, sizes_of
from ..placement import Slot
from ..recovery import transfers
from ..request import Candidate, Choice, Infeasible, Request
from ..reroute import reroute
from ..risk import Prospect, prospect
from ..stages import Mode, stage_table

_WINDOWS = (4, 3, 2)  # times P, where the window of before takes too much memory, as in `choose`


@dataclass(frozen=True, slots=True)
class Before:
    """The plan that ran last; `workers` are ids in rank order."""

    plan: Plan
    workers: Sequence[str]


def rerouted(request: Request, before: Before) -> Choice | Infeasible | None:
    """The plan of before without the workers that are not in the request, or hold nothing of it any more.

    None if all of them are there. Infeasible if a section has no host, or memory does not do for the dead
    workers' share in any window.
    """
    slots, holding = {slot.worker: slot for slot in request.workers}, request.holding
    dead = [
        rank
        for rank, (worker, span) in enumerate(zip(before.workers, before.plan.ranges, strict=True))
        if worker not in slots or holding.get(worker) != span
    ]
    if not dead:
        return None
    pace = [slots[worker].slowdown if worker in slots else 1.0 for worker in before.workers]
    found = reroute(replace(before.plan, generation=request.generation), dead, pace)
    if isinstance(found, Infeasible):
        return found
    used = [slots[before.workers[rank]] for rank in found.survivors]
    tried: list[Candidate] = []
    for window in _windows(request, found.plan, used):
        choice = _simulated(request, replace(found.plan, window=window), used)
        tried.append(choice.candidate)
        if choice.candidate.rejected is None:
            return replace(choice, candidates=tuple(tried))
    why = f"rerouted as {found.plan.shape}, it does not fit: {tried[-1].rejected}"
    return Infeasible(why, tuple(tried))


def prospect_of(
    request: Request, spans: Sequence[Range], slots: Sequence[Slot], step_s: float, change_s: float | None
) -> Prospect:
    """What may be expected of a plan for the request; `spans` and `slots` are those of its workers by rank.

    `change_s`: for how long nothing steps before it does, at least; None if it steps already.
    """
    hosts = [set[str]() for _ in range(request.num_sections)]
    for slot, span in zip(slots, spans, strict=True):
        for section in span.sections:
            hosts[section].add(slot.vm)
    begins_s = 0.0
    if change_s is not None:
        workers = [slot.worker for slot in slots]
        begins_s = max(change_s, loading_s(spans, workers, request.calibration, request.holding))
    return prospect(
        request.num_micro_batches * request.calibration.microbatch_size,
        step_s,
        begins_s,
        list(map(frozenset, hosts)),
        len({slot.vm for slot in request.workers}),
        request.risk,
    )


def loading_s(
    spans: Sequence[Range], workers: Sequence[str], calibration: Calibration, holding: Mapping[str, Range]
) -> float:
    """Seconds until every worker has the sections of its span, from the others at the rate between VMs.

    As `transfers` has them sent; whoever receives or sends most is waited for. What no worker of the plan
    holds is counted where it is received.
    """
    sizes, nobody = calibration.saved_bytes, len(workers)
    holders: dict[int, list[int]] = {}
    for member, worker in enumerate(workers):
        for section in holding[worker].sections if worker in holding else ():
            holders.setdefault(section, []).append(member)
    missing = {section: (nobody,) for section in range(calibration.num_sections) if section not in holders}
    received, sent = [0] * len(workers), [0] * (len(workers) + 1)
    for one in transfers({**holders, **missing}, spans):
        received[one.destination] += sizes[one.section]
        sent[one.source] += sizes[one.section]
    most = max(*received, *sent[:nobody])
    link = calibration.inter_vm
    return link.latency_s + most / link.bytes_per_s if most else 0.0


def _windows(request: Request, plan: Plan, slots: Sequence[Slot]) -> list[int | None]:
    """The window of before, or one that bounds what survivors have in flight where their share does not fit;
    then narrower ones."""
    depth = max(len(path.hops) for path in plan.paths)
    if plan.schedule is not Schedule.VARUNA:
        return [plan.window]
    widest = _room(request, plan, slots) if plan.window is None else plan.window
    most = plan.num_micro_batches if widest is None else min(widest, plan.num_micro_batches)
    return [widest, *(times * depth for times in _WINDOWS if times * depth < most)]


def _room(request: Request, plan: Plan, slots: Sequence[Slot]) -> int | None:
    """How many micro-batches in flight every worker has memory for; None: for all of its share. A simulation
    alone does not tell, since a worker that waits for gradients runs more forwards."""
    calibration = _on_its_device(request.calibration, plan)
    table, sizes = stage_table(calibration, plan.schedule), sizes_of(calibration)
    shares, feeders = [0] * plan.num_workers, [set[int]() for _ in plan.ranges]
    for path in plan.paths:
        for hop in path.hops:
            shares[hop.worker] += len(path.micro_batches)
        for before, hop in pairwise(path.hops):
            feeders[hop.worker].add(before.worker)
    short: list[int] = []
    for rank, (span, has) in enumerate(zip(plan.ranges, _capacities(request, slots), strict=True)):
        needs = table.memory(span.start, span.stop, Mode(plan.recompute, plan.has_halves))
        # Where several workers send, a window's worth of each may wait.
        waiting = max(0, len(feeders[rank]) - 1) * sizes.inputs(span)
        room = replace(needs, each_bytes=needs.each_bytes + waiting).window(has)
        if room is not None and room < shares[rank]:
            short.append(room)
    return max(1, min(short)) if short else None


def _on_its_device(calibration: Calibration, plan: Plan) -> Calibration:
    return calibration.with_optimizer_on_host() if plan.optimizer_on_host else calibration


def _capacities(request: Request, slots: Sequence[Slot]) -> list[int]:
    return [min(slot.memory_bytes, request.memory_limit_bytes or slot.memory_bytes) for slot in slots]


def _simulated(request: Request, plan: Plan, slots: Sequence[Slot]) -> Choice:
    step = request.simulated(plan, _on_its_device(request.calibration, plan), slots)
    needs = zip(step.peak_bytes, _capacities(request, slots), strict=True)
    short = [need for need, has in needs if need > has]
    stages = max(len(path.hops) for path in plan.paths)
    replicas = max(len(plan.hosts(section)) for section in range(plan.num_sections))
    row = Candidate(
        stages,
        replicas,
        plan.recompute,
        plan.optimizer_on_host,
        halves=plan.halves,
        window=plan.window,
        rejected=f"it needs {max(short) / 1e6:.0f} MB of a worker that has less" if short else None,
        missing=max(0, stages * replicas - plan.num_workers),
    )
    return Choice(plan, tuple(slot.worker for slot in slots), step.time_s, row.with_step(step))
