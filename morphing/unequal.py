"""Plans of unequal pipelines, which use every VM (Oobleck §4.2): how many of which template, what shares.

Pipelines end together as nearly as whole micro-batches allow. For each number of pipelines the best multiset
of templates is found exactly, under the templates' cost: by bisection of the time, with a knapsack of what
pipelines of together so many VMs do in that time (`packing`). (Oobleck enumerates all multisets.) The numbers
of pipelines are tried in the order of a bound, as shapes of grids are (decision 120).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from ..pipeline import Hop, Path, Plan, Schedule, dealt
from .balance import least
from .packing import Paces, Packing, Work
from .stages import WHOLE, Mode, StageTable
from .templates import Template, TemplateStage, templates

_STEPS = 64  # times between the least and the most for which bounds are known
_LESS = 0.5  # bounds are of floats, micro-batches are whole


@dataclass(frozen=True, slots=True)
class Combination:
    """Pipelines that share a step. `shares`: the micro-batches that each takes."""

    templates: tuple[Template, ...]
    shares: tuple[int, ...]

    @property
    def time_ns(self) -> int:
        """Until the last pipeline's last backward ends."""
        return max(map(Template.time_ns, self.templates, self.shares))

    def time_with(self, windows: Sequence[int | None]) -> int:
        """`time_ns`, if all workers of each pipeline keep to its window."""
        return max(map(Template.time_ns, self.templates, self.shares, windows))

    @property
    def num_vms(self) -> int:
        return sum(template.num_vms for template in self.templates)


