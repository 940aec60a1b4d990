"""What the deaths to come cost a plan, beside what its steps take.

While each section has a host among the living, a death costs little: the others go on from what they hold. If
the last host of a section dies, all go back to the newest checkpoint. How likely that is depends on how many
VMs host each section, and on how many VMs are lost at once: clouds take them in groups.

`worths`: the samples that plans may be expected to do for each second until the next change, less what that
change costs. A change is a loss of VMs that the plan uses, or an end that is foreseen: others join, or the
job is over. Losses are a Poisson process; the foreseen end is the same for all plans. See docs/choice.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from operator import add, mul

from ..pipeline import Plan

_NEGLIGIBLE = 1e-7  # of all losses, those of more VMs than are looked at
_COUNTED = 32  # VMs lost at once, up to which the losses that take a section are counted
_RANGES = 32  # in which the numbers of VMs above that are looked at
_WIDEST = 8  # VMs of which it is remembered whether they are lost: twice the work for each more


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How often VMs are lost, and what going back to a checkpoint costs.

    The number of VMs that are lost at once is taken to be geometrically distributed, and each set of so many
    VMs to be as likely as any other. Of up to 32 VMs this is computed exactly. Where more are lost at once,
    sections that share no VMs are taken to lose their hosts independently of each other, which is within 0.1
    of the exact probability, and within 0.03 for a hundred VMs or more; and where sections share VMs, each VM
    is taken to be lost independently of the others, which is within 0.02. Raises `ValueError`, naming the
    field.
    """

    losses_per_s: float
    """Of one VM or of several at once."""
    mean_size: float
    """VMs lost at once, on average; at least 1."""
    redo_s: float
    """From such a death until the steps begin that are to be done again, and what of them is told in seconds:
    half of a checkpoint interval."""
    redo_steps: float
    """And what of them is told in steps."""
    form_s: float = 0.0
    """From a death that leaves each section a host until the others step."""

    def __post_init__(self) -> None:
        for name in ("losses_per_s", "redo_s", "redo_steps", "form_s"):
            value: float = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}: {value} is not a number >= 0")
        if not self.mean_size >= 1:
            raise ValueError(f"mean_size: {self.mean_size} is not a number >= 1")

    def lost(self, hosts: Iterable[int], num_vms: int, step_s: float) -> float:
        """Seconds lost to deaths for each second in which steps of `step_s` are done.

        `hosts`: for each set of VMs that host a section, which must all die for it to be lost, their number;
        no VM is in two of them. `num_vms`: all VMs that may be lost, whether the plan uses them or not.
        """
        return self._lost(_lost_with(num_vms, tuple(sorted(hosts)), self.mean_size), step_s)

    def lost_by(self, plan: Plan, vm_of: Sequence[str], num_vms: int, step_s: float) -> float:
        """As `lost_with`, of a plan on these VMs, by rank."""
        hosts = [frozenset(vm_of[rank] for rank in plan.hosts(k)) for k in range(plan.num_sections)]
        return self.lost_with(hosts, num_vms, step_s)

    def lost_with(self, hosts: Sequence[frozenset[str]], num_vms: int, step_s: float) -> float:
        """As `lost`, given the VMs that host each section or stage, which may share some of them."""
        return self._lost(self.fatal_with(hosts, num_vms), step_s)

    def touches(self, used: int, num_vms: int) -> float:
        """The probability that a loss takes any of `used` VMs out of `num_vms`."""
        return _mean(
            num_vms,
            self.mean_size,
            lambda size: 1.0 - comb(num_vms - used, size) / comb(num_vms, size),
            lambda size: 1.0 - _all_of(size, num_vms - used, num_vms),
        )

    def fatal_with(self, hosts: Sequence[frozenset[str]], num_vms: int) -> float:
        """The probability that a loss leaves some section no host. Where many VMs host sections that lie far
        apart it is at most the sum over the sections."""
        minimal = [one for one in dict.fromkeys(hosts) if not any(other < one for other in hosts)]
        sizes = tuple(sorted(map(len, minimal)))
        if sum(sizes) == len(frozenset[str]().union(*minimal)):
            return _lost_with(num_vms, sizes, self.mean_size)
        if _width(minimal) > _WIDEST:
            return _at_most(num_vms, sizes, self.mean_size)
        spared = _sparing_of_few(minimal, most=min(num_vms, _COUNTED))
        large = [size for size, _ in _sizes(num_vms, self.mean_size) if size > _COUNTED]
        spared_of_more = dict(zip(large, _sparing_of_more(minimal, large, num_vms), strict=True))
        num_others = num_vms - len(frozenset[str]().union(*minimal))

        def fatal(size: int) -> float:
            harmless = sum(spared[part] * comb(num_others, size - part) for part in range(size + 1))
            return 1.0 - harmless / comb(num_vms, size)

        return _mean(num_vms, self.mean_size, fatal, lambda size: 1.0 - spared_of_more[size])

    def _lost(self, fatal: float, step_s: float) -> float:
        return self.losses_per_s * fatal * (self.redo_s + self.redo_steps * step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """What may be expected of a plan."""

    samples_per_s: float
    """As predicted for its steps."""
    begins_s: float
    """Seconds until it steps, beyond those that all plans take alike."""
    changes_per_s: float = 0.0
    """Losses that take VMs which it uses."""
    change_s: float = 0.0
    """Seconds of steps that such a loss costs: until others step, and what is done again then."""

    def __post_init__(self) -> None:
        for name in ("samples_per_s", "begins_s", "changes_per_s", "change_s"):
            value: float = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}: {value} is not a number >= 0")


