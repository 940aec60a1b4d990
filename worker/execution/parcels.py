"""A worker's partial sums of the step in flight, and what becomes of them when generations change.

Each is a **parcel**: a bucket's sum over a set of contributions (see `pipeline.contributions`). A worker
adds to one parcel of each bucket that it hosts. When a generation forms, members show their parcels, choose
alike which count (`morphing.in_flight`), send those whose holder is no host, and go on with what is missing.

A parcel that was sent stays with its sender, and lies beside the receiver's own, until each of the two knows
that every member has what it needs. So wherever a death falls, sets of what is held are equal, nested or
disjoint, and the next choice takes each contribution once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...morphing.in_flight import KeptParcel, Parcel, StepId, StepInFlight
from ...pipeline.contributions import WORD, Pairs, pair_hash

Bucket = tuple[int, ...]  # the sections that use its parameters


class Sum(Protocol):
    @property
    def size_bytes(self) -> int: ...

    def trim(self, pairs: Pairs, /) -> None:
        """Take out what forwards have added already, of contributions that are not in `pairs`."""
        ...

    def merge(self, other: Any, /) -> None:
        """Add another sum of the same bucket and scales to this one."""
        ...


S = TypeVar("S", bound=Sum)


@dataclass(slots=True)
class _Held(Generic[S]):
    pairs: Pairs
    total: S
    scales: str
    tally: int = 0
    is_torn: bool = False  # gradients are being added: should that fail, the sum is of no known set


class Parcels(Generic[S]):
    """The parcels of one worker, all of one attempt at one step."""

    def __init__(self) -> None:
        self.of: StepId | None = None
        self.missing: Mapping[Bucket, Pairs] = {}
        """Of each bucket of the model, what no worker held when the generation formed."""
        self._held: dict[Bucket, list[_Held[S]]] = {}
        self._shown: list[_Held[S]] = []
        self._received: list[_Held[S]] = []  # since the last `show`, beside what is held

    def begin(
        self,
        of: StepId,
        missing: Mapping[Bucket, Pairs],
        scales: Mapping[Bucket, str],
        empty: Mapping[Bucket, S],
    ) -> None:
        """Begin a step, or another attempt, with an empty sum for each bucket that this worker hosts."""
        self.of, self.missing = of, missing
        self._received = []
        self._held = {b: [_Held(Pairs.none(b), total, scales[b])] for b, total in empty.items()}

    def adds(self, bucket: Bucket, micro_batch: int, section: int) -> S | None:
        """The sum to which a backward of `section` adds its gradients of the bucket's parameters, and `added`
        must follow; None if that contribution is held already."""
        if (micro_batch, section) not in self.missing[bucket]:
            return None
        own = self._held[bucket][0]
        own.is_torn = True
        return own.total

    def added(self, micro_batch: int, section: int) -> None:
        """Note that the backward of `section` has added all its gradients. Nothing may fail in between."""
        pair = micro_batch, section
        for bucket, (own, *_) in self._held.items():
            if section in bucket and pair in self.missing[bucket]:
                own.pairs = own.pairs.with_pair(micro_batch, section)
                own.tally = (own.tally + pair_hash(micro_batch, section)) & WORD
                own.is_torn = False

    def sums(self) -> dict[Bucket, S]:
        """This worker's part of each bucket that it hosts."""
        return {bucket: held[0].total for bucket, held in self._held.items() if held}

    def tallies(self) -> dict[Bucket, int]:
        """`Pairs.tally` of this worker's part of each bucket that it hosts."""
        return {bucket: held[0].tally for bucket, held in self._held.items() if held}

    def make_room(self, size_bytes: float) -> int:
        """Drop parcels, those of the fewest contributions first, until so many bytes are free. Returns the
        number of contributions that are lost to this worker. As `show`, nothing is added until `settle`."""
        self._take_in_received()
        held = [(bucket, one) for bucket, of_bucket in self._held.items() for one in of_bucket]
        dropped: list[_Held[S]] = []
        for bucket, one in sorted(held, key=lambda each: len(each[1].pairs)):
            if sum(gone.total.size_bytes for gone in dropped) >= size_bytes:
                break
            self._held[bucket] = [other for other in self._held[bucket] if other is not one]
            dropped.append(one)
        return 0 if self.of is None else sum(len(one.pairs) for one in dropped)

    def show(self) -> list[Parcel]:
        """What this worker shows when a generation forms. Nothing is added until `settle`, or `begin`."""
        self._take_in_received()
        self._held = {bucket: [one for one in held if not one.is_torn] for bucket, held in self._held.items()}
        self._shown = [one for held in self._held.values() for one in held]
        of = self.of
        if of is None:
            return []
        for one in self._shown:
            one.total.trim(one.pairs)
        return [
            Parcel(of.step, of.branch, of.attempt, one.scales, one.pairs, one.tally) for one in self._shown
        ]

    def sum_of(self, number: int) -> S:
        """The sum of the parcel that was shown as `number`, to send it."""
        return self._shown[number].total

    def receive(self, kept: KeptParcel, total: S, shown: Parcel) -> None:
        """Lay a parcel that has been received completely beside the own one, if that is of the same step:
        what is held of another is void."""
        assert shown.pairs == kept.pairs
        if self.of != shown.of:
            self.of, self._held = shown.of, {}
        self._received.append(_Held(kept.pairs, total, shown.scales, shown.tally))

    def _take_in_received(self) -> None:
        for one in self._received:
            self._held.setdefault(one.pairs.sections, []).append(one)
        self._received = []

    def settle(
        self,
        rank: int,
        of: StepId,
        step: StepInFlight,
        scales: Mapping[Bucket, str],
        empty: Callable[[Bucket], S],
    ) -> None:
        """Go on with what counts, once every member is known to have what it needs.

        What does not count, or was sent, is dropped; what is left of a bucket becomes one sum. `scales`: of
        each bucket that this worker hosts; `empty` makes a sum with them.
        """
        stays = [self._shown[one.number] for one in step.kept if one.member == one.destination == rank]
        merged: dict[Bucket, list[_Held[S]]] = {bucket: [] for bucket in scales}
        for one in [*stays, *self._received]:
            merged[one.pairs.sections].append(one)
        self.of, self.missing, self._shown, self._received = of, step.missing, [], []
        self._held = {}
        for bucket, parts in merged.items():
            own = parts[0] if parts else _Held(Pairs.none(bucket), empty(bucket), scales[bucket])
            for other in parts[1:]:
                own.total.merge(other.total)
                own.pairs |= other.pairs
                own.tally = (own.tally + other.tally) & WORD
            self._held[bucket] = [own]

    def end(self) -> None:
        """The step is committed: nothing of it counts any more. The sums are there to begin another with."""
        self.of, self._shown, self._received = None, [], []

    def drop(self) -> None:
        """Drop everything: the state that the step continues from is gone, or memory is short."""
        self.of, self.missing, self._held, self._shown, self._received = None, {}, {}, [], []
