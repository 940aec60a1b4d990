"""What happened to a job: its events, its steps, and both live."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from ..service.pubsub import LiveUpdate, to_json
from ..service.runtime import Job
from ..service.service import Service
from ..service.tokens import Grant
from ..service.views.steps import StepView, step_view, surviving
from ..threads import CallKind
from .auth import User, service_of
from .description import answers
from .job_names import AskedJob

router = APIRouter(prefix="/api/v1", tags=["jobs"])

MOST = 2**53 - 1  # the largest number that every reader of JSON holds exactly; SQLite's are larger
Since = Annotated[int, Query(ge=0, le=MOST)]
Limit = Annotated[int | None, Query(ge=1, le=MOST)]  # None: all


class FactView(BaseModel):
    """One entry of a job's history, as it was journalled."""

    sequence: int
    at: float
    fact: dict[str, Any]


class EventsView(BaseModel):
    events: list[FactView]


class MetricsView(BaseModel):
    metrics: list[StepView]


@router.get("/jobs/{job}/events", response_model=EventsView)
async def events(job: AskedJob, request: Request, since: Since = 0, limit: Limit = None) -> Response:
    """The job's history after sequence number `since`, or the newest `limit` entries of that."""
    service = service_of(request)
    return await from_journal(service, lambda: EventsView(events=_facts(service, job.job, since, limit)))


@router.get("/jobs/{job}/metrics", response_model=MetricsView)
async def metrics(job: AskedJob, request: Request, since: Since = 0) -> Response:
    """Loss, gradient norm and time of each committed step after step `since`."""
    service, state = service_of(request), job.state

    def read() -> MetricsView:
        rows = surviving(state, service.journal.metrics(job.job, since))
        return MetricsView(metrics=[step_view(row) for row in rows])

    return await from_journal(service, read)


async def from_journal(service: Service, read: Callable[[], BaseModel]) -> Response:
    """Answer with what `read` returns; a thread calls it and writes the JSON, since a history may be long."""
    data = await service.threads.run(CallKind.HISTORY, lambda: read().model_dump_json().encode())
    return Response(data, media_type="application/json")


@router.get("/jobs/{job}/stream", response_class=Response, responses=answers("text/event-stream"))
@router.get("/jobs/{job}/events/stream", response_class=Response, responses=answers("text/event-stream"))
async def stream(
    job: AskedJob,
    request: Request,
    grant: User,
    last_event_id: Annotated[int | None, Header(ge=0, le=MOST)] = None,
) -> Response:
    """Server-sent events: `status` (the whole job), `step`, `fact`. Last-Event-ID resumes the facts."""
    updates = _updates(service_of(request), job, last_event_id, grant)
    return EventSourceResponse(updates, ping=15, headers={"Cache-Control": "no-store"})


async def _updates(
    service: Service, job: Job, after: int | None, grant: Grant
) -> AsyncIterator[dict[str, str]]:
    """Yield the current status, the facts since `after`, then live updates, while the token is valid."""
    with service.hub.subscribe(job.job, grant.token_id) as subscription:
        yield {"event": "status", "data": service.view(job).model_dump_json()}
        sent = job.sequence if after is None else after
        update: LiveUpdate | None = LiveUpdate("behind", {})
        while update is not None:
            if update.kind == "behind":
                for message in await service.threads.run(CallKind.HISTORY, _missed, service, job.job, sent):
                    sent = int(message["id"])
                    yield message
            elif update.sequence is None:
                yield {"event": update.kind, "data": json.dumps(update.data)}
            elif update.sequence > sent:
                sent = update.sequence
                yield _message(FactView(sequence=sent, at=update.data["at"], fact=update.data))
            update = await subscription.next()


def _missed(service: Service, job: str, since: int) -> list[dict[str, str]]:
    return [_message(entry) for entry in _facts(service, job, since)]


def _message(entry: FactView) -> dict[str, str]:
    """A fact as a server-sent event."""
    return {"event": "fact", "id": str(entry.sequence), "data": entry.model_dump_json()}


def _facts(service: Service, job: str, since: int, limit: int | None = None) -> list[FactView]:
    stored = service.journal.facts(job, since, limit)
    return [FactView(sequence=s.sequence, at=s.fact.at, fact=to_json(s.fact)) for s in stored]
