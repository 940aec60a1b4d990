"""`GET /api/v1/jobs/{job}/decisions`: what was weighed for each decision, and what was not taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ..core.alternatives import Alternative
from ..core.facts import GenerationPlanned, GrowthWeighed, PlanKept
from ..service.journal import StoredFact
from .auth import service_of
from .history import PAGE, Limit, Since, from_journal
from .job_names import AskedJob

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class DecisionView(BaseModel):
    """A decision and its alternatives, the one taken first. `sequence`: the number of its event;
    `generation`: the one that was planned, or goes on. `decided`: that it is `planned`, or `kept`;
    `growth`: how many VMs more are asked for.

    Of each alternative: predicted seconds of a step, seconds until it steps beyond those that all take alike,
    losses for each second that take VMs which it uses, seconds that such a loss costs, and its worth in
    samples/s. They are null where `rejected` says why it was not looked at.
    """

    sequence: int
    at: float
    decided: Literal["planned", "kept", "growth"]
    generation: int | None
    cause: str
    alternatives: tuple[Alternative, ...]


class DecisionsView(BaseModel):
    """`next`: a number for `since` with which later decisions are found; null: there are none."""

    next: int | None = None
    decisions: list[DecisionView]


@router.get("/jobs/{job}/decisions", response_model=DecisionsView)
async def decisions(job: AskedJob, request: Request, since: Since = 0, limit: Limit = None) -> Response:
    """What was weighed for each decision, oldest first, after sequence number `since`, a page at a time (see
    `next`); or for the newest `limit` of those decisions."""
    journal = service_of(request).journal

    def read() -> DecisionsView:
        found: deque[DecisionView] = deque(maxlen=limit)
        after: int | None = since
        while after is not None:
            page = journal.page_of_facts(job.job, after, PAGE, newest=False)
            after = page[-1].sequence if page and page[-1].sequence < job.sequence else None
            found.extend(weighed_in(page))
            if limit is None and found:
                break
        return DecisionsView(decisions=list(found), next=after)

    return await from_journal(request, read)


def weighed_in(history: Iterable[StoredFact]) -> list[DecisionView]:
    """The decisions of a history for which alternatives were weighed."""
    return [view for stored in history if (view := _decision(stored)) is not None and view.alternatives]


def _decision(stored: StoredFact) -> DecisionView | None:
    match fact := stored.fact:
        case GenerationPlanned():
            decided, generation, cause = "planned", fact.number, fact.cause
        case PlanKept():
            decided, generation, cause = "kept", fact.generation, fact.cause
        case GrowthWeighed():
            decided, generation, cause = "growth", None, "more VMs"
        case _:
            return None
    return DecisionView(
        sequence=stored.sequence,
        at=fact.at,
        decided=decided,
        generation=generation,
        cause=cause,
        alternatives=fact.alternatives,
    )
