"""Pipeline templates (Oobleck §4.1): the best pipeline over n VMs, for all n at once.

The time of n_b micro-batches in a pipeline is the largest, over its stages, of

    fill + (n_b - 1) * work + drain

`fill` and `drain`: of one micro-batch through the stages before and back, messages included, and through
the stage itself. `work`: all that the stage does for a micro-batch, or the longest time for which a message
occupies its wire. A stage of w workers counts n_b / w, for they take micro-batches in turn. Where memory
holds W at a time, another bound is n_b / W times the way to the last stage and back; beyond that, one has to
fit. All-reduces, the commit and the update come after that time, and jitter is left out: plans made of
templates are then simulated. (Oobleck adds the fill and the drain of all stages to the slowest one's steady
part. With forwards ahead of their turn the stages after the slowest hide behind it: this time is within 2 %
of the simulation with 60 micro-batches in nine uneven stages, theirs within 12 %.)

The best is found exactly, by dynamic programming over (devices, first section), from the last stage to the
first (see `template_labels`). Oobleck's planner divides and conquers, and takes 3,298 s for 24 nodes of 8
GPUs and 96 layers (Table 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..pipeline import Range
from ..simulator import Calibration, Compiler, Link, to_ns
from .stages import WHOLE, Mode, StageTable
from .template_labels import CutCosts, Front, Fronts, Labels, StageCosts, fill

_ANY = 1 << 40  # micro-batches: memory does not bound them
_ROOM = 1 << 16  # labels to begin with; four times as many are tried where they are too few
_FRONT = 1 << 4  # of them at most in one front


class TemplateStage(NamedTuple):
    """`width` workers of one VM that host the same sections and take their micro-batches in turn."""

    range: Range
    width: int


class _Line(NamedTuple):
    """A bound that a stage sets: fixed + n_b / width * each / together."""

    fixed_ns: int
    each_ns: int
    width: int
    together: int = 1

    def time_ns(self, num_micro_batches: int) -> int:
        return self.fixed_ns + -(-num_micro_batches // self.width) * self.each_ns // self.together

    def done_by(self, time_ns: int) -> int:
        return ((time_ns - self.fixed_ns + 1) * self.together - 1) // self.each_ns * self.width


@dataclass(frozen=True, slots=True)
class Template:
    """One way to run a pipeline on `num_vms` VMs; each takes its devices from the first stage on."""

    num_vms: int
    stages: tuple[TemplateStage, ...]
    lines: tuple[_Line, ...]

    @property
    def trip_ns(self) -> int:
        """Of one micro-batch through all stages and back."""
        return self.lines[1].each_ns  # the first stage's bound by memory

    def time_ns(self, num_micro_batches: int, window: int | None = None) -> int:
        """From the first forward to the end of the last backward; `window`: one that all stages keep to,
        beside what memory holds of each."""
        found = max(line.time_ns(num_micro_batches) for line in self.lines)
        if window is None:
            return found
        at_once = window * max(stage.width for stage in self.stages)
        return max(found, num_micro_batches * self.trip_ns // at_once)

    def done_by(self, time_ns: int) -> int:
        """The largest number of micro-batches that take no longer."""
        return max(0, min(line.done_by(time_ns) for line in self.lines))


def templates(
    table: StageTable,
    num_micro_batches: int,
    max_vms: int,
    devices_per_vm: int,
    capacity_bytes: int,
    mode: Mode = WHOLE,
) -> Mapping[int, Template]:
    """{number of VMs up to `max_vms`: the template that is best for `num_micro_batches` (n_b)}.

    All devices are used. A number is left out where nothing fits: too many sections for the memory of too few
    VMs, or fewer sections than devices. Raises `ValueError`, naming the argument.
    """
    for name, value in (
        ("num_micro_batches", num_micro_batches),
        ("max_vms", max_vms),
        ("devices_per_vm", devices_per_vm),
    ):
        if value < 1:
            raise ValueError(f"{name}: {value} is not a whole number >= 1")
    costs = stage_costs(table, capacity_bytes, mode)
    cuts = cut_costs(table.calibration)
    num, num_devices = table.num_sections, max_vms * devices_per_vm
    kernel, room = _COMPILER.ready or _INTERPRETED, _ROOM
    while True:
        fronts = Fronts(*(kernel.empty((num_devices + 1) * (num + 1)) for _ in Fronts._fields))
        labels = Labels(*(kernel.empty(room) for _ in Labels._fields))
        front = Front(*(kernel.empty(room // _FRONT) for _ in Front._fields))
        found = kernel.fill(
            num,
            num_devices,
            devices_per_vm,
            num_micro_batches,
            costs.bounds(num_micro_batches),
            StageCosts(*map(kernel.array, costs)),
            CutCosts(*map(kernel.array, cuts)),
            fronts,
            labels,
            front,
        )
        if found >= 0:
            break
        room *= 4
    best: dict[int, Template] = {}
    for num_vms in range(1, max_vms + 1):
        place = num_vms * devices_per_vm * (num + 1)
        if fronts.number[place]:
            stages = _stages(labels, int(fronts.first[place]))
            template = template_of(table, stages, devices_per_vm, capacity_bytes, mode)
            assert template is not None, "its stages fit"
            best[num_vms] = template
    return best


@lru_cache(maxsize=4096)  # for most numbers of micro-batches the same are best
def template_of(
    table: StageTable,
    stages: tuple[TemplateStage, ...],
    devices_per_vm: int,
    capacity_bytes: int,
    mode: Mode = WHOLE,
) -> Template | None:
    """Of these stages, which use all devices of their VMs; None if one does not fit."""
    costs = stage_costs(table, capacity_bytes, mode)
    row = table.num_sections + 1
    if any(not costs.window[stage.range.start * row + stage.range.stop] for stage in stages):
        return None
    num_devices = sum(stage.width for stage in stages)
    lines = _lines(stages, devices_per_vm, costs, cut_costs(table.calibration))
    return Template(num_devices // devices_per_vm, stages, lines)


def _stages(labels: Labels, label: int) -> tuple[TemplateStage, ...]:
    stages = list[TemplateStage]()
    while (after := int(labels.after[label])) >= 0:
        span = Range(int(labels.start[label]), int(labels.start[after]))
        stages.append(TemplateStage(span, int(labels.width[label])))
        label = after
    return tuple(stages)


def _lines(
    stages: Sequence[TemplateStage], per_vm: int, costs: StageCosts, cuts: CutCosts
) -> tuple[_Line, ...]:
    """The bounds of all stages; see the module's docstring."""
    row = stages[-1].range.stop + 1
    behind = list(itertools.accumulate((stage.width for stage in reversed(stages)), initial=0))[-2::-1]
    wires = [
        _wire_ns(stage.range.stop, rest % per_vm != 0, cuts)
        for stage, rest in zip(stages, behind, strict=True)
    ]
    trips = [costs.trip_ns[stage.range.start * row + stage.range.stop] for stage in stages]
    whole = sum(trips) + sum(wire for wire, _ in wires)
    lines, lead = list[_Line](), 0
    for stage, (wire_ns, occupied_ns), trip_ns in zip(stages, wires, trips, strict=True):
        place = stage.range.start * row + stage.range.stop
        work_ns = max(costs.work_ns[place], occupied_ns)
        lines.append(_Line(lead + trip_ns - work_ns, work_ns, stage.width))
        lines.append(_Line(lead, whole - lead, stage.width, costs.window[place]))
        lead += trip_ns + wire_ns
    return tuple(lines)