def worth(one: Prospect, best_per_s: float, ends_s: float = math.inf) -> float:
    """Samples/s that `one` may be expected to do until the next change, less what that change costs.

    g = r · u - λ · r* · L, with r, λ and L as in `Prospect`, r* `best_per_s`, and u the part of that time in
    which it steps (see `used_part`). Negative where changes cost more than is done between them.
    """
    used = used_part(one.begins_s, one.changes_per_s, ends_s)
    return one.samples_per_s * used - one.changes_per_s * best_per_s * one.change_s


def used_part(begins_s: float, changes_per_s: float, ends_s: float) -> float:
    """Of the time until the first loss, or `ends_s` if that is sooner, the part after `begins_s`.

    (exp(-λt) - exp(-λH)) / (1 - exp(-λH)): exp(-λt) if no end is in sight, 1 - t/H if nothing is lost.
    """
    if begins_s <= 0:
        return 1.0
    if begins_s >= ends_s:
        return 0.0
    if changes_per_s == 0 or changes_per_s * ends_s < 1e-9:  # the formula below would round to 0/0
        return 1.0 - begins_s / ends_s
    whole = -math.expm1(-changes_per_s * ends_s)
    return -math.expm1(-changes_per_s * (ends_s - begins_s)) * math.exp(-changes_per_s * begins_s) / whole


def prospect(
    samples: float,
    step_s: float,
    begins_s: float,
    hosts: Sequence[frozenset[str]],
    num_vms: int,
    risk: Risk | None,
) -> Prospect:
    """Of a plan whose steps of so many samples take `step_s`.

    `hosts`: for each section, the VMs that host it, of `num_vms` that may be lost. After a loss that leaves
    each section a host the others form again, and do the share of the step that was done on the VMs lost:
    half a step's on average. After another, all go back to the newest checkpoint.
    """
    if risk is None:
        return Prospect(samples_per_s=samples / step_s, begins_s=begins_s)
    touched = risk.touches(len(frozenset[str]().union(*hosts)), num_vms)
    fatal = min(touched, risk.fatal_with(hosts, num_vms))
    share = min(1.0, risk.mean_size / (num_vms * touched)) if touched else 0.0
    again_s = fatal * (risk.redo_s + risk.redo_steps * step_s)
    on_s = (touched - fatal) * (risk.form_s + share * step_s / 2)
    return Prospect(
        samples_per_s=samples / step_s,
        begins_s=begins_s,
        changes_per_s=risk.losses_per_s * touched,
        change_s=(again_s + on_s) / touched if touched else 0.0,
    )


def worths(prospects: Sequence[Prospect], ends_s: float = math.inf) -> list[float]:
    """The worth of each beside the others, whose fastest is done without while a change costs time.

    Where none of them steps before that end, they are weighed as if it were not foreseen.
    """
    if all(one.begins_s >= ends_s and one.begins_s > 0 for one in prospects):
        ends_s = math.inf
    best_per_s = max(one.samples_per_s for one in prospects)
    return [worth(one, best_per_s, ends_s) for one in prospects]


@lru_cache(maxsize=4096)
def _lost_with(num_vms: int, hosts: tuple[int, ...], mean_size: float) -> float:
    """The probability that a loss takes all of one of these sets of VMs, no two of which have one in common.

    By inclusion and exclusion: `signs[s]` is how many of their unions have s VMs, those of an odd number of
    sets taken away.
    """
    assert sum(hosts) <= num_vms, "no VM is in two of the sets"
    most = min(num_vms, _COUNTED)
    signs = [1] + [0] * most
    for number in hosts:
        for size in range(most, number - 1, -1):
            signs[size] -= signs[size - number]
    unions = [(size, sign) for size, sign in enumerate(signs) if sign]
    alike = Counter(hosts)

    def fatal(size: int) -> float:
        # In whole numbers, for what is added and taken away is far larger than what remains.
        ways = comb(num_vms, size)
        return (ways - sum(sign * comb(num_vms - n, size - n) for n, sign in unions if n <= size)) / ways

    return _mean(num_vms, mean_size, fatal, lambda size: _any_lost(alike, size, num_vms))


