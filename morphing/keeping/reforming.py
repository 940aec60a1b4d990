"""Plans that move little: whole pipelines stay as they are, the other VMs form new ones (Oobleck §5.1).

What workers hold tells which pipelines are whole. The other VMs, left of pipelines that lost some, or
newcomers, form pipelines by themselves (the paper's reinstantiation), or with the VMs of one whole pipeline,
or of two (borrowing and merging). New pipelines are templates, or are cut elsewhere so that less moves. The
most promising plans are simulated; `worths` says whether one of them is taken.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...pipeline import Plan, Range
from ...simulator import to_ns
from ..packing import Work
from ..placement import Slot, place_in
from ..request import Choice, Request
from ..risk import worth
from ..search_space import Options
from ..stages import Mode
from ..templates import Template, stage_costs, template_of
from ..unequal import Combination, combinations, pool, shared
from ..unequal_search import devices_per_vm, played, step_ns
from .instead import Before, prospect_of
from .recutting import recut
from .whole import Stages, whole_pipelines

_GIVEN_UP = 2  # whole pipelines at most whose VMs form new ones
# Of the plans whose backwards are of one kind:
_LOOKED_AT = 10  # the fastest, of which it is known what they move
_RECUT = 4  # of these, those that are cut elsewhere as well
_TRIES = 3  # those that are simulated at most, of each number of pipelines that stay
_SLACKS = (1.0, 1.03)  # of the slowest stage's work, for cuts that move less
_PRECISION = 500  # combinations are found to this part of a step
_OFFERED = 3  # at most
_WORK, _LOOK = 150_000_000, 2000  # cells, see `unequal_search`; a look at one pipeline that stays
_SURELY_LESS = 0.93  # simulated steps take at least so much of what was expected


def reformed(
    request: Request, before: Before, best: Plan, step_s: float, ends_s: float, change_s: float = 0.0
) -> list[Choice]:
    """Plans around whole pipelines that are worth more than the fastest plan, those of most worth first.

    `before`: the plan that ran. `best`: the fastest one, and `step_s` what its steps take. `change_s`: for
    how long nothing steps in any case. None where `unequal` has none either. All fit, and have as many copies
    of each section as are asked for.
    """
    options = Options(request, best.optimizer_on_host)
    per_vm = devices_per_vm(options)
    if per_vm is None or not request.holding:
        return []
    valuation = _Valuation(options, step_s, ends_s, change_s)
    whole = whole_pipelines(request, before)
    drafts = [
        (value, draft)
        for mode in options.modes(2)
        for value, draft in _Search(options, mode, per_vm, whole, valuation).most_promising()
    ]
    found, tried = list[tuple[float, Choice]](), Counter[tuple[Mode, int]]()
    fastest = enough = valuation.worth(best.ranges, step_s)
    for value, draft in sorted(drafts, key=lambda each: -each[0]):
        way = draft.mode, draft.num_kept
        if value <= enough * _SURELY_LESS or tried[way] == _TRIES:
            continue
        tried[way] += 1
        choice = played(options, draft.combination, draft.mode)
        if choice is not None and choice.candidate.rejected is None:
            found.append((valuation.worth(draft.spans, choice.predicted_s), choice))
            enough = max(enough, found[-1][0])
    found = [each for each in found if each[0] > fastest]
    return [choice for _, choice in sorted(found, key=lambda each: -each[0])[:_OFFERED]]


class _Valuation:
    """What plans for a request are worth. `best_s`: what a step of the fastest takes."""

    def __init__(self, options: Options, best_s: float, ends_s: float, change_s: float) -> None:
        self._options = options
        self.best_ns = to_ns(best_s)
        self._ends_s = ends_s
        self._change_s = change_s
        self._places: dict[tuple[Range, ...], Sequence[Slot]] = {}

    def worth(self, spans: Sequence[Range], step_s: float) -> float:
        """Samples/s; see `risk.worth`. `spans`: by rank."""
        request = self._options.request
        samples = request.num_micro_batches * request.calibration.microbatch_size
        one = prospect_of(request, spans, self.placed(spans), step_s, self._change_s)
        return worth(one, 1e9 * samples / self.best_ns, self._ends_s)

    def placed(self, spans: Sequence[Range]) -> Sequence[Slot]:
        """The workers by rank, as `played` places them."""
        key, request = tuple(spans), self._options.request
        if key not in self._places:
            used = self._options.roster.used(len(spans))
            self._places[key] = place_in(spans, used, request.holding, request.calibration.saved_bytes)
        return self._places[key]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A plan not yet simulated, whose first `num_kept` pipelines are whole ones."""

    combination: Combination
    num_kept: int
    mode: Mode
    step_ns: int
    """About what its step takes."""

    @property
    def spans(self) -> list[Range]:
        """By rank."""
        return _spans(self.combination.templates)

    @property
    def kind(self) -> tuple[Stages, ...]:
        """Equal for drafts that differ in the order of their pipelines alone."""
        return tuple(sorted(one.stages for one in self.combination.templates))