def _wire_ns(stop: int, is_near: bool, cuts: CutCosts) -> tuple[int, int]:
    if is_near:
        return cuts.near_ns[stop], cuts.near_work_ns[stop]
    return cuts.far_ns[stop], cuts.far_work_ns[stop]


@lru_cache(maxsize=16)
def stage_costs(table: StageTable, capacity_bytes: int, mode: Mode = WHOLE) -> StageCosts:
    """What `fill` needs of each stage; see there."""
    num = table.num_sections
    work, trip, window = ([0] * (num * (num + 1)) for _ in range(3))
    for start in range(num):
        for stop in range(start + 1, num + 1):
            fits = table.memory(start, stop, mode).window(capacity_bytes)
            if fits == 0:
                continue
            place = start * (num + 1) + stop
            window[place] = _ANY if fits is None else fits
            times_ns = _times_ns(table, start, stop, mode)
            # At least 1 ns, as in simulations: sections may be calibrated as taking none.
            work[place], trip[place] = (max(1, each_ns) for each_ns in times_ns)
    return StageCosts(work, trip, window)


def _times_ns(table: StageTable, start: int, stop: int, mode: Mode) -> tuple[int, int]:
    """(work, trip) of a stage. While the first micro-batch's forward goes on, and before the last one's
    gradient is back, a stage recomputes, and with halves does each W but the first stage's last."""
    forward = table.forward_ns[stop] - table.forward_ns[start]
    if not table.splits(stop, mode.halves):
        backward = table.backward_ns[stop] - table.backward_ns[start]
        return table.work_ns(start, stop, mode.recompute), forward + backward + 2 * table.own_ns
    through = forward + table.input_ns[stop] - table.input_ns[start] + 2 * table.own_ns
    work = through + table.weight_ns[stop] - table.weight_ns[start] + table.own_ns
    return work, work if start == 0 else through


@lru_cache(maxsize=16)
def cut_costs(calibration: Calibration) -> CutCosts:
    """What `fill` needs of each cut; see there. Message sizes are those of a single micro-batch."""

    def there_and_back_ns(link: Link, sizes: tuple[int, int]) -> int:
        message_s = link.latency_s + calibration.message_s
        return sum(to_ns(message_s + link.occupied_s(size)) for size in sizes)

    def occupied_ns(link: Link, sizes: tuple[int, int]) -> int:
        return to_ns(link.occupied_s(max(sizes)))

    sizes = list(zip(calibration.cut_bytes, calibration.grad_cut_bytes, strict=True))
    near, far = calibration.intra_vm, calibration.inter_vm
    return CutCosts(
        *(
            [0, *(cost(link, size) for size in sizes), 0]
            for cost, link in (
                (there_and_back_ns, near),
                (there_and_back_ns, far),
                (occupied_ns, near),
                (occupied_ns, far),
            )
        )
    )


class _Kernel(NamedTuple):
    """`fill`, interpreted or compiled, and the arrays that it takes."""

    fill: Callable[..., int]
    array: Callable[[Sequence[int]], Any]
    empty: Callable[[int], Any]


def _zeros(length: int) -> list[int]:
    return [0] * length


def _compiled(in_memory: bool) -> _Kernel:
    import numpy

    from ..simulator.compiling import compile_kernel

    def array(values: Sequence[int]) -> Any:
        return numpy.array(values, numpy.int64)

    def empty(length: int) -> Any:
        return numpy.zeros(length, numpy.int64)

    tables = (StageCosts, CutCosts, Fronts, Labels, Front)
    example = (1, 1, 1, 1, True, *(table(*[empty(1)] * len(table._fields)) for table in tables))
    return _Kernel(compile_kernel(fill, example, in_memory=in_memory), array, empty)


_INTERPRETED = _Kernel(fill, list, _zeros)
_COMPILER = Compiler(_compiled)
