"""`GET /api/v1/jobs/{job}/decisions`: what was weighed for each change of plan, and what was not taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from ..core.alternatives import Alternative
from ..core.facts import GenerationPlanned
from ..service.journal import StoredFact
from ..threads import CallKind
from .auth import service_of
from .job_names import AskedJob

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class DecisionView(BaseModel):
    """A decision and its alternatives, the one taken first. `sequence`: the number of its event;
    `generation`: the one that was planned.

    Of each alternative: predicted seconds of a step, seconds until it steps beyond those that all take alike,
    losses for each second that take VMs which it uses, seconds that such a loss costs, and its worth in
    samples/s. They are null where `rejected` says why it was not looked at.
    """

    sequence: int
    at: float
    generation: int
    cause: str
    alternatives: tuple[Alternative, ...]


class DecisionsView(BaseModel):
    decisions: list[DecisionView]


@router.get("/jobs/{job}/decisions")
async def decisions(job: AskedJob, request: Request, since: Annotated[int, Query(ge=0)] = 0) -> DecisionsView:
    """What was weighed for each change of plan, oldest first, after sequence number `since`."""
    service = service_of(request)
    stored = await service.threads.run(CallKind.HISTORY, service.journal.facts, job.job, since)
    return DecisionsView(decisions=weighed_in(stored))


def weighed_in(history: Iterable[StoredFact]) -> list[DecisionView]:
    """The decisions of a history for which alternatives were weighed."""
    return [
        DecisionView(
            sequence=stored.sequence,
            at=fact.at,
            generation=fact.number,
            cause=fact.cause,
            alternatives=fact.alternatives,
        )
        for stored in history
        if isinstance(fact := stored.fact, GenerationPlanned) and fact.alternatives
    ]
