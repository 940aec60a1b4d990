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

from .strike_table import TABLE, Kind, Progress, Row

Subject = str | frozenset[str]
JOB: Subject = ""
"""The subject of kinds that are about the job as a whole."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """Strikes of one kind at one subject, in a row: without progress in between."""

    count: int = 0
    since: float = 0.0  # when the newest failure came: the pause begins
    step: int = -1  # the job's newest step at that time
    by: frozenset[Hashable] = frozenset()  # those that failed together in the newest strike
    why: str = ""  # the newest failure's own words

    def until(self, row: Row) -> float:
        """When the pause is over."""
        return self.since + row.pause_s(self.count)

    def includes(self, failure: Strikes, row: Row, began: float | None) -> bool:
        """Whether `failure` is part of the newest of these strikes.

        By its kind it is if it was under way (`began`) when that came, since nothing was tried in between; if
        it is the same one's, seen again; or if it comes shortly after it and is of others, since one that
        fails again has been tried again.
        """
        if self == NONE:
            return False
        if row.seen_again:
            return bool(self.by & failure.by)
        if row.under_way:
            return began is not None and began < self.since <= failure.since
        is_near = 0 <= failure.since - self.since < row.together_s
        return is_near and not self.by & failure.by


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
    why: str = "",
) -> Ledger:
    """The ledger with one more failure at `at`.

    `by`: who failed; `began`: when that which failed was begun, for kinds in which it matters; `step`: the
    job's newest step.
    """
    row = TABLE[kind]
    failure = Strikes(1, at, step, frozenset(by), why)
    if Progress.NEXT_STEP in row.forgiven_by and any(step > it.step for it in ledger.all(kind).values()):
        ledger = _without(ledger, {kind}, None)
    if at - ledger.of(kind, subject).since > row.forgotten_s:
        ledger = _without(ledger, {kind}, {subject})
    candidates = ledger.all(kind) if row.joint else {subject: ledger.of(kind, subject)}
    newest = max(candidates, key=lambda it: candidates[it].since, default=subject)
    count = ledger.count(kind, subject)
    if not ledger.of(kind, newest).includes(failure, row, began):
        return _with(ledger, kind, subject, replace(failure, count=count + 1))
    before = ledger.of(kind, newest)
    together = replace(failure, count=before.count, by=before.by | failure.by)
    ledger = _with(ledger, kind, newest, together)
    return ledger if newest == subject else _with(ledger, kind, subject, replace(together, count=count))


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
