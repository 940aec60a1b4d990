"""The best plan of unequal pipelines for a request, where it beats the best grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..pipeline import Schedule
from ..simulator import simulate
from .copies import copies_of, too_few
from .keeping.instead import saved_bytes
from .placement import place_in, speed_class
from .request import Candidate, Choice
from .search_space import Mode, Options
from .templates import Template
from .unequal import Combination, combinations, plan_of, pool

_TRIES = 3  # numbers of pipelines whose best combination is simulated
_WORTH = 1.01  # of the time that is to be beaten, for even pipelines that never stand still
_PRECISION = 2000  # combinations are found to this part of it
_MOST_VMS = 512  # beyond, the search takes longer than a death should wait for


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
    capacity = options.capacity(num_workers)
    found: list[tuple[int, Combination, Mode]] = []
    for mode in options.modes:
        recompute, halves = mode
        choices = pool(
            table, num, num_workers // per_vm, per_vm, capacity, recompute=recompute, halves=halves
        )
        for one in combinations(
            choices, num_workers // per_vm, num, to_beat_ns, 1 + to_beat_ns // _PRECISION
        ):
            if not _is_grid(one) and len(one.templates) >= options.copies:
                found.append((time_ns(options, one, mode, capacity), one, mode))
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
    return sizes.pop() if alike and len(per_vm) <= _MOST_VMS else None


def _is_grid(combination: Combination) -> bool:
    """Whether it has equal pipelines of one worker a stage: those are tried as grids."""
    one = combination.templates[0]
    return len(set(combination.templates)) == 1 and all(stage.width == 1 for stage in one.stages)


def time_ns(options: Options, combination: Combination, mode: Mode, capacity: int) -> int:
    """Until the last backward ends, with the windows that memory allows."""
    return combination.time_with(_windows(options, combination, mode, capacity))


def _windows(options: Options, combination: Combination, mode: Mode, capacity: int) -> Sequence[int | None]:
    """Of each pipeline the widest for which every stage has the memory; None if memory bounds none."""
    return [
        _window(options, template, share, mode, capacity)
        for template, share in zip(combination.templates, combination.shares, strict=True)
    ]


def _window(options: Options, template: Template, share: int, mode: Mode, capacity: int) -> int | None:
    limits = [
        options.table.memory(stage.range.start, stage.range.stop, *mode).window(capacity)
        for stage in template.stages
    ]
    window = min((limit for limit in limits if limit is not None), default=None)
    return window if window is not None and window < share else None


def played(options: Options, combination: Combination, mode: Mode) -> Choice | None:
    """The combination as a simulated plan; None if it does not fit."""
    request, calibration = options.request, options.calibration
    capacity = options.capacity(len(request.workers))
    plan = plan_of(
        [template.stages for template in combination.templates],
        combination.shares,
        windows=_windows(options, combination, mode, capacity),
        recompute=mode.recompute,
        halves=mode.halves,
        generation=request.generation,
        optimizer_on_host=options.on_host,
        frozen=calibration.frozen,
    )
    used = options.roster.used(plan.num_workers)
    slots = place_in(plan.ranges, used, request.holding, saved_bytes(calibration))
    vms = [slot.vm for slot in slots]
    step = simulate(
        plan,
        calibration,
        vm_of=vms,
        slowdown=[slot.slowdown for slot in slots],
        seed=request.seed,
        timeline=False,
    )
    if max(step.peak_bytes) > capacity:
        return None
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
        predicted_s=step.time_s,
        pipeline_s=step.pipeline_s,
        busy_s=max(step.busy_s),
        peak_bytes=max(step.peak_bytes),
        lost=lost,
        rejected=too_few(copies, options.copies) if copies < options.copies else None,
        pipelines=tuple(sum(stage.width for stage in one.stages) for one in combination.templates),
    )
    return Choice(plan, tuple(slot.worker for slot in slots), step.time_s, row, ())