def pool(
    table: StageTable,
    num_micro_batches: int,
    num_vms: int,
    devices_per_vm: int,
    capacity_bytes: int,
    mode: Mode = WHOLE,
) -> Mapping[int, Sequence[Template]]:
    """{number of VMs: templates, each the best for some likely share of N micro-batches}.

    Those shares are N, a half of it, a quarter, ..., down to what each of as many pipelines as VMs has; so
    clusters of about the same size have the same templates, which are cached. A pipeline has no more VMs than
    sections, so of many VMs the largest shares are left out: no pipeline would have them.
    """
    found: dict[int, dict[Template, None]] = {}
    widest = _power_above(min(num_vms, table.num_sections))
    most_parts = _power_above(num_vms)
    for parts in range((most_parts // widest).bit_length() - 1, most_parts.bit_length()):
        share = max(1, num_micro_batches >> parts)
        best = _templates(table, share, widest, devices_per_vm, capacity_bytes, mode)
        for size, template in best.items():
            if size <= num_vms:
                found.setdefault(size, {})[template] = None
    return {size: tuple(each) for size, each in sorted(found.items())}


def _power_above(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


_templates = lru_cache(maxsize=64)(templates)


def combinations(
    choices: Mapping[int, Sequence[Template]],
    num_vms: int,
    num_micro_batches: int,
    most_ns: int | None = None,
    precision_ns: int = 1,
    beside: Sequence[Template] = (),
    *,
    counts: int | None = None,
    ends_ns: Callable[[int], float] = lambda _: 0.0,
    work: Work | None = None,
) -> Iterator[Combination]:
    """For each number of pipelines the combination on at most `num_vms` VMs that takes least, the most
    promising numbers first.

    `most_ns`: numbers of pipelines of which none takes so little are left out. `precision_ns`: less than so
    much may a combination take longer than the best. `beside`: pipelines that take a part of the
    micro-batches on other VMs; they come first in every combination. `counts`: at most so many numbers are
    tried; None: all. `ends_ns`: about what follows the last backward of a number of pipelines; it decides
    which are promising. `work`: the search ends where it is used up.
    """
    if not choices:
        return
    slowest = max(one.time_ns(num_micro_batches) for each in choices.values() for one in each)
    most_ns = slowest if most_ns is None else min(most_ns, slowest)
    search = _Search(Paces(choices), num_vms, num_micro_batches, beside, work or Work())
    surely_ns = search.surely_ns(most_ns)
    numbers = sorted(surely_ns, key=lambda count: (surely_ns[count] + ends_ns(len(beside) + count), count))
    for count in numbers[:counts]:
        found = search.best(count, surely_ns[count], most_ns, precision_ns)
        if found is not None:
            yield found


@dataclass(frozen=True, slots=True)
class _Search:
    """For combinations of the templates of `paces`; the rest as in `combinations`."""

    paces: Paces
    num_vms: int
    num_micro_batches: int
    beside: Sequence[Template]
    work: Work

    def surely_ns(self, most_ns: int) -> Mapping[int, int]:
        """{number of pipelines: what they surely take}, of those that may take `most_ns` at most.

        Found for all numbers at once, to a few thousandths where the least is near `most_ns`.
        """
        counts = min(self.num_vms // min(self.paces.choices), self.num_micro_batches - len(self.beside))
        found: dict[int, int] = {}
        if counts < 1:
            return found
        least_ns = least(most_ns, lambda ns: bool(self._sufficient(ns, counts)), 1 + most_ns // _STEPS)
        times_ns = sorted({most_ns - (most_ns - least_ns) * part // _STEPS for part in range(_STEPS + 1)})
        before_ns = 1
        for time_ns in times_ns:
            for count in self._sufficient(time_ns, counts):
                found.setdefault(count, before_ns)
            before_ns = time_ns
        return found

    def _sufficient(self, time_ns: int, counts: int) -> Sequence[int]:
        """The numbers of pipelines up to `counts` of which no bound says that the time does not suffice."""
        done = self._packing(time_ns).at_most(counts)
        return [1 + place for place in (done >= self._left(time_ns) - _LESS).nonzero()[0].tolist()]

    def best(self, count: int, surely_ns: int, most_ns: int, precision_ns: int) -> Combination | None:
        """`surely_ns`: none is faster. Returns None where it takes longer than `most_ns`, or the work is used
        up."""
        base_ns, slack_ns = surely_ns, 0
        while not self._suffices(count, base_ns + slack_ns):
            if base_ns + slack_ns >= most_ns or self.work.is_used_up:
                return None
            base_ns, slack_ns = base_ns + slack_ns, max(precision_ns, 2 * slack_ns)
            slack_ns = min(slack_ns, most_ns - base_ns)
        if slack_ns > precision_ns:
            slack_ns = least(slack_ns, lambda ns: self._suffices(count, base_ns + ns), precision_ns)
        return self._combination(count, base_ns + slack_ns)

    def _combination(self, count: int, time_ns: int) -> Combination:
        num = self.num_micro_batches
        members = self._packing(time_ns).members(count)
        members.sort(key=lambda one: (-one[1].num_vms, -one[0]))
        taken = [*self.beside, *(template for _, template in members)]
        done = [*_each_done(self.beside, time_ns, num), *(done for done, _ in members)]
        shares = _trimmed(done, taken, num)

        @cache
        def fastest(size: int, share: int) -> Template:  # of those alike in the time of the slowest pipeline
            return min(self.paces.choices[size], key=lambda one: one.time_ns(share))

        for place in range(len(self.beside), len(taken)):
            taken[place] = fastest(taken[place].num_vms, shares[place])
        return Combination(tuple(taken), shares)

    def _suffices(self, count: int, time_ns: int) -> bool:
        """Whether `count` pipelines and those beside do all micro-batches in the time, each at least one.

        Where the work is used up: False, unless it is known.
        """
        packing, left = self._packing(time_ns), self._left(time_ns)
        if packing.at_most(count)[-1] < left - _LESS or not self.work.take(packing.cells(count)):
            return False
        most = packing.most(count)
        return most is not None and most >= left

    def _left(self, time_ns: int) -> int:
        """Micro-batches that those beside do not do in the time."""
        return self.num_micro_batches - sum(_each_done(self.beside, time_ns, self.num_micro_batches))

    def _packing(self, time_ns: int) -> Packing:
        return Packing(self.paces.done_by(time_ns, self.num_micro_batches), self.num_vms)


def _each_done(templates: Sequence[Template], time_ns: int, num_micro_batches: int) -> list[int]:
    """What each does in the time, or one: none stands still."""
    return [max(1, min(one.done_by(time_ns), num_micro_batches)) for one in templates]


def shared(members: Sequence[Template], num_micro_batches: int) -> Combination:
    """These pipelines, with the shares of N micro-batches that end soonest."""
    slowest_ns = max(one.time_ns(num_micro_batches) for one in members)
    time_ns = least(slowest_ns, lambda ns: sum(one.done_by(ns) for one in members) >= num_micro_batches)
    done = _each_done(members, time_ns, num_micro_batches)
    return Combination(tuple(members), _trimmed(done, members, num_micro_batches))


def _trimmed(done: Sequence[int], members: Sequence[Template], num_micro_batches: int) -> tuple[int, ...]:
    """Shares of exactly N micro-batches: what is too much is taken from those that would end last."""
    shares = list(done)

    @cache  # many pipelines are alike
    def ends_ns(template: Template, share: int) -> int:
        return template.time_ns(share)

    last_first = [(-ends_ns(*each), place) for place, each in enumerate(zip(members, done, strict=True))]
    heapq.heapify(last_first)
    for _ in range(sum(done) - num_micro_batches):
        while shares[last_first[0][1]] == 1:  # none stands still
            heapq.heappop(last_first)
        place = last_first[0][1]
        shares[place] -= 1
        heapq.heapreplace(last_first, (-ends_ns(members[place], shares[place]), place))
    return tuple(shares)


def plan_of(
    pipelines: Sequence[Sequence[TemplateStage]],
    shares: Sequence[int],
    *,
    schedule: Schedule = Schedule.VARUNA,
    windows: Sequence[int | None] | None = None,
    recompute: bool = False,
    halves: bool = False,
    generation: int = 0,
    optimizer_on_host: bool = False,
    frozen: int = 0,
) -> Plan:
    """A plan of pipelines of any depth. `windows`: of each; left out, none has any.

    Ranks go pipeline by pipeline, stage by stage. Micro-batches are dealt round-robin among the pipelines
    that still lack some, and within a stage to its workers in turn.
    """
    paths, first = list[Path](), 0
    every = windows or [None] * len(shares)
    # Of the whole plan, for paths that lose their own: those of rerouted plans.
    tightest = min((window for window in every if window is not None), default=None)
    for stages, numbers, window in zip(pipelines, dealt(shares), every, strict=True):
        own = window if window is not None or tightest is None else len(numbers)
        widths = [stage.width for stage in stages]
        firsts = list(itertools.accumulate(widths, initial=first))
        turns = math.lcm(*widths)
        for turn in range(min(turns, len(numbers))):
            hops = tuple(
                Hop(start + turn % stage.width, stage.range)
                for start, stage in zip(firsts[:-1], stages, strict=True)
            )
            paths.append(Path(hops, numbers[turn::turns], window=own))
        first = firsts[-1]
    return Plan(
        num_sections=pipelines[0][-1].range.stop,
        num_micro_batches=sum(shares),
        ranges=tuple(stage.range for stages in pipelines for stage in stages for _ in range(stage.width)),
        paths=tuple(paths),
        schedule=schedule,
        window=tightest,
        recompute=recompute,
        generation=generation,
        optimizer_on_host=optimizer_on_host,
        frozen=frozen,
        halves=halves,
    )
