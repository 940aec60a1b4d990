"""The P×D sweep: the pipeline depths that fit are played in virtual time, the fastest wins (Varuna §4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..pipeline import Plan, Range, Schedule, grid
from ..simulator import simulate
from .balance import balance
from .bounds import least_seconds
from .memory import StageMemory, stage_memory
from .placement import Slot, place, select
from .request import Candidate, Choice, Impossible, Request

_AS_FAST = 1.01  # a narrower window is taken if the step is predicted to take no more than 1 % longer
_WINDOWS = (2, 3, 4)  # times P (the paper's range for its networks); one depth only would bear no jitter


def choose(request: Request) -> Choice | Impossible:
    """The plan with the least predicted time per step; always an answer, a plan or why there is none.

    P runs over 1..min(K, G) and D = G // P, at most N. Stages are balanced by measured time among those that
    fit the memory of the workers used. With recompute `auto`, recomputation is looked at only where memory
    bounds the plan without it. What cannot be faster than the best is not played. Of the best shape the
    narrowest window is taken that costs no time. If the workers with least memory are what prevents every
    plan, they are left out; with offload `auto`, optimizer state goes to the host if that does not help.
    """
    if not request.workers:
        return Impossible("there is no worker")
    if reason := _degrees_impossible(request):
        return Impossible(reason)
    looked_at: list[Candidate] = []
    for on_host, memory_bytes in _offers(request):
        slots = [slot for slot in request.workers if slot.memory_bytes >= memory_bytes]
        calibration = request.calibration.with_optimizer_on_host() if on_host else request.calibration
        offered = replace(request, workers=slots, calibration=calibration)
        best = _fastest(offered, _options(offered, looked_at, on_host), looked_at)
        if best is not None:
            best = _narrowed(offered, best, looked_at)
            looked_at.sort(key=lambda row: (*_shape(row), row.recompute, row.optimizer_on_host))
            assert best.candidate.predicted_s is not None
            workers = tuple(slot.worker for slot in best.placed)
            return Choice(best.plan, workers, best.candidate.predicted_s, tuple(looked_at))
    return Impossible(_why(request, looked_at), tuple(looked_at))


@dataclass(frozen=True, slots=True)
class _Option:
    """A shape that fits into memory. `candidate` has the widest window that does."""

    candidate: Candidate
    stages: tuple[Range, ...]
    used: Sequence[Slot]
    capacity: int
    least_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    option: _Option
    plan: Plan
    placed: tuple[Slot, ...]
    candidate: Candidate


def _rank(found: _Found) -> tuple[float, int, int, bool]:
    row = found.candidate
    return row.predicted_s or 0.0, row.used, row.pipeline_parallel_degree, row.recompute


def _recompute_options(request: Request) -> tuple[bool, ...]:
    return {"on": (True,), "off": (False,), "auto": (False, True)}[request.recompute]


def _degrees_impossible(request: Request) -> str | None:
    """Why the fixed degrees cannot be had from these workers, whatever the memory."""
    depth, replicas = request.pipeline_parallel_degree, request.data_parallel_degree
    if depth is not None and depth > request.num_sections:
        return f"pipeline_parallel_degree: {depth}, but the model has {request.num_sections} sections"
    if replicas is not None and replicas > request.num_micro_batches:
        return f"data_parallel_degree: {replicas}, but a step has {request.num_micro_batches} micro-batches"
    needed = (depth or 1) * (replicas or 1)
    if needed > len(request.workers):
        return f"the fixed degrees need {needed} workers, there are {len(request.workers)}"
    return None


def _grids(request: Request) -> list[tuple[int, int]]:
    """The (P, D) to look at."""
    num_workers = len(request.workers)
    depths = (
        [request.pipeline_parallel_degree] if request.pipeline_parallel_degree else range(1, num_workers + 1)
    )
    grids: list[tuple[int, int]] = []
    for depth in depths:
        replicas = request.data_parallel_degree or min(num_workers // depth, request.num_micro_batches)
        if depth <= request.num_sections and replicas >= 1 and depth * replicas <= num_workers:
            grids.append((depth, replicas))
    return grids


def _offers(request: Request) -> list[tuple[bool, int]]:
    """(whether optimizer state lies on the host, the least memory of the workers used), the best first."""
    places = {"on": (True,), "off": (False,), "auto": (False, True)}[request.optimizer_offload]
    if request.calibration.device_kind == "cpu":
        places = (False,)  # the device's memory is the host's: nothing would be won
    sizes = sorted({slot.memory_bytes for slot in request.workers})
    return [(on_host, memory_bytes) for on_host in places for memory_bytes in sizes]


def _options(request: Request, looked_at: list[Candidate], on_host: bool) -> list[_Option]:
    """Every shape that fits, the one with the least bound first; those that do not are noted."""
    options: list[_Option] = []
    for recompute in _recompute_options(request):
        unbounded = {_shape(option.candidate) for option in options if option.candidate.window is None}
        splits: dict[int, Mapping[int, tuple[Range, ...]]] = {}
        grids = _grids(request)
        for depth, replicas in grids:
            if recompute and request.recompute == "auto" and (depth, replicas) in unbounded:
                continue
            used = select(request.workers, depth * replicas, request.holding)
            capacity = _capacity(request, used)
            if capacity not in splits:
                splits[capacity] = _splits(request, capacity, recompute, max(depth for depth, _ in grids))
            candidate = Candidate(depth, replicas, recompute, on_host)
            stages = splits[capacity].get(depth)
            if stages is None:
                why = f"no split into {depth} stages fits into {_megabytes(capacity)}"
                looked_at.append(replace(candidate, rejected=why))
                continue
            options.append(_option(request, candidate, stages, used, capacity))
    return sorted(options, key=lambda option: option.least_s)


def _shape(row: Candidate) -> tuple[int, int]:
    return row.pipeline_parallel_degree, row.data_parallel_degree


def _option(
    request: Request, candidate: Candidate, stages: tuple[Range, ...], used: Sequence[Slot], capacity: int
) -> _Option:
    least_s = least_seconds(
        request.calibration,
        stages,
        candidate.data_parallel_degree,
        request.num_micro_batches,
        recompute=candidate.recompute,
        slowdown=min(slot.slowdown for slot in used),
    )
    window = _window(request, stages, candidate, capacity)
    return _Option(replace(candidate, window=window), stages, used, capacity, least_s)


def _fastest(request: Request, options: Iterable[_Option], looked_at: list[Candidate]) -> _Found | None:
    best: _Found | None = None
    for option in options:
        best_s = None if best is None else best.candidate.predicted_s
        if best_s is not None and option.least_s > best_s * (1 + 1e-6):  # a simulation rounds to nanoseconds
            why = f"its work alone takes {option.least_s:.3g} s, the best plan {best_s:.3g} s"
            looked_at.append(replace(option.candidate, rejected=why))
            continue
        found = _play(request, option, option.candidate.window)
        looked_at.append(found.candidate)
        if found.candidate.rejected is None and (best is None or _rank(found) < _rank(best)):
            best = found
    return best


def _narrowed(request: Request, best: _Found, looked_at: list[Candidate]) -> _Found:
    """The same shape with fewer micro-batches in flight, if it is as fast: less memory for nothing."""
    if request.schedule is not Schedule.VARUNA:
        return best
    row = best.candidate
    assert row.predicted_s is not None
    widest = row.window or -(-request.num_micro_batches // row.data_parallel_degree)
    for times in _WINDOWS:
        window = times * row.pipeline_parallel_degree
        if window >= widest:
            break
        found = _play(request, best.option, window)
        assert found.candidate.predicted_s is not None
        if found.candidate.predicted_s <= _AS_FAST * row.predicted_s:
            looked_at.append(found.candidate)
            return found
        why = f"the best plan takes {row.predicted_s:.3g} s"
        looked_at.append(replace(found.candidate, rejected=why))
    return best


def _play(request: Request, option: _Option, window: int | None) -> _Found:
    stages, candidate = option.stages, replace(option.candidate, window=window)
    plan = grid(
        stages,
        candidate.data_parallel_degree,
        request.num_micro_batches,
        schedule=request.schedule,
        window=window,
        recompute=candidate.recompute,
        generation=request.generation,
        optimizer_on_host=candidate.optimizer_on_host,
    )
    placed = tuple(place(option.used, stages, request.holding, request.calibration.state_bytes))
    step = simulate(
        plan,
        request.calibration,
        vm_of=[slot.vm for slot in placed],
        slowdown=[slot.slowdown for slot in placed],
        seed=request.seed,
    )
    peak = max(step.peak_bytes)
    short = peak > option.capacity
    why = f"it needs {_megabytes(peak)}, the workers have {_megabytes(option.capacity)}" if short else None
    row = replace(candidate, predicted_s=step.time_s, peak_bytes=peak, rejected=why)
    return _Found(option, plan, placed, row)


def _stage_memory(request: Request, span: Range, recompute: bool) -> StageMemory:
    return stage_memory(request.calibration, span, recompute=recompute, schedule=request.schedule)


def _splits(request: Request, capacity: int, recompute: bool, depth: int) -> Mapping[int, tuple[Range, ...]]:
    def fits(span: Range) -> bool:
        return _stage_memory(request, span, recompute).least_bytes <= capacity

    return balance(request.calibration, depth, recompute=recompute, fits=fits)


def _window(request: Request, stages: Sequence[Range], candidate: Candidate, capacity: int) -> int | None:
    """How many micro-batches the tightest stage can have in flight; None if memory does not bound them."""
    most = -(-request.num_micro_batches // candidate.data_parallel_degree)
    window = most
    for stage, span in enumerate(stages):
        limit = _stage_memory(request, span, candidate.recompute).window(capacity)
        at_once = len(stages) - stage if request.schedule is Schedule.ONE_F_ONE_B else most
        if limit is not None and limit < at_once:
            window = min(window, limit)
    return window if window < most else None


def _capacity(request: Request, used: Sequence[Slot]) -> int:
    capacity = min(slot.memory_bytes for slot in used)
    return capacity if request.memory_limit_bytes is None else min(capacity, request.memory_limit_bytes)


def _why(request: Request, looked_at: Sequence[Candidate]) -> str:
    capacity = _capacity(request, [max(request.workers, key=lambda slot: slot.memory_bytes)])
    recompute = request.recompute != "off"
    alone = [
        _stage_memory(request, Range(section, section + 1), recompute).least_bytes
        for section in range(request.num_sections)
    ]
    largest = max(range(request.num_sections), key=alone.__getitem__)
    if alone[largest] > capacity:
        return (
            f"no split of the model fits: {request.calibration.name(largest)} needs "
            f"{_megabytes(alone[largest])}, the workers have {_megabytes(capacity)}; "
            f"{_remedy(request, largest, capacity)}"
        )
    depths = sorted({row.pipeline_parallel_degree for row in looked_at})
    span = f"P={depths[0]}" if len(depths) == 1 else f"P={depths[0]} to {depths[-1]}"
    return (
        f"no split of the model fits for {span}: the workers have {_megabytes(capacity)} at most, "
        f"though each section alone would fit; there are {len(request.workers)} workers"
    )


def _remedy(request: Request, section: int, capacity: int) -> str:
    """What to change so that a section fits that is too big for every worker."""
    calibration = request.calibration
    m = calibration.microbatch_size
    activations = calibration.activation_bytes[section]
    needed = _stage_memory(request, Range(section, section + 1), recompute=True).least_bytes
    remedies = [
        "cut the model finer there (Training.cuts, or parallelism.num_sections, now "
        f"{calibration.num_sections})",
        "take VMs with more memory",
    ]
    if m > 1 and needed - activations + activations // m <= capacity:
        remedies.insert(0, f"lower parallelism.microbatch_size, now {m}")
    if request.recompute == "off" and needed <= capacity:
        remedies.insert(0, "allow parallelism.recompute")
    return ", or ".join(remedies)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
