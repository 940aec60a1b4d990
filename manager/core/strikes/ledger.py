"""The ledger of failures: how often something failed since it last worked, and for how long it rests.

A *strike* is a failure of one kind at one subject: a VM, a place, two workers, the job. Failures that come
together are one strike. Progress forgives; which, the kind's row in the `TABLE` says, as it says how long
the subject is left alone after each strike and how many strikes have a consequence.

`JobState.strikes` is folded from journalled facts, `Observations.strikes` is in memory only.
Rules read `Context.strikes`, `is_paused` and `is_reached`; they count nothing themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .table import TABLE, Kind, Progress, Row

Subject = str | frozenset[str]
JOB: Subject = ""
"""The subject of kinds that are about the job as a whole."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """Strikes of one kind at one subject, in a row: without progress in between."""

    count: int = 0
    since: float = 0.0  # when the newest failure came: the pause begins
    first_at: float = 0.0  # when the first failure of the newest strike came
    step: int = -1  # the job's newest step at that time
    by: frozenset[Hashable] = frozenset()  # those that failed together in the newest strike
    why: str = ""  # the newest failure's own words
    generation: int = -1  # the newest that was open at the newest strike, where that matters
    numbers: frozenset[int] = frozenset()  # of a joint kind: which of the strikes of all subjects these are

    def until(self, row: Row) -> float:
        """When the pause is over."""
        return self.since + row.pause_s(self.count)

    def includes(self, failure: Strikes, row: Row, began: float | None) -> bool:
        """Whether `failure` is part of the newest of these strikes.

        By its kind it is if it was under way (`began`) when that came, since nothing was tried in between; if
        it is the same one's, seen again; or if it comes shortly after the first of these, in the same
        generation, and is of others that had begun by then, since one that fails again, or began later, is
        another try.
        """
        if self == NONE:
            return False
        if row.seen_again:
            return bool(self.by & failure.by)
        if row.under_way:
            return began is not None and began < self.since <= failure.since
        is_near = 0 <= failure.since - self.first_at < row.together_s
        is_another_try = began is not None and began > self.first_at
        is_same = self.generation == failure.generation and not self.by & failure.by
        return is_near and is_same and not is_another_try


NONE = Strikes()


@dataclass(frozen=True, slots=True)
class Ledger:
    """The strikes of all kinds. Immutable."""

    strikes: Mapping[tuple[Kind, Subject], Strikes] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, kind: Kind, subject: Subject = JOB) -> Strikes:
        """The strikes at this subject; `NONE` without any."""
        return self.strikes.get((kind, subject), NONE)

    def count(self, kind: Kind, subject: Subject = JOB) -> int:
        """How many strikes in a row."""
        return self.of(kind, subject).count

    def total(self, kind: Kind) -> int:
        """How many strikes of a joint kind all subjects have, each that several share counted once."""
        return len(self._numbers(kind))

    def _numbers(self, kind: Kind) -> frozenset[int]:
        return frozenset[int]().union(*(found.numbers for found in self.all(kind).values()))

    def next_number(self, kind: Kind) -> int:
        """The number of the next strike of a joint kind."""
        return max(self._numbers(kind), default=0) + 1

    def all(self, kind: Kind) -> Mapping[Subject, Strikes]:
        """The strikes of a kind by subject, in the order in which each was first struck."""
        return {subject: found for (of, subject), found in self.strikes.items() if of is kind}


def strike(
    ledger: Ledger,
    kind: Kind,
    subject: Subject,
    at: float,
    *,
    by: Iterable[Hashable] = (),
    began: float | None = None,
    step: int = -1,
    generation: int = -1,
    why: str = "",
) -> Ledger:
    """The ledger with one more failure at `at`.

    `by`: who failed; `began`: when that which failed was begun, for kinds in which it matters; `step`: the
    job's newest step; `generation`: the newest that was opened, for failures of trainers.
    """
    row = TABLE[kind]
    if Progress.NEXT_STEP in row.forgiven_by:
        known = [it.step for it in ledger.all(kind).values()]
        if any(step > it for it in known):
            ledger = _without(ledger, {kind}, None)
        step = max([step, *known])  # a manager that has just begun may know of fewer steps
    failure = Strikes(1, at, at, step, frozenset(by), why, generation)
    if at - ledger.of(kind, subject).since > row.forgotten_s:
        ledger = _without(ledger, {kind}, {subject})
    candidates = ledger.all(kind) if row.joint else {subject: ledger.of(kind, subject)}
    newest = max(candidates, key=lambda it: candidates[it].since, default=subject)
    own, before = ledger.of(kind, subject), ledger.of(kind, newest)
    if not before.includes(failure, row, began):
        numbers = own.numbers | {ledger.next_number(kind)} if row.joint else own.numbers
        return _with(ledger, kind, subject, replace(failure, count=own.count + 1, numbers=numbers))
    together = replace(before, since=at, step=step, by=before.by | failure.by, why=why)
    ledger = _with(ledger, kind, newest, together)
    if newest == subject:
        return ledger
    shared = own.numbers | {max(before.numbers)}
    return _with(ledger, kind, subject, replace(together, count=len(shared), numbers=shared))


def forgive_on_progress(
    ledger: Ledger, progress: Progress, subjects: Collection[Subject] | None = None
) -> Ledger:
    """The ledger without what `progress` forgives: at these subjects, or (None) at all."""
    return _without(ledger, _FORGIVEN[progress], subjects)


_FORGIVEN = {
    progress: frozenset(kind for kind, row in TABLE.items() if progress in row.forgiven_by)
    for progress in Progress
}


def _with(ledger: Ledger, kind: Kind, subject: Subject, strikes: Strikes) -> Ledger:
    return Ledger(MappingProxyType({**ledger.strikes, (kind, subject): strikes}))


def _without(ledger: Ledger, kinds: Collection[Kind], subjects: Collection[Subject] | None) -> Ledger:
    kept = {
        (kind, subject): strikes
        for (kind, subject), strikes in ledger.strikes.items()
        if kind not in kinds or (subjects is not None and subject not in subjects)
    }
    return Ledger(MappingProxyType(kept)) if len(kept) < len(ledger.strikes) else ledger
