"""What rules read of both ledgers of strikes, and how they count in the one that is in memory."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace

from ..observations import Observations
from ..state import JobState
from ..timing import Timing
from .ledger import JOB, NONE, Ledger, Strikes, Subject, forgive_on_progress, strike
from .table import Kind, Progress, Row


class StrikesInDecision:
    """The strikes as they are while one event is decided: the part of `Context` about them."""

    state: JobState
    observations: Observations
    timing: Timing
    now: float

    def strikes(self, kind: Kind, subject: Subject = JOB) -> Strikes:
        """The strikes in a row; `NONE` once a step was made that forgives them."""
        ledger = self.state.strikes if self.row(kind).journalled else self.observations.strikes
        strikes, by_step = ledger.of(kind, subject), Progress.NEXT_STEP in self.row(kind).forgiven_by
        return NONE if by_step and self.observations.newest_step > strikes.step else strikes

    def row(self, kind: Kind) -> Row:
        """What follows from strikes of this kind."""
        return self.timing.strikes[kind]

    def is_reached(self, kind: Kind, subject: Subject = JOB) -> bool:
        """Whether there were as many strikes in a row as have a consequence."""
        return self.row(kind).is_reached(self.strikes(kind, subject).count)

    def is_paused(self, kind: Kind, subject: Subject = JOB) -> bool:
        """Whether the subject is left alone for now.

        A strike later than now, by a clock that was set back, counts from when this manager began.
        """
        strikes = self.strikes(kind, subject)
        since = strikes.since if strikes.since <= self.now else self.observations.started_at
        return self.now - since < self.row(kind).pause_s(strikes.count)

    def strike(
        self,
        kind: Kind,
        subject: Subject = JOB,
        *,
        by: Iterable[Hashable] = (),
    ) -> Strikes:
        """Count one more failure of a kind that is in memory only; returns the strikes in a row."""
        ledger, step = self.observations.strikes, self.observations.newest_step
        ledger = strike(ledger, kind, subject, self.now, by=by, step=step)
        self._note(ledger)
        return ledger.of(kind, subject)

    def forgive(self, progress: Progress, subjects: Collection[Subject]) -> None:
        """Forget the strikes in memory that `progress` of these subjects makes up for."""
        self._note(forgive_on_progress(self.observations.strikes, progress, subjects))

    def _note(self, ledger: Ledger) -> None:
        if ledger != self.observations.strikes:
            self.observations = replace(self.observations, strikes=ledger)
