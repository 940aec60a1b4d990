"""`GET /api/v1/jobs/{job}/decisions`: what was weighed for each decision, and what was not taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ..core.alternatives import Alternative
from ..core.facts import GenerationPlanned, GrowthWeighed, PlanKept
from ..service.journal import StoredFact
from .auth import service_of
from .history import Limit, Since, from_journal
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
    decisions: list[DecisionView]


@router.get("/jobs/{job}/decisions", response_model=DecisionsView)
async def decisions(job: AskedJob, request: Request, since: Since = 0, limit: Limit = None) -> Response:
    """What was weighed for each decision, oldest first, after sequence number `since`; or for the newest
    `limit` of those decisions."""
    service = service_of(request)

    def read() -> DecisionsView:
        found = weighed_in(service.journal.facts(job.job, since))
        return DecisionsView(decisions=found if limit is None else found[-limit:])

    return await from_journal(service, read)


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
