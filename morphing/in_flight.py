"""What of a step in flight survives a change of plan: which partial sums count, and what is missing.

Pure functions of what every member showed: each member computes the same result. A worker keeps its partial
sums of a step, its **parcels**, until the commit of that step. They are looked at only once the members have
agreed on the state that they continue from (`recovery.agree`): parcels of any other step or branch are void.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..pipeline.contributions import Pairs


@dataclass(frozen=True, slots=True)
class StepId:
    """A step in flight: `step` steps are committed before it; see `Parcel`."""

    step: int
    branch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """What a member shows of one partial sum: enough to know whether it can be added to another."""

    step: int
    """Number of steps committed before the one that it is of."""
    branch: int
    """The generation of the commit that the step continues from."""
    attempt: int
    scales: str
    """A hash of the scales of the bucket's fixed point and of the loss scale."""
    pairs: Pairs
    tally: int = 0
    """`Pairs.tally` with each contribution as often as it was added. It stays with the sum, so that the next
    commit's check sees what went wrong before (0 where nobody checks)."""

    @property
    def of(self) -> StepId:
        return StepId(self.step, self.branch, self.attempt)


def parcels_to_json(parcels: Sequence[Parcel]) -> dict[str, Any]:
    """As a JSON value, in which each distinct set of micro-batches stands once."""
    rows = list(dict.fromkeys(bits for parcel in parcels for bits in parcel.pairs.micro_batches))
    places = {bits: place for place, bits in enumerate(rows)}
    return {
        "rows": [f"{bits:x}" for bits in rows],
        "parcels": [
            [
                parcel.step,
                parcel.branch,
                parcel.attempt,
                parcel.scales,
                parcel.pairs.sections,
                [places[bits] for bits in parcel.pairs.micro_batches],
                parcel.tally,
            ]
            for parcel in parcels
        ],
    }


def parcels_from_json(value: Mapping[str, Any]) -> list[Parcel]:
    """The parcels that `parcels_to_json` wrote."""
    rows = [int(bits, 16) for bits in value["rows"]]
    return [
        Parcel(
            step,
            branch,
            attempt,
            scales,
            Pairs(tuple(sections), tuple(rows[place] for place in places)),
            tally,
        )
        for step, branch, attempt, scales, sections, places, tally in value["parcels"]
    ]


@dataclass(frozen=True, slots=True)
class KeptParcel:
    """Parcel `number` of those that `member` showed counts. `destination`: the host of its bucket that adds
    it to its own sum; the member itself if it is a host."""

    member: int
    number: int
    destination: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """The step that a new generation continues: for each bucket, the kept parcels are disjoint, and `missing`
    is the rest."""

    attempt: int
    kept: tuple[KeptParcel, ...]
    missing: Mapping[tuple[int, ...], Pairs]

    @property
    def moves(self) -> tuple[KeptParcel, ...]:
        """The parcels that are sent, in the order in which all members send and receive them."""
        return tuple(one for one in self.kept if one.member != one.destination)


def continue_step(
    shown: Sequence[Sequence[Parcel]],
    *,
    step: int,
    branch: int,
    hosts: Mapping[tuple[int, ...], Sequence[int]],
    num_micro_batches: int,
    room: Mapping[int, float] = {},
    sizes: Mapping[tuple[int, ...], int] = {},
) -> StepInFlight:
    """Choose what counts of the parcels that each member showed.

    `hosts`: of each bucket, by its sections, the members that will sum it. Parcels can be added only if their
    scales are the same; if holders' scales differ anywhere, nothing counts and the step begins again. Of each
    bucket the largest parcel counts first, then the next that is disjoint from those taken. Among equal ones
    those of hosts come first, which need not be sent, then lower ranks.

    `room`: bytes that a member may take, where that is bounded; `sizes`: of each bucket, those that a parcel
    takes. What no host has room for does not count.
    """
    current = [
        (member, number, parcel)
        for member, parcels in enumerate(shown)
        for number, parcel in enumerate(parcels)
        if _is_of(parcel, step, branch)
    ]
    whole = {sections: Pairs.all(sections, num_micro_batches) for sections in hosts}
    if not _compatible((parcel for _, _, parcel in current), whole):
        return StepInFlight(0, (), whole)
    kept: list[KeptParcel] = []
    missing = dict(whole)
    incoming: Counter[int] = Counter()
    left = dict(room)
    of_bucket: dict[tuple[int, ...], list[tuple[int, int, Parcel]]] = {sections: [] for sections in hosts}
    for one in current:
        of_bucket[one[2].pairs.sections].append(one)
    for sections, own_hosts in hosts.items():
        size = sizes.get(sections, 0)
        for member, number, parcel in _by_worth(of_bucket[sections], own_hosts):
            if not parcel.pairs or not _is_open(parcel.pairs, missing[sections]):
                continue
            destination = member
            if member not in own_hosts:
                takers = [host for host in own_hosts if left.get(host, math.inf) >= size]
                if not takers:
                    continue
                destination = min(takers, key=lambda host: (incoming[host], host))
                incoming[destination] += 1
                left[destination] = left.get(destination, math.inf) - size
            missing[sections] -= parcel.pairs
            kept.append(KeptParcel(member, number, destination, parcel.pairs))
    attempt = current[0][2].attempt if current else 0
    return StepInFlight(attempt, tuple(kept), missing)


def bringers(shown: Sequence[Iterable[int]], num_workers: int) -> dict[int, tuple[int, int]]:
    """{micro-batch whose piece of the loss is known: (a member that has it, the one that contributes it)}.

    `shown`: the micro-batches whose pieces each member has; the first `num_workers` members train. The lowest
    member that has a piece contributes it; instead of one that does not train, rank 0.
    """
    found: dict[int, tuple[int, int]] = {}
    for member, micro_batches in enumerate(shown):
        for micro_batch in micro_batches:
            found.setdefault(micro_batch, (member, member if member < num_workers else 0))
    return found


def _is_of(parcel: Parcel, step: int, branch: int) -> bool:
    return (parcel.step, parcel.branch) == (step, branch)


def _is_open(pairs: Pairs, missing: Pairs) -> bool:
    """Whether no parcel taken before holds any of `pairs`."""
    return pairs <= missing


def _compatible(parcels: Iterable[Parcel], buckets: Iterable[tuple[int, ...]]) -> bool:
    """Whether all are of one attempt and, bucket by bucket, of the same scales.

    The scales of an attempt after the first are known only from its parcels, so each bucket must have one.
    """
    scales: dict[tuple[int, ...], str] = {}
    attempts: set[int] = set()
    for parcel in parcels:
        attempts.add(parcel.attempt)
        if scales.setdefault(parcel.pairs.sections, parcel.scales) != parcel.scales:
            return False
    return attempts <= {0} or (len(attempts) == 1 and set(buckets) <= set(scales))


def _by_worth(
    parcels: Iterable[tuple[int, int, Parcel]], hosts: Sequence[int]
) -> list[tuple[int, int, Parcel]]:
    return sorted(parcels, key=lambda one: (-len(one[2].pairs), one[0] not in hosts, one[0], one[1]))
