"""The timeline of a step: every operation, and the memory of each worker over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..pipeline.arrays import NONE, operation
from ..pipeline.operations import Kind, Operation
from ..pipeline.policy import BACKWARD, FORWARD, FORWARD_DISCARD, INPUT, RECOMPUTE, WEIGHT
from .cluster import NS_PER_S
from .pipelines import PlayedPipeline


class Span(NamedTuple):
    """An operation ran on a worker from `start_s` to `stop_s` after the start of the step."""

    worker: int
    operation: Operation
    start_s: float
    stop_s: float


class _Ran(NamedTuple):
    """An operation of a hop; `turn` is the micro-batch's index on its path."""

    action: int
    turn: int
    start_ns: int
    end_ns: int


def spans_of(parts: Sequence[PlayedPipeline]) -> tuple[Span, ...]:
    """The operations of all workers, by start time."""
    found: list[Span] = []
    for played in parts:
        ran = [_ran(played, index) for index in range(len(played.hops))]
        for component in played.alike:
            taken = [(stage, hop, path) for path in component.paths for stage, hop in enumerate(path.hops)]
            for (stage, hop, path), operations in zip(taken, ran, strict=True):
                found += [
                    Span(
                        hop.worker,
                        Operation(stage, _KINDS[one.action], path.micro_batches[one.turn]),
                        one.start_ns / NS_PER_S,
                        one.end_ns / NS_PER_S,
                    )
                    for one in operations
                ]
    return tuple(sorted(found, key=lambda span: (span.start_s, span.worker, span.operation)))


def memory_of(parts: Sequence[PlayedPipeline]) -> dict[int, list[tuple[int, int]]]:
    """{worker: [(ns, bytes beyond its state from then on)]}, one entry for each change."""
    held: dict[int, list[tuple[int, int]]] = {}
    for played in parts:
        changes: list[list[tuple[int, int, int]]] = [[] for _ in played.workers]
        for index, hop in enumerate(played.hops):
            changes[hop.worker] += _changes(played, index)
        for place, of_worker in enumerate(changes):
            steps = _steps(of_worker)
            held |= {component.by_first_visit[place]: steps for component in played.alike}
    return held


def _ran(played: PlayedPipeline, index: int) -> list[_Ran]:
    """The operations that a hop ran."""
    hop = played.hops[index]
    arrivals = played.arrivals[hop.first_arrival : hop.first_arrival + hop.num_turns]
    turns = played.turns[hop.first_turn : hop.first_turn + hop.num_turns]
    found: list[tuple[int, int, int]] = []
    for turn, (arrival, place) in enumerate(zip(arrivals, turns, strict=True)):
        back = arrivals[place.backwards_before]
        is_recomputed = back.recompute_ns != NONE
        found.append((FORWARD_DISCARD if is_recomputed else FORWARD, turn, arrival.forward_ns))
        if is_recomputed:
            found.append((RECOMPUTE, turn, back.recompute_ns))
        found.append((INPUT if hop.is_split else BACKWARD, turn, back.backward_ns))
        if hop.is_split:
            found.append((WEIGHT, turn, back.weight_ns))
    return [
        _Ran(action, turn, start_ns, start_ns + played.operations[operation(index, action)].takes_ns)
        for action, turn, start_ns in found
    ]


_KINDS = {
    FORWARD: Kind.FORWARD,
    FORWARD_DISCARD: Kind.FORWARD,
    RECOMPUTE: Kind.RECOMPUTE,
    BACKWARD: Kind.BACKWARD,
    INPUT: Kind.INPUT,
    WEIGHT: Kind.WEIGHT,
}
_ENDS, _ARRIVES, _STARTS = range(3)  # the order of changes at one instant


def _changes(played: PlayedPipeline, index: int) -> list[tuple[int, int, int]]:
    """[(ns, order at one instant, bytes)] of what a hop's operations and messages allocate and free."""
    changes: list[tuple[int, int, int]] = []
    for one in _ran(played, index):
        cost = played.operations[operation(index, one.action)]
        changes.append((one.start_ns, _STARTS, cost.running_bytes))
        changes.append((one.end_ns, _ENDS, cost.added_bytes - cost.running_bytes))
    hop = played.hops[index]
    for arrival in played.arrivals[hop.first_arrival : hop.first_arrival + hop.num_turns]:
        if hop.before != NONE:
            changes.append((arrival.input_at, _ARRIVES, hop.input_bytes))
        if hop.after != NONE:
            changes.append((arrival.gradient_at, _ARRIVES, hop.gradient_bytes))
    return changes


def _steps(changes: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    steps: dict[int, int] = {}
    resident = 0
    for at_ns, _, size_bytes in sorted(changes):
        resident += size_bytes
        steps[at_ns] = resident  # the last value of an instant counts
    return list(steps.items())
