"""A component's paths, and its workers' static orders, as plain integers.

What goes through every operation of a step (schedules here, the simulator's play) is written over one row of
integers, `cells`: a list where it is interpreted, an array of 64-bit integers where it is compiled, in one
source. In it lie records of the component's workers and hops. A record is known by the cell where it begins,
a field by its distance from there: `cells[hop + AFTER]` is the hop behind `hop`, and 0 is none.

An entry of a hop is one micro-batch there, by its turn on the path. An entry of a worker is one of its
forwards, or one of its backwards: it has as many.
"""

from __future__ import annotations

from typing import Protocol

from .components import Component


class Cells(Protocol):
    """A list of integers, or an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


# The head, which begins at 0.
(
    WORKERS,  # where the workers' records begin, in this order
    WORKERS_END,
    WORKER_SIZE,
    HOPS,  # where the hops' records begin, path by path
    HOPS_END,
    HOP_SIZE,
    FREE,  # cells for who asked for some
    ROOMS,  # orders and rooms, all 0 in the beginning
    SIZE,  # of all
    HEAD_SIZE,
) = range(10)

# Of a worker. The static order is `AHEAD`, `FORWARD` and `BACKWARD`: R stands directly before its B, so it is
# enough to know how many forwards come before each backward.
(
    VISITS,  # where its hops stand, one cell each
    VISITS_END,
    TOTAL,  # entries
    AHEAD,  # where its entries' numbers of forwards before the backward (and its recomputation) stand
    FORWARD,  # where its forwards stand: 2 * hop, + 1 if it is recomputed later
    BACKWARD,  # where its backwards stand: 2 * hop, + 1 if a recomputation comes before it
    FIRST_ROOM,  # where the rooms of its hops begin
    SECOND_ROOM,
    WORKER_FIELDS,
) = range(9)

# Of a hop.
(
    OWNER,  # its worker
    BEFORE,  # the hop before it on the path
    AFTER,  # the hop behind it
    ENTERS,  # 1 at the path's first visit to the worker: its micro-batches count against the window
    COUNT,  # entries
    NUMBER,  # where the numbers of the path's micro-batches stand
    PLACE,  # where it stands how many backwards come before each micro-batch's, on every hop of the path
    ROOM,  # one cell for each entry, for who goes through the operations
    OTHER_ROOM,  # another
    FROZEN,  # 1: its sections get no gradient, so its backward computes nothing
    HOP_FIELDS,
) = range(11)


def flatten(
    component: Component, sizes: tuple[int, int], *, more: int = 0, capacity: int | None = None
) -> list[int]:
    """The cells before `ROOMS`; `sizes` are those of a worker's and of a hop's record.

    Workers stand as in `by_first_visit`. There are `more` cells at `FREE`. With `capacity` there is room for
    so many micro-batches on each path.
    """
    worker_size, hop_size = sizes
    counts = [len(path.micro_batches) for path in component.paths]
    rooms = [count if capacity is None else capacity for count in counts]
    places = {worker: place for place, worker in enumerate(component.by_first_visit)}
    hops = [(path, stage) for path, taken in enumerate(component.paths) for stage in range(len(taken.hops))]
    owners = [places[component.paths[path].hops[stage].worker] for path, stage in hops]
    first_hop = HEAD_SIZE + worker_size * len(places)
    end = first_hop + hop_size * len(hops)
    free = end + len(hops) + 2 * sum(rooms)
    size = free + more + 5 * sum(rooms[path] for path, _ in hops)
    cells = [HEAD_SIZE, first_hop, worker_size, first_hop, end, hop_size, free, free + more, size]
    cells += [0] * (free + more - len(cells))
    turns = [end + len(hops) + 2 * sum(rooms[:path]) for path in range(len(rooms))]
    seen: set[tuple[int, int]] = set()
    for place, (path, stage) in enumerate(hops):
        hop = first_hop + hop_size * place
        cells[hop + OWNER] = HEAD_SIZE + worker_size * owners[place]
        cells[hop + BEFORE] = hop - hop_size if stage else 0
        cells[hop + AFTER] = hop + hop_size if stage + 1 < len(component.paths[path].hops) else 0
        cells[hop + ENTERS] = int((path, owners[place]) not in seen)
        seen.add((path, owners[place]))
        cells[hop + COUNT] = counts[path]
        cells[hop + FROZEN] = int(component.paths[path].hops[stage].range.stop <= component.frozen)
        cells[hop + NUMBER], cells[hop + PLACE] = turns[path], turns[path] + rooms[path]
    if len(hops) > len(places):  # else no worker ever compares numbers
        for path, taken in enumerate(component.paths):
            cells[turns[path] : turns[path] + counts[path]] = taken.micro_batches
    _furnish(cells, owners, [rooms[path] for path, _ in hops])
    return cells


def _furnish(cells: Cells, owners: list[int], rooms: list[int]) -> None:
    """Give the workers their hops, their orders and the rooms of their entries."""
    visit, free = cells[HOPS_END], cells[ROOMS]
    visits: dict[int, list[int]] = {}
    for place, owner in enumerate(owners):
        visits.setdefault(owner, []).append(place)
    for owner, visited in visits.items():
        worker = cells[WORKERS] + cells[WORKER_SIZE] * owner
        size = sum(rooms[place] for place in visited)
        cells[worker + VISITS], cells[worker + VISITS_END] = visit, visit + len(visited)
        for part, field in enumerate((AHEAD, FORWARD, BACKWARD, FIRST_ROOM, SECOND_ROOM)):
            cells[worker + field] = free + part * size
        room = free + 3 * size
        for place in visited:
            hop = cells[HOPS] + cells[HOP_SIZE] * place
            cells[visit] = hop
            cells[worker + TOTAL] += cells[hop + COUNT]
            cells[hop + ROOM], cells[hop + OTHER_ROOM] = room, room + size
            room += rooms[place]
            visit += 1
        free += 5 * size


def is_pipeline(cells: Cells) -> bool:
    """Whether the component is one path that comes to each worker once."""
    num_hops = (cells[HOPS_END] - cells[HOPS]) // cells[HOP_SIZE]
    return num_hops == (cells[WORKERS_END] - cells[WORKERS]) // cells[WORKER_SIZE]


def in_order(cells: Cells) -> None:
    """Backwards on each path are in the order of forwards."""
    for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]):
        if not cells[hop + BEFORE]:
            for turn in range(cells[hop + COUNT]):
                cells[cells[hop + PLACE] + turn] = turn


def most_in_flight(cells: Cells, worker: int) -> int:
    """The most micro-batches that the worker has between forward and backward if its order is followed."""
    most, in_flight, forward = 0, 0, cells[worker + FORWARD]
    for entry in range(cells[worker + TOTAL]):
        while forward < cells[worker + FORWARD] + cells[cells[worker + AHEAD] + entry]:
            in_flight += cells[(cells[forward] >> 1) + ENTERS]
            forward += 1
        most = max(most, in_flight)
        in_flight -= cells[(cells[cells[worker + BACKWARD] + entry] >> 1) + ENTERS]
    return most
