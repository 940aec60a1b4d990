"""GPipe's order: all forwards, then all backwards in reverse; one such round for each windowful."""

from __future__ import annotations

from .flat import (
    AFTER,
    AHEAD,
    BACKWARD,
    BEFORE,
    COUNT,
    FORWARD,
    FROZEN,
    HOP_FIELDS,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    NUMBER,
    OWNER,
    PLACE,
    ROOM,
    WORKER_FIELDS,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
)

# Of a path's first hop: its micro-batches in earlier rounds, and how many were forwarded and taken back.
EARLIER, FORWARDED, TAKEN_BACK, ROUND_HOP_SIZE = range(HOP_FIELDS, HOP_FIELDS + 4)
# Of a worker: its operations so far, and 1 if it had a backward in this round.
NUM_FORWARDS, NUM_BACKWARDS, HAS_BACKWARD, ROUND_WORKER_SIZE = range(WORKER_FIELDS, WORKER_FIELDS + 4)


def paths_in_turn(cells: Cells) -> list[int]:
    """For each micro-batch, ascending, the first hop of its path."""
    firsts = [hop for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]) if not cells[hop + BEFORE]]
    if len(firsts) == 1:
        return firsts * cells[firsts[0] + COUNT]
    numbered = [
        (cells[cells[hop + NUMBER] + turn], hop) for hop in firsts for turn in range(cells[hop + COUNT])
    ]
    return [hop for _, hop in sorted(numbered)]


def round_ends(cells: Cells, turns: list[int], window: int | None) -> list[int]:
    """Where rounds end among the micro-batches, so that no worker gets more than `window` in one."""
    if window is None:
        return [len(turns)]
    owners: dict[int, set[int]] = {}
    for first in set(turns):
        hop, owners[first] = first, set()
        while hop:
            owners[first].add(cells[hop + OWNER])
            hop = cells[hop + AFTER]
    ends: list[int] = []
    load: dict[int, int] = {}
    for number, first in enumerate(turns):
        if any(load.get(worker, 0) >= window for worker in owners[first]):
            ends.append(number)
            load.clear()
        for worker in owners[first]:
            load[worker] = load.get(worker, 0) + 1
    return [*ends, len(turns)]


def round_tasks(cells: Cells, turns: Cells, ends: Cells, num_rounds: int, recompute: bool) -> None:
    """Write the order of all tasks. `turns` and `ends` are those of `paths_in_turn` and `round_ends`.

    Both directions follow one order that is the same on all workers, so crossing paths cannot wait in a
    circle. With `recompute`, a worker recomputes all but the micro-batch whose forward was the last, and
    nothing at frozen hops.
    """
    start = 0
    for number in range(num_rounds):
        for index in range(start, ends[number]):
            _forwards(cells, turns[index])
        for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
            cells[worker + HAS_BACKWARD] = 0
        for index in range(ends[number] - 1, start - 1, -1):
            _backwards(cells, turns[index], recompute)
        for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
            cells[hop + EARLIER] = cells[hop + FORWARDED]
        start = ends[number]


def _forwards(cells: Cells, first: int) -> None:
    hop = first
    while hop:
        worker = cells[hop + OWNER]
        entry = cells[worker + FORWARD] + cells[worker + NUM_FORWARDS]
        cells[worker + NUM_FORWARDS] += 1
        cells[entry] = 2 * hop
        cells[cells[hop + ROOM] + cells[first + FORWARDED]] = entry
        hop = cells[hop + AFTER]
    cells[first + FORWARDED] += 1


def _backwards(cells: Cells, first: int, recompute: bool) -> None:
    turn = cells[first + FORWARDED] - 1 - (cells[first + TAKEN_BACK] - cells[first + EARLIER])
    cells[cells[first + PLACE] + turn] = cells[first + TAKEN_BACK]
    hop = first
    while cells[hop + AFTER]:
        hop = cells[hop + AFTER]
    while hop:
        worker = cells[hop + OWNER]
        entry = cells[worker + NUM_BACKWARDS]
        recomputes = 1 if recompute and cells[worker + HAS_BACKWARD] and not cells[hop + FROZEN] else 0
        cells[cells[worker + AHEAD] + entry] = cells[worker + NUM_FORWARDS]
        cells[cells[worker + BACKWARD] + entry] = 2 * hop + recomputes
        cells[cells[cells[hop + ROOM] + turn]] += recomputes
        cells[worker + HAS_BACKWARD] = 1
        cells[worker + NUM_BACKWARDS] += 1
        hop = cells[hop + BEFORE]
    cells[first + TAKEN_BACK] += 1
