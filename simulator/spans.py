"""Every operation of a step, and what each worker holds over time, from the logs of what was played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..pipeline import Component, Kind, Operation
from ..pipeline.flat import (
    AFTER,
    BEFORE,
    COUNT,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    OTHER_ROOM,
    PLACE,
    ROOM,
    VISITS,
    VISITS_END,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
)
from .cluster import NS_PER_S
from .pipelines import Played
from .records import (
    ADDED_BYTES,
    AGAIN,
    BACK,
    BRIEF,
    GRADIENT_BYTES,
    INPUT_BYTES,
    KEPT,
    LOG,
    NUM_LOGGED,
    RUNNING_BYTES,
    TAKES,
)

_KINDS = {KEPT: Kind.FORWARD, BRIEF: Kind.FORWARD, AGAIN: Kind.RECOMPUTE, BACK: Kind.BACKWARD}


class Span(NamedTuple):
    """An operation ran on a worker from `start_s` to `stop_s` after the start of the step."""

    worker: int
    operation: Operation
    start_s: float
    stop_s: float


class _Logged(NamedTuple):
    """`turn`: of the micro-batch among those of its path."""

    hop: int
    what: int
    turn: int
    start_ns: int
    stop_ns: int


def spans_of(parts: Sequence[Played]) -> tuple[Span, ...]:
    """Of all workers, by time."""
    found = [
        Span(rank, operation, one.start_ns / NS_PER_S, one.stop_ns / NS_PER_S)
        for played in parts
        for place, log in enumerate(_logs(played))
        for component, paths in [(one, _stages(played, one)) for one in played.alike]
        for rank in [component.by_first_visit[place]]
        for one in log
        for operation in [_operation(one, *paths[one.hop])]
    ]
    return tuple(sorted(found, key=lambda span: (span.start_s, span.worker, span.operation)))


def memory_of(parts: Sequence[Played]) -> dict[int, list[tuple[int, int]]]:
    """For each worker (ns, bytes beyond its state from then on), whenever that changes."""
    held: dict[int, list[tuple[int, int]]] = {}
    for played in parts:
        for place, log in enumerate(_logs(played)):
            steps = _steps(played.cells, place, log)
            held |= {component.by_first_visit[place]: steps for component in played.alike}
    return held


def _stages(played: Played, component: Component) -> dict[int, tuple[int, Sequence[int]]]:
    """By hop: its stage, and the micro-batches of its path."""
    cells = played.cells
    stages = [(stage, path.micro_batches) for path in component.paths for stage in range(len(path.hops))]
    return dict(zip(range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]), stages, strict=True))


def _operation(one: _Logged, stage: int, micro_batches: Sequence[int]) -> Operation:
    return Operation(stage, _KINDS[one.what], micro_batches[one.turn])


def _logs(played: Played) -> list[list[_Logged]]:
    """The operations of each worker, as in `by_first_visit`."""
    cells = played.cells
    backwards: dict[int, list[int]] = {}  # by hop: the turns whose backwards are left, the next one last
    forwards: dict[int, list[int]] = {}
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        count, place = cells[hop + COUNT], cells[hop + PLACE]
        forwards[hop] = list(reversed(range(count)))
        backwards[hop] = sorted(range(count), key=lambda turn, place=place: -cells[place + turn])
    result: list[list[_Logged]] = []
    for worker in range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE]):
        log: list[_Logged] = []
        for entry in range(cells[worker + LOG], cells[worker + LOG] + 2 * cells[worker + NUM_LOGGED], 2):
            what, start = (cells[entry] - cells[HOPS]) % cells[HOP_SIZE], cells[entry + 1]
            hop = cells[entry] - what
            if what == AGAIN:
                turn = backwards[hop][-1]
            else:
                turn = (backwards if what == BACK else forwards)[hop].pop()
            log.append(_Logged(hop, what, turn, start, start + cells[hop + TAKES + what]))
        result.append(log)
    return result


_ENDS, _ARRIVES, _STARTS = range(3)  # what comes first at one instant


def _steps(cells: Sequence[int], place: int, log: Sequence[_Logged]) -> list[tuple[int, int]]:
    worker = cells[WORKERS] + cells[WORKER_SIZE] * place
    changes: list[tuple[int, int, int]] = []
    for one in log:
        running = cells[one.hop + RUNNING_BYTES + one.what]
        changes.append((one.start_ns, _STARTS, running))
        changes.append((one.stop_ns, _ENDS, cells[one.hop + ADDED_BYTES + one.what] - running))
    for hop in cells[cells[worker + VISITS] : cells[worker + VISITS_END]]:
        for neighbour, room, size in ((BEFORE, ROOM, INPUT_BYTES), (AFTER, OTHER_ROOM, GRADIENT_BYTES)):
            if cells[hop + neighbour]:
                arrivals = cells[cells[hop + room] : cells[hop + room] + cells[hop + COUNT]]
                changes += [(arrival, _ARRIVES, cells[hop + size]) for arrival in arrivals]
    steps: dict[int, int] = {}
    resident = 0
    for at_ns, _, size_bytes in sorted(changes):
        resident += size_bytes
        steps[at_ns] = resident  # of an instant, what it ends with
    return list(steps.items())