class _Search:
    """Drafts whose backwards are of one kind."""

    def __init__(
        self, options: Options, mode: Mode, per_vm: int, whole: Sequence[Stages], valuation: _Valuation
    ) -> None:
        self._options = options
        self._mode = mode
        self._per_vm = per_vm
        self._whole = whole
        self._valuation = valuation
        self._num = options.request.num_micro_batches
        self._capacity = options.capacity()
        self._work = Work(_WORK)

    def most_promising(self) -> list[tuple[float, _Draft]]:
        """(about what it is worth, plan)."""
        by_kind: dict[tuple[Stages, ...], _Draft] = {}
        for draft in sorted(self._drafts(), key=lambda one: (one.step_ns, -one.num_kept)):
            by_kind.setdefault(draft.kind, draft)
        fastest = [*by_kind.values()][:_LOOKED_AT]
        best = sorted(self._valued(fastest), key=lambda each: -each[0])[:_RECUT]
        elsewhere = [other for _, one in best for slack in _SLACKS for other in self._recut(one, slack)]
        return self._valued({one.kind: one for one in (*elsewhere, *fastest)}.values())

    def _valued(self, drafts: Iterable[_Draft]) -> list[tuple[float, _Draft]]:
        return [(self._valuation.worth(one.spans, one.step_ns / 1e9), one) for one in drafts]

    def _drafts(self) -> Iterator[_Draft]:
        table = self._options.table
        num_vms = len(self._options.request.workers) // self._per_vm
        most_ns = 2 * self._valuation.best_ns
        choices = pool(table, self._num, num_vms, self._per_vm, self._capacity, self._mode)
        for kept in _kept(self._whole):
            if self._work.is_used_up:
                return
            beside = [one for stages in kept if (one := self._template(stages)) is not None]
            self._work.take(_LOOK * (1 + len(kept)))
            if len(beside) < len(kept):
                continue  # memory does not suffice with such backwards
            free = num_vms - sum(one.num_vms for one in beside)
            if 0 < len(beside) <= self._num:
                yield self._draft(shared(beside, self._num), len(kept))
            precision_ns = 1 + most_ns // _PRECISION
            for one in combinations(choices, free, self._num, most_ns, precision_ns, beside, work=self._work):
                for other in _as_fast(one, len(kept), choices):
                    yield self._draft(other, len(kept))

    def _recut(self, draft: _Draft, slack: float) -> Iterator[_Draft]:
        """The draft with new pipelines cut where less moves, if there are such cuts."""
        request, slots = self._options.request, self._valuation.placed(draft.spans)
        sizes = request.calibration.saved_bytes
        costs = stage_costs(self._options.table, self._capacity, draft.mode)
        templates, first, num_kept = list[Template](), 0, draft.num_kept
        pairs = zip(draft.combination.templates, draft.combination.shares, strict=True)
        for number, (one, share) in enumerate(pairs):
            own = slots[first : first + one.num_vms * self._per_vm]
            first += len(own)
            stages = one.stages
            if number >= num_kept:
                stages = recut(one, own, request.holding, sizes, costs, share, slack=slack) or stages
            templates.append(one if stages == one.stages else self._template(stages) or one)
        if templates != list(draft.combination.templates):
            yield self._draft(shared(templates, self._num), num_kept)

    def _draft(self, combination: Combination, num_kept: int) -> _Draft:
        about_ns = step_ns(self._options, combination, self._mode)
        return _Draft(combination, num_kept, self._mode, about_ns)

    def _template(self, stages: Stages) -> Template | None:
        return template_of(self._options.table, stages, self._per_vm, self._capacity, self._mode)


def _as_fast(
    found: Combination, num_kept: int, choices: Mapping[int, Sequence[Template]]
) -> Iterator[Combination]:
    """The combination, and those with other templates for its new pipelines of one size, that end no later:
    with them sums may take less, or fewer bytes move."""
    yield found
    for size in {one.num_vms for one in found.templates[num_kept:]}:
        places = [n for n, one in enumerate(found.templates) if n >= num_kept and one.num_vms == size]
        for other in choices[size]:
            if all(other.time_ns(found.shares[place]) <= found.time_ns for place in places):
                templates = [other if n in places else one for n, one in enumerate(found.templates)]
                yield Combination(tuple(templates), found.shares)


def _spans(templates: Sequence[Template]) -> list[Range]:
    return [stage.range for one in templates for stage in one.stages for _ in range(stage.width)]


def _kept(whole: Sequence[Stages]) -> Iterator[Sequence[Stages]]:
    """The whole pipelines that stay if none, one or two are given up, whichever of alike ones."""
    seen = set[tuple[Stages, ...]]()
    for number in range(min(_GIVEN_UP, len(whole)) + 1):
        for given_up in itertools.combinations(range(len(whole)), number):
            kinds = tuple(sorted(whole[place] for place in given_up))
            if kinds not in seen:
                seen.add(kinds)
                yield [one for place, one in enumerate(whole) if place not in given_up]
