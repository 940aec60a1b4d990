"""Quarantine: sets aside a job that the manager cannot decide about; all other jobs go on.

Its VMs and its training continue with the orders that they have. Observations are dropped, since rules are
level-triggered; results of commands are held until they can be decided on. The job is resumed as after a
restart, after a delay that doubles with each failure. `makara stop` works meanwhile.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass

from ..core import apply
from ..core.state import JobState
from .journal import StoredFact
from .journal_text import Unreadable

STATUS = "quarantined"


class Quarantined(Exception):
    """The job is set aside, so the event was not decided on; the message is the quarantine's reason."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a job is set aside. `retry_at` None: some facts cannot be read, so only a restart tries again."""

    error: str
    traceback: str
    since: float  # Unix seconds
    retry_at: float | None = None

    @property
    def readable(self) -> bool:
        """Whether all of the job's facts could be read."""
        return self.retry_at is not None

    @property
    def reason(self) -> str:
        """For people: what happened and what can be done."""
        next_try = "the manager tries again by itself" if self.readable else "a restart tries again"
        return (
            f"the manager cannot decide about this job: {self.error}; its VMs go on, {next_try}, "
            "and `makara stop` releases them"
        )


def quarantine_for(error: Exception, now: float, retry_at: float | None) -> Quarantine:
    """The quarantine for `error`, with the text to show."""
    text = "".join(traceback.format_exception(error))
    return Quarantine(f"{type(error).__name__}: {error}", text, now, retry_at)


def fold_readable(stored: Iterable[StoredFact]) -> tuple[JobState, Quarantine | None]:
    """(the fold of the readable facts, a quarantine if some are not readable)."""
    state, found = JobState(), None
    for sequence, fact in stored:
        try:
            if isinstance(fact, Unreadable):
                raise ValueError(fact.error)
            state = apply(state, fact)
        except Exception as error:
            fault = ValueError(f"fact {sequence} of its journal cannot be read: {error}")
            found = found or quarantine_for(fault, fact.at, None)
    return state, found
