"""What of a step is done at an instant: the contributions that each worker's sums hold, and the losses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..pipeline.arrays import NONE, operation
from ..pipeline.plan import Path, Plan
from ..pipeline.policy import BACKWARD, FORWARD, WEIGHT
from .backends import current
from .calibration.data import Calibration
from .cluster import NS_PER_S, to_ns
from .minibatch import PlayedStep, simulate_minibatch
from .pipelines import PlayedPipeline
from .simulation import cluster_of


@dataclass(frozen=True, slots=True)
class Done:
    """What a worker has added to a step. Sets of micro-batches are integers, bit i for micro-batch i."""

    contributions: dict[int, int]
    """{section: micro-batches whose contributions of it the worker's sums hold}."""
    losses: int
    """Micro-batches whose piece of the loss it has."""


class StepProgress:
    """A simulated step, or the rest of one, of which one can ask what is done at an instant.

    The arguments are those of `simulate`. A contribution is done when the operation that adds it has ended.
    """

    def __init__(self, plan: Plan, calibration: Calibration, *, vm_of: Sequence[str] | None = None) -> None:
        self._plan = plan
        self._cluster = cluster_of(plan, calibration, vm_of, None)

    @cached_property
    def time_s(self) -> float:
        return self._played.end.end_ns / NS_PER_S

    @cached_property
    def _played(self) -> PlayedStep:
        return simulate_minibatch(self._plan, self._cluster, current(), seed=0)

    @cached_property
    def _hops(self) -> list[_EndedHop]:
        """Reading them takes longer than the simulation, and most steps end undisturbed."""
        return [ended for played in self._played.pipelines for ended in _ended(played)]

    def at(self, time_s: float) -> list[Done]:
        """What each worker has done `time_s` after the step began, in rank order."""
        at_ns = to_ns(time_s)
        done = [Done({}, 0) for _ in range(self._plan.num_workers)]
        for hop in self._hops:
            added = bisect_right(hop.added_ns, at_ns)
            known = bisect_right(hop.losses_ns, at_ns)
            for worker, path in hop.alike:
                own = done[worker]
                micro_batches = _bits(path.micro_batches[turn] for turn in hop.backwards[:added])
                for section in filter(path.adds, hop.sections):
                    own.contributions[section] = own.contributions.get(section, 0) | micro_batches
                losses = _bits(path.micro_batches[:known])
                done[worker] = Done(own.contributions, own.losses | losses)
        return done


@dataclass(frozen=True, slots=True)
class _EndedHop:
    """When the operations of a hop ended that add something, ascending."""

    alike: Sequence[tuple[int, Path]]
    """The worker and path of each of the equal hops."""
    sections: Sequence[int]
    backwards: Sequence[int]
    """Places of the path's micro-batches, in the order of their backwards."""
    added_ns: Sequence[int]
    losses_ns: Sequence[int]
    """Of the forwards at the last hop of a path, in the order of its micro-batches."""


def _ended(pipeline: PlayedPipeline) -> Iterator[_EndedHop]:
    taken = [[(hop, path) for path in component.paths for hop in path.hops] for component in pipeline.alike]
    column, state = pipeline.arrays.column, pipeline.state
    backwards_before = column(state.turns, "backwards_before")
    forward_ns, backward_ns, weight_ns = (
        column(state.arrivals, name) for name in ("forward_ns", "backward_ns", "weight_ns")
    )
    for index, hop in enumerate(pipeline.hops):
        turns = backwards_before[hop.first_turn : hop.first_turn + hop.num_turns]
        arrivals = slice(hop.first_arrival, hop.first_arrival + hop.num_turns)
        adds_ns = pipeline.operations[operation(index, WEIGHT if hop.is_split else BACKWARD)].takes_ns
        takes_ns = pipeline.operations[operation(index, FORWARD)].takes_ns
        yield _EndedHop(
            alike=[(of[index][0].worker, of[index][1]) for of in taken],
            sections=taken[0][index][0].range.sections,
            backwards=sorted(range(hop.num_turns), key=turns.__getitem__),
            added_ns=[at_ns + adds_ns for at_ns in (weight_ns if hop.is_split else backward_ns)[arrivals]],
            losses_ns=[at_ns + takes_ns for at_ns in forward_ns[arrivals]] if hop.after == NONE else (),
        )


def _bits(micro_batches: Iterable[int]) -> int:
    return sum(1 << micro_batch for micro_batch in micro_batches)
