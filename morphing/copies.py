"""On how many VMs each section lives, and how workers are placed so that it lives on enough.

A job may demand that deaths of up to f VMs leave a host of every section (`Request.tolerated_failures`). A
plan meets that if f+1 VMs host each section: VMs, not workers, since the workers of a VM die together. A grid
of P stages has at most P workers of a VM in different stages, so f+1 VMs can host each stage if and only if

    sum over VMs of min(workers of the VM, P) >= (f + 1) * P.

With n0 VMs for one copy of the model (`least_vms`), (f+1) * n0 alike VMs always do. Where they are fewer,
plans have as many copies as can be had.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..pipeline import Plan, Range, Schedule
from ..simulator import Calibration
from .placement import Roster, Slot, place_in
from .request import Choice, Request
from .stages import WHOLE, Mode, stage_table


def copies_of(plan: Plan, vm_of: Sequence[str]) -> int:
    """The least number of VMs that host a section of the plan; `vm_of`: the VM of each rank."""
    by_span: dict[Range, set[str]] = {}
    for span, vm in zip(plan.ranges, vm_of, strict=True):
        by_span.setdefault(span, set()).add(vm)
    hosts = [set[str]() for _ in range(plan.num_sections)]
    for span, vms in by_span.items():
        for section in span.sections:
            hosts[section] |= vms
    return min(map(len, hosts))


def copies_in(choice: Choice, slots: Iterable[Slot]) -> int:
    """`copies_of` a chosen plan; `slots`: the workers that it was chosen for."""
    vm_of = {slot.worker: slot.vm for slot in slots}
    return copies_of(choice.plan, [vm_of[worker] for worker in choice.workers])


def copies_in_grid(slots: Sequence[Slot], depth: int) -> int:
    """`copies_of` a grid on these workers, in rank order."""
    return min(len({slot.vm for slot in slots[stage::depth]}) for stage in range(depth))


def most_copies(slots: Iterable[Slot], depth: int) -> int:
    """On how many VMs each stage of a grid can live at most, however many pipelines it has."""
    sizes = Counter(slot.vm for slot in slots)
    return sum(min(size, depth) for size in sizes.values()) // depth


def demands(request: Request) -> Iterator[Request]:
    """The request, then the same with less and less demanded, for too few workers."""
    most = min(
        request.tolerated_failures + 1,
        len({slot.vm for slot in request.workers}),
        request.num_micro_batches,
        request.data_parallel_degree or request.num_micro_batches,
    )
    for copies in range(most, 0, -1):
        yield replace(request, tolerated_failures=copies - 1)


def too_few(copies: int, wanted: int) -> str:
    """Why a candidate with so few copies cannot be used."""
    return f"a section would live on {_vms(copies)}, resilience.tolerated_failures asks for {_vms(wanted)}"


def spread(
    roster: Roster, count: int, stages: Sequence[Range], holding: Mapping[str, Range], weights: Sequence[int]
) -> list[Slot]:
    """`count` workers of a grid by rank, every stage on as many VMs as can be.

    Ranks go first to as many workers of each VM as there are stages: those take consecutive ranks, so no two
    of them have the same stage. Workers that VMs have beyond that follow.
    """
    depth, taken = len(stages), Counter[str]()
    layers: dict[int, list[Slot]] = {}
    for slot in roster.ordered:
        layers.setdefault(taken[slot.vm] // depth, []).append(slot)
        taken[slot.vm] += 1
    placed = list[Slot]()
    for _, layer in sorted(layers.items()):
        used = layer[: count - len(placed)]
        spans = [stages[rank % depth] for rank in range(len(placed), len(placed) + len(used))]
        placed += place_in(spans, used, holding, weights)
    return placed


def least_vms(
    calibration: Calibration,
    capacity_bytes: int,
    workers_per_vm: int,
    *,
    recompute: bool,
    on_host: bool,
    schedule: Schedule = Schedule.VARUNA,
) -> int | None:
    """n0: the fewest VMs that hold the model, each of whose workers has so much memory; None: no number does.

    Exact for the memory that `choose` counts on: the fewest stages, each of which holds one micro-batch in
    flight (`StageMemory.least_bytes`), divided by the workers of a VM. `recompute`, `on_host`: whether plans
    may recompute, and keep optimizer state on the host.
    """
    table = stage_table(calibration.with_optimizer_on_host() if on_host else calibration, schedule)
    num, modes = table.num_sections, (WHOLE, Mode(recompute))

    def fits(start: int, stop: int) -> bool:
        return any(table.memory(start, stop, mode).least_bytes <= capacity_bytes for mode in modes)

    fewest: list[float] = [0]  # stages that hold the sections before each; infinite: no number does
    for stop in range(1, num + 1):
        fewest.append(
            1 + min((fewest[start] for start in range(stop) if fits(start, stop)), default=math.inf)
        )
    return None if math.isinf(fewest[num]) else math.ceil(fewest[num] / workers_per_vm)


def _vms(count: int) -> str:
    return "1 VM" if count == 1 else f"{count} VMs"
