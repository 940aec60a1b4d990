"""Plans of unequal pipelines, which use every VM (Oobleck §4.2): how many of which template, what shares.

Pipelines end together as nearly as whole micro-batches allow. For each number of pipelines the best multiset
of templates is found exactly, under the templates' cost: by bisection of the time, with a knapsack of what
pipelines of together so many VMs do in that time. (Oobleck enumerates all multisets.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

from ..pipeline import Hop, Path, Plan, Schedule, dealt
from .balance import least
from .stages import WHOLE, Mode, StageTable
from .templates import Template, TemplateStage, templates


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

    Those shares are N, a half of it, a quarter, ..., whatever the number of VMs; so clusters of about the
    same size have the same templates, which are cached.
    """
    found: dict[int, dict[Template, None]] = {}
    about = 1 << (num_vms - 1).bit_length()
    for parts in range(about.bit_length()):
        share = max(1, num_micro_batches >> parts)
        best = _templates(table, share, about, devices_per_vm, capacity_bytes, mode)
        for size, template in best.items():
            if size <= num_vms:
                found.setdefault(size, {})[template] = None
    return {size: tuple(each) for size, each in sorted(found.items())}


_templates = lru_cache(maxsize=64)(templates)


def combinations(
    choices: Mapping[int, Sequence[Template]],
    num_vms: int,
    num_micro_batches: int,
    most_ns: int | None = None,
    precision_ns: int = 1,
    beside: Sequence[Template] = (),
) -> Iterator[Combination]:
    """For each number of pipelines the combination on at most `num_vms` VMs that takes least.

    `most_ns`: numbers of pipelines of which none takes so little are left out. `precision_ns`: less than so
    much may a combination take longer than the best. `beside`: pipelines that take a part of the
    micro-batches on other VMs; they come first in every combination.
    """
    if not choices:
        return
    slowest = max(one.time_ns(num_micro_batches) for each in choices.values() for one in each)
    most_ns = slowest if most_ns is None else min(most_ns, slowest)
    counts = min(num_vms // min(choices), num_micro_batches - len(beside))
    search = _Search(_Paces(choices), num_vms, num_micro_batches, beside)
    packed = search.packed(most_ns, counts)
    for count in range(1, counts + 1):
        if search.suffices(packed, count, most_ns):
            yield search.best(count, most_ns, precision_ns)


@dataclass(frozen=True, slots=True)
class _Search:
    """For combinations of the templates of `paces`; the rest as in `combinations`."""

    paces: _Paces
    num_vms: int
    num_micro_batches: int
    beside: Sequence[Template]

    def packed(self, time_ns: int, counts: int) -> _Packed:
        return _Packed(self.paces.done_by(time_ns, self.num_micro_batches), self.num_vms, counts)

    def suffices(self, packed: _Packed, count: int, time_ns: int) -> bool:
        """Whether `count` pipelines and those beside do all micro-batches in the time, each at least one."""
        most, num = packed.most(count), self.num_micro_batches
        return most > 0 and most + sum(_each_done(self.beside, time_ns, num)) >= num

    def best(self, count: int, enough_ns: int, precision_ns: int) -> Combination:
        """`enough_ns`: is known to suffice."""
        num = self.num_micro_batches
        time_ns = least(enough_ns, lambda ns: self.suffices(self.packed(ns, count), count, ns), precision_ns)
        members = self.packed(time_ns, count).members(count)
        members.sort(key=lambda one: (-one[1].num_vms, -one[0]))
        taken = [*self.beside, *(template for _, template in members)]
        done = [*_each_done(self.beside, time_ns, num), *(done for done, _ in members)]
        shares = _trimmed(done, taken, num)
        for place in range(len(self.beside), len(taken)):  # alike in the time of the slowest pipeline
            size, share = taken[place].num_vms, shares[place]
            taken[place] = min(self.paces.choices[size], key=lambda one: one.time_ns(share))
        return Combination(tuple(taken), shares)


def _each_done(templates: Sequence[Template], time_ns: int, num_micro_batches: int) -> list[int]:
    """What each does in the time, or one: none stands still."""
    return [max(1, min(one.done_by(time_ns), num_micro_batches)) for one in templates]


def shared(members: Sequence[Template], num_micro_batches: int) -> Combination:
    """These pipelines, with the shares of N micro-batches that end soonest."""
    slowest_ns = max(one.time_ns(num_micro_batches) for one in members)
    time_ns = least(slowest_ns, lambda ns: sum(one.done_by(ns) for one in members) >= num_micro_batches)
    done = _each_done(members, time_ns, num_micro_batches)
    return Combination(tuple(members), _trimmed(done, members, num_micro_batches))


_Done = Mapping[int, tuple[int, Template]]
"""{number of VMs: (most micro-batches that a pipeline of so many does in some time, by this template)}."""


class _Paces:
    """What templates do in a time, all of them at once: for hundreds of VMs there are thousands of bounds."""

    def __init__(self, choices: Mapping[int, Sequence[Template]]) -> None:
        """`choices`: {number of VMs: templates}."""
        self.choices = choices
        self._templates = [one for each in choices.values() for one in each]
        self._lines = numpy.array(list(itertools.chain.from_iterable(t.lines for t in self._templates))).T
        lengths = numpy.array([len(one.lines) for one in self._templates])
        self._firsts = numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]])

    def done_by(self, time_ns: int, most: int) -> _Done:
        """Of each number of VMs the template that does most, at most `most`; without those that do none."""
        fixed_ns, each_ns, width, together = self._lines
        # As `_Line.done_by`. Room for more than `most` at once makes no difference, and products stay small.
        by_line = ((time_ns - fixed_ns + 1) * numpy.minimum(together, most) - 1) // each_ns * width
        numbers = numpy.minimum(numpy.minimum.reduceat(by_line, self._firsts), most)
        found: dict[int, tuple[int, Template]] = {}
        for number, template in zip(numbers.tolist(), self._templates, strict=True):
            if number > found.get(template.num_vms, _NOTHING)[0]:
                found[template.num_vms] = number, template
        return found


