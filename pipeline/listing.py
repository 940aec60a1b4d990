"""List scheduling in unit time: Varuna's three rules (§3.2), and 1F1B as the same with a window of the depth.

Time runs in units of T_f: a forward or a recomputation takes one, a backward two (one where there is nothing
to compute in it, the least that there is). At each unit every idle
worker takes the first of: the backward it must wait for after a recomputation (rule 2); a backward whose
gradient is there; a recomputation that is due because the next hop's backward ends one unit from now (rule
1), or has ended; a forward. So backwards come before forwards (rule 3).

All times are small integers, so a pipeline soon repeats itself: where all its workers are as they were some
micro-batches ago, whole periods are copied instead of listed; a test compares both.
"""

from __future__ import annotations

from .flat import (
    AFTER,
    AHEAD,
    BACKWARD,
    BEFORE,
    COUNT,
    ENTERS,
    FIRST_ROOM,
    FORWARD,
    FROZEN,
    HOP_FIELDS,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    NUMBER,
    OWNER,
    SECOND_ROOM,
    VISITS,
    VISITS_END,
    WORKER_FIELDS,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
    in_order,
)
from .policy import BACKWARD as BACK
from .policy import FORWARD as FORTH
from .policy import RECOMPUTE as AGAIN

# Of a hop: two rules, then how far it is.
(
    LIMIT,  # micro-batches in flight on the worker from which on none enters
    RECOMPUTES,  # 1 or 0
    OFFERED,  # forwards that can be or were begun
    FORWARDS,  # begun
    GRADIENTS,  # that came to a hop that recomputes
    BACKWARDS,  # begun
    LISTING_HOP_SIZE,
) = range(HOP_FIELDS, HOP_FIELDS + 7)

# Of a worker: how far it is. Its first room holds the hops of backwards whose gradient is there, its second
# those of recomputations that are due.
(
    READY,  # in the first room so far
    TAKEN,  # of them begun
    DUE,  # in the second room so far
    RECOMPUTED,  # of them begun
    NUM_FORWARDS,
    NUM_BACKWARDS,
    IN_FLIGHT,
    HELD,  # the hop whose micro-batch is recomputed and waits for its backward
    RUNNING,  # hop
    KIND,  # of what runs
    UNITS,  # until that ends
    LISTING_WORKER_SIZE,
) = range(WORKER_FIELDS, WORKER_FIELDS + 12)


def list_tasks(cells: Cells, mark: Cells, may_skip: bool) -> None:
    """Write the order of all tasks by the rules that stand in the hops. `mark`: cells for all records,
    to remember them. `may_skip`: periods may be copied, for the component is a pipeline."""
    in_order(cells)
    left, last = 0, cells[HOPS_END] - cells[HOP_SIZE]
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        left += 2 * cells[hop + COUNT]
        if not cells[hop + BEFORE]:
            cells[hop + OFFERED] = 1
    seen, marked = 0, 0
    while left:
        if may_skip and cells[last + BACKWARDS] > seen:
            seen = cells[last + BACKWARDS]
            if marked and _is_as_at(cells, mark, seen - marked):
                left -= _skip(cells, mark, seen - marked)
                marked, seen = 0, cells[last + BACKWARDS]
            if seen >= 2 * marked:
                for index in range(cells[HOPS_END]):
                    mark[index] = cells[index]
                marked = seen
        left -= _start_all(cells)
        _pass_unit(cells)


def _start_all(cells: Cells) -> int:
    """How many forwards and backwards began: at least one, or something runs."""
    started, is_idle = 0, True
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        if not cells[worker + UNITS]:
            started += _start(cells, worker)
        if cells[worker + UNITS]:
            is_idle = False
    return _force_forward(cells) if is_idle else started


def _start(cells: Cells, worker: int) -> int:
    """1 if a forward or a backward began."""
    hop = cells[worker + HELD]
    if hop:
        if cells[hop + GRADIENTS] == cells[hop + BACKWARDS]:
            return 0
        cells[worker + HELD] = 0
        return _backward(cells, worker, hop)
    if cells[worker + TAKEN] < cells[worker + READY]:
        hop = cells[cells[worker + FIRST_ROOM] + cells[worker + TAKEN]]
        cells[worker + TAKEN] += 1
        return _backward(cells, worker, hop)
    if cells[worker + RECOMPUTED] < cells[worker + DUE]:
        hop = cells[cells[worker + SECOND_ROOM] + cells[worker + RECOMPUTED]]
        cells[worker + RECOMPUTED] += 1
        cells[worker + HELD] = hop
        _run(cells, worker, hop, AGAIN, 1)
        return 0
    hop = _next_forward(cells, worker)
    return _forward(cells, worker, hop) if hop else 0


def _next_forward(cells: Cells, worker: int) -> int:
    """The hop whose next forward may run, that of the lowest micro-batch."""
    entering = _first_offered(cells, worker, 1)
    if entering and cells[worker + IN_FLIGHT] >= cells[entering + LIMIT]:
        entering = 0
    returning = _first_offered(cells, worker, 0)
    if not entering or (returning and _number(cells, returning) < _number(cells, entering)):
        return returning
    return entering


def _first_offered(cells: Cells, worker: int, enters: int) -> int:
    first = 0
    for visit in range(cells[worker + VISITS], cells[worker + VISITS_END]):
        hop = cells[visit]
        if cells[hop + ENTERS] != enters or cells[hop + FORWARDS] == cells[hop + OFFERED]:
            continue
        if not first or _number(cells, hop) < _number(cells, first):
            first = hop
    return first


def _number(cells: Cells, hop: int) -> int:
    """The micro-batch of the hop's next forward."""
    return cells[cells[hop + NUMBER] + cells[hop + FORWARDS]]


