"""The best plan of unequal pipelines for a request, where it beats the best grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from ..pipeline import Range, Schedule
from ..simulator import to_ns
from .copies import copies_of, too_few
from .packing import Work
from .placement import place_in, speed_class
from .request import Candidate, Choice
from .search_space import Options
from .stages import Mode
from .templates import Template
from .unequal import Combination, combinations, plan_of, pool

_LOOKED_AT = 10  # numbers of pipelines whose best combination is found
_TRIES = 3  # of these, those that are simulated
_WORTH = 1.01  # of the time that is to be beaten, for even pipelines that never stand still
_PRECISION = 2000  # combinations are found to this part of it
_WORK = 150_000_000  # cells, 2 ns each: so that an answer for any number of VMs takes less than 2 s


def unequal(options: Options, to_beat_s: float) -> Iterator[Choice]:
    """Choices of unequal pipelines whose steps may cost less than `to_beat_s`, the most promising first.

    None where the job fixes a degree, where workers differ in speed or VMs in size, or where pipelines that
    never stood still would hardly save a hundredth. Each has been simulated, and fits into memory.
    """
    per_vm = devices_per_vm(options)
    table, num = options.table, options.request.num_micro_batches
    num_workers = len(options.request.workers)
    to_beat_ns = int(to_beat_s * 1e9)
    ideal_ns = num * table.work_ns(0, table.num_sections, False) // num_workers
    if per_vm is None or ideal_ns * _WORTH > to_beat_ns:
        return
    num_vms = num_workers // per_vm
    found: list[tuple[int, Combination, Mode]] = []
    modes, precision_ns = options.modes(2), 1 + to_beat_ns // _PRECISION
    for mode in modes:
        choices = pool(table, num, num_vms, per_vm, options.capacity(), mode)
        for one in combinations(
            choices,
            num_vms,
            num,
            to_beat_ns,
            precision_ns,
            counts=_LOOKED_AT,
            ends_ns=partial(_about_end_ns, options),
            work=Work(_WORK // len(modes)),
        ):
            if not _is_grid(one) and len(one.templates) >= options.copies:
                found.append((step_ns(options, one, mode), one, mode))
    found.sort(key=lambda each: each[0])
    for _, combination, mode in found[:_TRIES]:
        choice = played(options, combination, mode)
        if choice is not None:
            yield choice


def devices_per_vm(options: Options) -> int | None:
    """None: unequal pipelines are not for this request."""
    request = options.request
    if request.unequal_pipelines == "off" or request.schedule is not Schedule.VARUNA:
        return None
    if request.pipeline_parallel_degree is not None or request.data_parallel_degree is not None:
        return None
    per_vm = Counter(slot.vm for slot in request.workers)
    sizes = set(per_vm.values())
    speeds = {speed_class(slot) for slot in request.workers}
    alike = len(sizes) == len(speeds) == 1
    return sizes.pop() if alike else None


def _is_grid(combination: Combination) -> bool:
    """Whether it has equal pipelines of one worker a stage: those are tried as grids."""
    one = combination.templates[0]
    return len(set(combination.templates)) == 1 and all(stage.width == 1 for stage in one.stages)


def step_ns(options: Options, combination: Combination, mode: Mode) -> int:
    """About what a step takes, with the windows that memory allows."""
    pipelines_ns = combination.time_with(_windows(options, combination, mode))
    return pipelines_ns + _end_ns(options, combination, mode)


def _end_ns(options: Options, combination: Combination, mode: Mode) -> int:
    """About what follows the last backward: sums and update of the stage that is over last.

    A stage's sums begin while its last gradient goes back through the stages before it.
    """
    table, ring = options.table, len(combination.templates)
    calibration, own = table.calibration, table.calibration.own_gradient_bytes

    def end_ns(span: Range) -> int:
        sums_ns = sum(table.ring_ns(own[k], ring) for k in span.sections)
        update_ns = sum(to_ns(calibration.optimizer_s[k]) for k in span.sections)
        back_ns = table.backward_ns[span.start]
        if mode.recompute:
            back_ns += table.again_ns(0, span.start)
        return max(0, sums_ns - back_ns) + update_ns

    spans = {stage.range for one in dict.fromkeys(combination.templates) for stage in one.stages}
    return max(map(end_ns, spans))


def _about_end_ns(options: Options, num_pipelines: int) -> float:
    """`_end_ns` of a number of pipelines whose stages all have as many sections: those that workers have on
    average."""
    sizes = options.table.calibration.own_gradient_bytes
    each_ns = options.table.ring_ns(sum(sizes) // len(sizes), num_pipelines)
    sections = len(sizes) * num_pipelines / len(options.request.workers)
    return each_ns * min(max(1.0, sections), len(sizes))


def _windows(options: Options, combination: Combination, mode: Mode) -> Sequence[int | None]:
    """Of each pipeline the widest for which every stage has the memory; None if memory bounds none."""
    capacity = options.capacity()

    def window(template: Template, share: int) -> int | None:
        limits = [
            options.table.memory(stage.range.start, stage.range.stop, mode).window(capacity)
            for stage in template.stages
        ]
        return min((limit for limit in limits if limit is not None and limit < share), default=None)

    return [*map(window, combination.templates, combination.shares)]


def played(options: Options, combination: Combination, mode: Mode) -> Choice | None:
    """The combination as a simulated plan; None if it does not fit."""
    request, calibration = options.request, options.calibration
    plan = plan_of(
        [template.stages for template in combination.templates],
        combination.shares,
        windows=_windows(options, combination, mode),
        recompute=mode.recompute,
        halves=mode.halves,
        generation=request.generation,
        optimizer_on_host=options.on_host,
        frozen=calibration.frozen,
    )
    used = options.roster.used(plan.num_workers)
    slots = place_in(plan.ranges, used, request.holding, request.calibration.saved_bytes)
    step = request.simulated(plan, calibration, slots)
    if max(step.peak_bytes) > options.capacity():
        return None
    vms = [slot.vm for slot in slots]
    copies, lost = copies_of(plan, vms), 0.0
    if request.risk is not None:
        lost = request.risk.lost_by(plan, vms, len({slot.vm for slot in request.workers}), step.time_s)
    row = Candidate(
        max(len(path.hops) for path in plan.paths),
        len(combination.templates),
        mode.recompute,
        options.on_host,
        halves=mode.halves,
        window=plan.window,
        lost=lost,
        copies=copies,
        rejected=too_few(copies, options.copies) if copies < options.copies else None,
        pipelines=tuple(sum(stage.width for stage in one.stages) for one in combination.templates),
    )
    return Choice(plan, tuple(slot.worker for slot in slots), step.time_s, row.with_step(step))
