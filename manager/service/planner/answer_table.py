"""What the planner says, by question, for the time after one generation.

An answer holds for every question that differs in names alone from the one that was computed: what workers
are called, and the number of the generation to come. All else that an answer depends on is part of the
question, so none can be out of date: a table never changes what is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import partial

from ....morphing import Before, Choice, Infeasible, Request, choose, rerouted

_NAMED = ("workers", "holding", "generation")
_ASIDE = tuple(field.name for field in fields(Request) if field.name not in _NAMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What an answer is made of: the best new plan, and the plan of before, rerouted."""

    choose: Callable[[Request], Choice | Infeasible] = choose
    rerouted: Callable[[Request, Before], Choice | Infeasible | None] = rerouted


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer; `places`: for each rank that of its worker in the question."""

    answer: Choice | Infeasible | None
    places: tuple[int, ...]


class AnswerTable:
    """Answers to questions of the time after generation `number`, whose plan is what would be rerouted.

    One thread fills it, others may look things up meanwhile.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_computed = 0
        self.num_found = 0
        self._known: dict[Hashable, _Known] = {}

    def looked_up(self) -> Search:
        """What the table knows; the rest is computed, and not kept."""
        return Search(choose=partial(self._choose, None), rerouted=partial(self._rerouted, None))

    def filled(self, before_each: Callable[[], None]) -> Search:
        """As `looked_up`, but what is computed is kept; `before_each` is called before that."""
        return Search(
            choose=partial(self._choose, before_each), rerouted=partial(self._rerouted, before_each)
        )

    def _choose(self, fill: Callable[[], None] | None, request: Request) -> Choice | Infeasible:
        answer = self._found(fill, _question(request), request, partial(choose, request))
        assert answer is not None, "a new plan is found, or it is said why not"
        return answer

    def _rerouted(
        self, fill: Callable[[], None] | None, request: Request, before: Before
    ) -> Choice | Infeasible | None:
        place = {slot.worker: place for place, slot in enumerate(request.workers)}
        key = (_question(request), tuple(place.get(worker) for worker in before.workers))
        return self._found(fill, key, request, partial(rerouted, request, before))

    def _found(
        self,
        fill: Callable[[], None] | None,
        key: Hashable,
        request: Request,
        compute: Callable[[], Choice | Infeasible | None],
    ) -> Choice | Infeasible | None:
        known = self._known.get(key)
        if known is not None:
            self.num_found += 1
            return _told(known, request)
        if fill is not None:
            fill()
        answer = compute()
        self.num_computed += 1
        if fill is not None:
            self._known[key] = _Known(answer, _places(answer, request))
        return answer


def _question(request: Request) -> Hashable:
    """What an answer depends on: workers by their places, and a VM by that of its first worker."""
    first: dict[str, int] = {}
    workers = tuple(
        (first.setdefault(slot.vm, place), slot.memory_bytes, slot.slowdown, request.holding.get(slot.worker))
        for place, slot in enumerate(request.workers)
    )
    return workers, bool(request.holding), *(getattr(request, name) for name in _ASIDE)


def _places(answer: Choice | Infeasible | None, request: Request) -> tuple[int, ...]:
    if not isinstance(answer, Choice):
        return ()
    place = {slot.worker: place for place, slot in enumerate(request.workers)}
    return tuple(place[worker] for worker in answer.workers)


def _told(known: _Known, request: Request) -> Choice | Infeasible | None:
    """The answer with the names of this request."""
    answer = known.answer
    if not isinstance(answer, Choice):
        return answer
    workers = tuple(request.workers[place].worker for place in known.places)
    return replace(answer, plan=replace(answer.plan, generation=request.generation), workers=workers)