def _force_forward(cells: Cells) -> int:
    """Paths that cross can fill each other's windows; then the forward nearest to its end goes ahead."""
    best, best_stage = 0, 0
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        hop = _first_offered(cells, worker, 1)
        if not hop:
            continue
        stage, before = 0, cells[hop + BEFORE]
        while before:
            stage, before = stage + 1, cells[before + BEFORE]
        is_lower = best and stage == best_stage and _number(cells, hop) < _number(cells, best)
        if not best or stage > best_stage or is_lower:
            best, best_stage = hop, stage
    assert best, "work is left, none runs and none is ready"
    return _forward(cells, cells[best + OWNER], best)


def _forward(cells: Cells, worker: int, hop: int) -> int:
    cells[cells[worker + FORWARD] + cells[worker + NUM_FORWARDS]] = 2 * hop + cells[hop + RECOMPUTES]
    cells[worker + NUM_FORWARDS] += 1
    cells[worker + IN_FLIGHT] += cells[hop + ENTERS]
    cells[hop + FORWARDS] += 1
    if not cells[hop + BEFORE] and cells[hop + OFFERED] < cells[hop + COUNT]:
        cells[hop + OFFERED] += 1
    _run(cells, worker, hop, FORTH, 1)
    return 1


def _backward(cells: Cells, worker: int, hop: int) -> int:
    entry = cells[worker + NUM_BACKWARDS]
    cells[cells[worker + BACKWARD] + entry] = 2 * hop + cells[hop + RECOMPUTES]
    cells[cells[worker + AHEAD] + entry] = cells[worker + NUM_FORWARDS]
    cells[worker + NUM_BACKWARDS] += 1
    cells[hop + BACKWARDS] += 1
    _run(cells, worker, hop, BACK, 2 - cells[hop + FROZEN])
    return 1


def _run(cells: Cells, worker: int, hop: int, kind: int, units: int) -> None:
    cells[worker + RUNNING] = hop
    cells[worker + KIND] = kind
    cells[worker + UNITS] = units


def _pass_unit(cells: Cells) -> None:
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        if not cells[worker + UNITS]:
            continue
        cells[worker + UNITS] -= 1
        hop = cells[worker + RUNNING]
        before = cells[hop + BEFORE]
        if cells[worker + UNITS]:  # a backward that ends one unit from now
            if before and cells[before + RECOMPUTES]:
                _append(cells, cells[before + OWNER], SECOND_ROOM, DUE, before)
        elif cells[worker + KIND] == FORTH:
            after = cells[hop + AFTER]
            if after:
                cells[after + OFFERED] += 1
            else:
                _append(cells, worker, FIRST_ROOM, READY, hop)
        elif cells[worker + KIND] == BACK:
            cells[worker + IN_FLIGHT] -= cells[hop + ENTERS]
            if before and cells[before + RECOMPUTES]:
                cells[before + GRADIENTS] += 1
            elif before:
                _append(cells, cells[before + OWNER], FIRST_ROOM, READY, before)


def _append(cells: Cells, worker: int, room: int, length: int, hop: int) -> None:
    cells[cells[worker + room] + cells[worker + length]] = hop
    cells[worker + length] += 1


def _is_as_at(cells: Cells, mark: Cells, period: int) -> bool:
    """Whether a pipeline is as it was at the mark, `period` micro-batches ago."""
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        worker = cells[hop + OWNER]
        for field in range(HELD, UNITS + 1):
            if cells[worker + field] != mark[worker + field]:
                return False
        again = period * cells[hop + RECOMPUTES]
        if (
            cells[hop + OFFERED] - mark[hop + OFFERED] != period
            or cells[hop + FORWARDS] - mark[hop + FORWARDS] != period
            or cells[hop + GRADIENTS] - mark[hop + GRADIENTS] != again
            or cells[hop + BACKWARDS] - mark[hop + BACKWARDS] != period
            or cells[worker + READY] - mark[worker + READY] != period - again
            or cells[worker + TAKEN] - mark[worker + TAKEN] != period - again
            or cells[worker + DUE] - mark[worker + DUE] != again
            or cells[worker + RECOMPUTED] - mark[worker + RECOMPUTED] != again
        ):
            return False
    return True


def _skip(cells: Cells, mark: Cells, period: int) -> int:
    """Repeat the period as long as there are forwards for it; how many forwards and backwards that began."""
    first = cells[HOPS]
    times = (cells[first + COUNT] - cells[first + OFFERED]) // period
    skipped = times * period
    for hop in range(first, cells[HOPS_END], cells[HOP_SIZE]):
        worker = cells[hop + OWNER]
        _repeat(cells, cells[worker + FORWARD] + cells[worker + NUM_FORWARDS], skipped, period, 0)
        _repeat(cells, cells[worker + BACKWARD] + cells[worker + NUM_BACKWARDS], skipped, period, 0)
        _repeat(cells, cells[worker + AHEAD] + cells[worker + NUM_BACKWARDS], skipped, period, period)
        for field in range(OFFERED, BACKWARDS + 1):
            cells[hop + field] += times * (cells[hop + field] - mark[hop + field])
        for field in range(READY, NUM_BACKWARDS + 1):
            cells[worker + field] += times * (cells[worker + field] - mark[worker + field])
        for entry in range(cells[worker + TAKEN], cells[worker + READY]):
            cells[cells[worker + FIRST_ROOM] + entry] = hop
        for entry in range(cells[worker + RECOMPUTED], cells[worker + DUE]):
            cells[cells[worker + SECOND_ROOM] + entry] = hop
    return 2 * skipped * ((cells[HOPS_END] - first) // cells[HOP_SIZE])


def _repeat(cells: Cells, start: int, length: int, period: int, more: int) -> None:
    for index in range(start, start + length):
        cells[index] = cells[index - period] + more