_NOTHING = 0, None


_IMPOSSIBLE = -(1 << 40)


class _Packed:
    """What up to `counts` pipelines on at most `num_vms` VMs do at most in some time."""

    def __init__(self, done: _Done, num_vms: int, counts: int) -> None:
        self._done = done
        sizes = numpy.array(sorted(done, reverse=True), dtype=numpy.int64)
        more = numpy.array([done[size][0] for size in sizes.tolist()], dtype=numpy.int64)
        # By pipelines and VMs: the most micro-batches, and the VMs of the last pipeline.
        self._best = numpy.full((counts + 1, num_vms + 1), _IMPOSSIBLE, dtype=numpy.int64)
        self._last = numpy.zeros((counts + 1, num_vms + 1), dtype=numpy.int64)
        self._best[0, 0] = 0
        if not done:
            return
        widest = int(sizes[0])
        places = numpy.arange(num_vms + 1)
        before = numpy.full(widest + num_vms + 1, _IMPOSSIBLE, dtype=numpy.int64)
        for count in range(1, counts + 1):
            before[widest:] = self._best[count - 1]
            found = before[places[:, None] + widest - sizes] + more
            chosen = found.argmax(axis=1)  # of equals the largest pipeline
            self._best[count] = numpy.where(found[places, chosen] < 0, _IMPOSSIBLE, found[places, chosen])
            self._last[count] = sizes[chosen]

    def most(self, count: int) -> int:
        """Negative where there is no way."""
        return int(self._best[count].max())

    def members(self, count: int) -> list[tuple[int, Template]]:
        """(micro-batches, template) of each of `count` pipelines that do most, on the fewest VMs."""
        used = int(self._best[count].argmax())
        found = list[tuple[int, Template]]()
        for number in range(count, 0, -1):
            size = int(self._last[number, used])
            found.append(self._done[size])
            used -= size
        return found


def _trimmed(done: Sequence[int], members: Sequence[Template], num_micro_batches: int) -> tuple[int, ...]:
    """Shares of exactly N micro-batches: what is too much is taken from those that would end last."""
    shares = list(done)
    for _ in range(sum(done) - num_micro_batches):
        larger = [number for number, share in enumerate(shares) if share > 1]
        shares[max(larger, key=lambda number: members[number].time_ns(shares[number]))] -= 1
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