def _mean(
    num_vms: int, mean_size: float, of_few: Callable[[int], float], of_more: Callable[[float], float]
) -> float:
    """The mean over all losses, by how likely they are: `of_few` says it of one of up to `_COUNTED` VMs,
    `of_more` of larger ones, on average over those of about this size."""
    return sum(
        weight * (of_few(round(size)) if size <= _COUNTED else of_more(size))
        for size, weight in _sizes(num_vms, mean_size)
    )


@lru_cache(maxsize=256)
def _sizes(num_vms: int, mean_size: float) -> Sequence[tuple[float, float]]:
    """How many VMs are lost at once, each with its probability; above `_COUNTED` the means of ranges."""
    again = 1.0 - 1.0 / mean_size  # the probability that one more is lost
    found, weight = list[tuple[float, float]](), 1.0
    while len(found) < num_vms and weight > _NEGLIGIBLE:
        found.append((len(found) + 1.0, weight))
        weight *= again
    total = sum(weight for _, weight in found)
    few, more = found[:_COUNTED], found[_COUNTED:]
    width = -(-len(more) // _RANGES) or 1
    for part in [more[begin : begin + width] for begin in range(0, len(more), width)]:
        weight = sum(weight for _, weight in part)
        few.append((sum(size * weight for size, weight in part) / weight, weight))
    return [(size, weight / total) for size, weight in few]


def _any_lost(hosts: Counter[int], size: float, num_vms: int) -> float:
    """About how likely a loss of `size` VMs takes all of any of these sets, as if each were hit by itself.

    `hosts`: how many sets have so many VMs.
    """
    spared = 1.0
    for number, times in hosts.items():
        spared *= (1.0 - _all_of(number, size, num_vms)) ** times
    return 1.0 - spared


def _all_of(wanted: float, size: float, num_vms: int) -> float:
    """The probability that a draw of `size` of the VMs has all of `wanted` ones."""
    if wanted > size:
        return 0.0
    drawn = math.lgamma(size + 1) - math.lgamma(size - wanted + 1)
    return min(1.0, math.exp(drawn - math.lgamma(num_vms + 1) + math.lgamma(num_vms - wanted + 1)))


def _at_most(num_vms: int, hosts: Sequence[int], mean_size: float) -> float:
    """The probability that a loss takes all of one of these sets of VMs is at most this."""

    def fatal(size: float) -> float:
        return min(1.0, sum(_all_of(number, size, num_vms) for number in hosts))

    return _mean(num_vms, mean_size, fatal, fatal)


# ---- sections that share some of their hosts ---------------------------------------------------------------


def _sparing_of_few(sets: Sequence[Set[str]], most: int) -> list[float]:
    """How many losses of 0, 1, ... `most` of the VMs in `sets` take all of none of the sets. Exact."""
    none: list[float] = [1, *[0] * most]  # whole numbers remain such
    return _sparing(sets, none, lose=lambda ways: [0, *ways[:-1]], keep=lambda ways: ways)


def _sparing_of_more(sets: Sequence[Set[str]], sizes: Sequence[float], num_vms: int) -> list[float]:
    """About how likely a loss of each of these sizes takes all of none of the sets, as if each VM were lost
    independently."""
    if not sizes:
        return []
    lost = [size / num_vms for size in sizes]
    kept = [1.0 - part for part in lost]
    return _sparing(
        sets,
        [1.0] * len(sizes),
        lose=lambda chances: [*map(mul, chances, lost)],
        keep=lambda chances: [*map(mul, chances, kept)],
    )


def _sparing(
    sets: Sequence[Set[str]],
    none: list[float],
    lose: Callable[[list[float]], list[float]],
    keep: Callable[[list[float]], list[float]],
) -> list[float]:
    """The sum over all losses that take all of none of the sets, of `none` changed by each VM that is lost or
    kept.

    The sets are gone through in order. What is lost is remembered only of VMs that later sets have as well:
    of sections in their order, those are few. It takes time in 2^`_width(sets)`.
    """
    last = {vm: place for place, one in enumerate(sets) for vm in one}
    found: dict[frozenset[str], list[float]] = {frozenset(): none}
    known = set[str]()
    for place, one in enumerate(sets):
        for vm in sorted(one - known):
            without = {lost: keep(numbers) for lost, numbers in found.items()}
            found = without | {lost | {vm}: lose(numbers) for lost, numbers in found.items()}
        known |= one
        over = {vm for vm in one if last[vm] == place}
        merged: dict[frozenset[str], list[float]] = {}
        for lost, numbers in found.items():
            if not one <= lost:
                before = merged.get(lost - over)
                merged[lost - over] = numbers if before is None else [*map(add, before, numbers)]
        found = merged
    (spared,) = found.values()
    return spared


def _width(sets: Sequence[Set[str]]) -> int:
    """The most VMs of which `_sparing` remembers at once whether they are lost."""
    last = {vm: place for place, one in enumerate(sets) for vm in one}
    first = {vm: place for place, one in reversed([*enumerate(sets)]) for vm in one}
    return max(sum(first[vm] <= place <= last[vm] for vm in last) for place in range(len(sets)))
