"""GPipe's order: all forwards, then all backwards in reverse; with a window, in rounds that fill it."""

from __future__ import annotations

from collections.abc import Sequence

from .arrays import NONE, Entry, ForwardTurn, Hop, Worker, operation
from .policy import BACKWARD, FORWARD, FORWARD_DISCARD, RECOMPUTE


def gpipe(
    workers: Sequence[Worker],
    hops: Sequence[Hop],
    turns: Sequence[ForwardTurn],
    entries: Sequence[Entry],
    *,
    window: int | None,
    recompute: bool,
) -> None:
    """Write the order of all operations into `entries`.

    All workers follow one order of micro-batches in both directions, so crossing paths cannot deadlock. With
    `recompute`, a worker recomputes every micro-batch except the one whose forward was last, and nothing at
    frozen hops.
    """
    paths = _by_micro_batch(hops, turns)
    num_done = [0] * len(workers)
    turn_of = dict.fromkeys(paths, 0)
    for path_of in _rounds(paths, hops, window):
        order = _forwards(path_of, workers, hops)
        for number, worker in enumerate(workers):
            first = worker.first_entry + num_done[number]
            _write_round(order[number], hops, entries, first, worker.first_entry, recompute)
            num_done[number] += len(order[number])
        _turn_back(path_of, hops, turns, turn_of)


def _by_micro_batch(hops: Sequence[Hop], turns: Sequence[ForwardTurn]) -> list[int]:
    """The first hop of each micro-batch's path, by micro-batch."""
    numbered = [
        (turns[hop.first_turn + turn].micro_batch, index)
        for index, hop in enumerate(hops)
        if hop.before == NONE
        for turn in range(hop.num_turns)
    ]
    return [index for _, index in sorted(numbered)]


def _rounds(paths: Sequence[int], hops: Sequence[Hop], window: int | None) -> list[list[int]]:
    """The paths of each round's micro-batches; no worker gets more than `window` in a round."""
    if window is None:
        return [list(paths)]
    visited = {first: {hops[index].worker for index in _along(first, hops)} for first in set(paths)}
    rounds: list[list[int]] = [[]]
    load: dict[int, int] = {}
    for first in paths:
        if any(load.get(worker, 0) >= window for worker in visited[first]):
            rounds.append([])
            load.clear()
        rounds[-1].append(first)
        for worker in visited[first]:
            load[worker] = load.get(worker, 0) + 1
    return rounds


def _along(first: int, hops: Sequence[Hop]) -> list[int]:
    """The hops of a path."""
    found: list[int] = []
    while first != NONE:
        found.append(first)
        first = hops[first].after
    return found


def _forwards(path_of: Sequence[int], workers: Sequence[Worker], hops: Sequence[Hop]) -> list[list[int]]:
    """For each worker, the hops of its forwards in a round."""
    order: list[list[int]] = [[] for _ in workers]
    visits = {first: [(order[hops[i].worker], i) for i in _along(first, hops)] for first in set(path_of)}
    for first in path_of:
        for taken, index in visits[first]:
            taken.append(index)
    return order


def _write_round(
    order: Sequence[int],
    hops: Sequence[Hop],
    entries: Sequence[Entry],
    first: int,
    first_of_all: int,
    recompute: bool,
) -> None:
    """Write a worker's forwards, and its backwards in reverse, from its entry `first` on."""
    last = first + len(order) - 1
    for place, index in enumerate(order):
        recomputes = recompute and first + place < last and not hops[index].is_frozen
        entries[first + place].forward = operation(index, FORWARD_DISCARD if recomputes else FORWARD)
        entries[last - place].backward = operation(index, RECOMPUTE if recomputes else BACKWARD)
        entries[last - place].forwards_before = last + 1 - first_of_all


def _turn_back(
    path_of: Sequence[int], hops: Sequence[Hop], turns: Sequence[ForwardTurn], turn_of: dict[int, int]
) -> None:
    """Number the backwards of a round. `turn_of` counts each path's micro-batches in earlier rounds."""
    for first in set(path_of):
        begin, count = turn_of[first], path_of.count(first)
        for place in range(count):
            turns[hops[first].first_turn + begin + place].backwards_before = begin + count - 1 - place
        turn_of[first] += count
