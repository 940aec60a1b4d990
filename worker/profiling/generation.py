"""A generation of kind `profile` as one of its members lives it: what is left is measured, each its share.

Nobody needs orders on the way: shares follow from the survey, from what is known and from the list of
members. What a member has measured it keeps, and brings to the next generation if this one comes to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...protocol.messages import Profile
from ...protocol.survey import SectionRow, Survey
from ...simulator.calibration.assembly import done_in
from ..execution.communicator import Communicator
from .probe import ProbedLinks, probe
from .profiling import SURVEY_S, begin, conclude
from .shares import SHARE_S, section_time_s, shares
from .subject import Subject

OnProgress = Callable[[str, int, int], None]
"""Is called with the stage, how many sections this worker has measured itself, and how many there are."""


@dataclass
class MeasuredSoFar:
    """What a worker knows of the model's measurements, from generation to generation."""

    survey: Survey | None = None
    surveyed_at: float = 0.0  # by the monotonic clock: when this worker first knew the survey
    rows: dict[tuple[int, int], SectionRow] = field(default_factory=dict[tuple[int, int], SectionRow])
    own: int = 0  # sections that it has measured itself

    def take(self, survey: Survey) -> None:
        """Go on from this survey; rows of another one are of other cuts, perhaps."""
        if survey != self.survey:
            self.survey, self.surveyed_at = survey, time.monotonic()
            self.rows.clear()
            self.own = 0

    @property
    def all_rows(self) -> list[SectionRow]:
        return [*(self.survey.rows if self.survey is not None else ()), *self.rows.values()]

    def to_json(self) -> dict[str, Any]:
        survey = self.survey.model_dump(mode="json") if self.survey is not None else None
        return {"survey": survey, "rows": [row.model_dump(mode="json") for row in self.rows.values()]}


def measure_together(
    comm: Communicator,
    subject: Subject,
    known: MeasuredSoFar,
    on_progress: OnProgress,
    *,
    measuring_s: float,
    probe_s: float,
) -> Profile | None:
    """Measure with all members; rank 0 gets what was found, the others nothing.

    After `measuring_s` seconds, sections of an m that can be missed are not begun any more. Raises
    `Interrupted`, also where links are not measured within `probe_s`, and what is wrong with the user's code.
    """
    comm.rendezvous()
    _exchange(comm, known, "held")
    comm.introduce()
    comm.link([rank for rank in range(len(comm.members)) if rank != comm.rank])
    if known.survey is None:
        stored = _survey(comm, subject, known)
        if known.survey is None:
            return stored
    survey = known.survey
    total = sum(len(layout.cuts) + 1 for layout in survey.layouts)
    on_progress("sections", known.own, total)
    _measure_share(
        comm, subject, known, survey, measuring_s, lambda: on_progress("sections", known.own, total)
    )
    _exchange(comm, known, "rows")
    found = ProbedLinks()
    if len(comm.members) > 1:
        on_progress("links", known.own, total)
        found = comm.run(
            lambda store, open_group: probe(store, open_group, comm.rank, comm.members),
            probe_s,
            "the measuring of links is",
        )
    return conclude(subject, survey, list(known.rows.values()), found) if comm.rank == 0 else None


def _exchange(comm: Communicator, known: MeasuredSoFar, name: str) -> None:
    """Every member knows then what any of them does; of several surveys the lowest rank's is gone on from."""
    told = comm.gather(name, known.to_json())
    chosen = next((each["survey"] for each in told if each["survey"] is not None), None)
    if chosen is None:
        return
    known.take(Survey.model_validate(chosen))
    for each in told:
        if each["survey"] == chosen:
            rows = [SectionRow.model_validate(row) for row in each["rows"]]
            known.rows |= {(row.microbatch_size, row.section): row for row in rows}


def _survey(comm: Communicator, subject: Subject, known: MeasuredSoFar) -> Profile | None:
    """Rank 0 looks at the model for all; or finds a profile in the store, and then there is no survey."""
    stored, mine = None, None
    if comm.rank == 0:
        found = begin(subject, seconds=SURVEY_S)
        if isinstance(found, Profile):
            stored = found
        else:
            mine = found.model_dump(mode="json")
            known.take(found)
            known.own = len(found.rows)
    [survey, *_] = comm.gather("survey", mine)
    if survey is not None:
        known.take(Survey.model_validate(survey))
    return stored


def _measure_share(
    comm: Communicator,
    subject: Subject,
    known: MeasuredSoFar,
    survey: Survey,
    measuring_s: float,
    on_measured: Callable[[], None],
) -> None:
    num_members, done = len(comm.members), done_in(known.all_rows)
    mine = shares(survey, done, num_members)[comm.rank :: num_members]
    section_s = section_time_s(SHARE_S, sum(len(share.sections) for share in mine))
    layouts = {layout.microbatch_size: layout for layout in survey.layouts}
    for share in mine:
        m = share.microbatch_size
        for section in share.sections:
            late = time.monotonic() - known.surveyed_at > measuring_s
            if late and m != survey.recipe.microbatch_size:
                break
            comm.interrupt.check()
            subject.cut_exactly(layouts[m])
            known.rows[m, section] = subject.measure(section, section_s)
            known.own += 1
            comm.progress.operations += 1
            on_measured()
