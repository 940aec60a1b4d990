"""What happened to a job: its events, its steps, and both live."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from ..service.journal import StoredFact
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
PAGE = 1000  # entries in an answer
Limit = Annotated[int | None, Query(ge=1, le=PAGE)]  # None: pages, the oldest entries first
_PACKED_BYTES = 4096  # a smaller answer is one packet or two anyway
_LEVEL = 3  # of gzip; higher ones cost more time than they save


class FactView(BaseModel):
    """One entry of a job's history, as it was journalled."""

    sequence: int
    at: float
    fact: dict[str, Any]


class EventsView(BaseModel):
    """`next`: a number for `since` with which the entries after these are found; null: there are none."""

    events: list[FactView]
    next: int | None = None


class MetricsView(BaseModel):
    """`next`: a step for `since` with which the steps after these are found; null: there are none.

    With `points`, `num_steps` counts the steps of which these are some, and `num_skipped` those of them in
    which fp16 updated nothing.
    """

    metrics: list[StepView]
    next: int | None = None
    num_steps: int | None = None
    num_skipped: int | None = None


@router.get("/jobs/{job}/events", response_model=EventsView)
async def events(job: AskedJob, request: Request, since: Since = 0, limit: Limit = None) -> Response:
    """The job's history after sequence number `since`, a page of 1000 entries at most at a time (see `next`);
    with `limit`, the newest entries."""
    service = service_of(request)

    def read() -> EventsView:
        stored = service.journal.page_of_facts(job.job, since, limit or PAGE, newest=limit is not None)
        last = stored[-1].sequence if stored else None
        more = limit is None and last is not None and last < job.sequence
        return EventsView(events=_views(stored), next=last if more else None)

    return await from_journal(request, read)


@router.get("/jobs/{job}/metrics", response_model=MetricsView)
async def metrics(
    job: AskedJob,
    request: Request,
    since: Since = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    points: Annotated[int | None, Query(ge=2, le=5_000)] = None,
) -> Response:
    """Loss, gradient norm and time of each committed step after step `since`, `limit` steps at a time (see
    `next`). With `points`, about that many of all these steps: those with the least and the greatest loss of
    each stretch."""
    journal, state = service_of(request).journal, job.state

    def read() -> MetricsView:
        if points is None:
            rows = journal.page_of_metrics(job.job, since, limit)
            more = rows[-1].step if len(rows) == limit else None
            return MetricsView(metrics=[step_view(row) for row in surviving(state, rows)], next=more)
        some = journal.thinned_metrics(job.job, since, points)
        return MetricsView(
            metrics=[step_view(row) for row in surviving(state, some.rows)],
            num_steps=some.num_rows,
            num_skipped=some.num_skipped,
        )

    return await from_journal(request, read)


async def from_journal(request: Request, read: Callable[[], BaseModel]) -> Response:
    """Answer with what `read` returns; a thread calls it, writes the JSON and compresses it, since a history
    may be long."""
    packs = "gzip" in request.headers.get("Accept-Encoding", "")
    headers = {"Vary": "Accept-Encoding"}

    def written() -> bytes:
        data = read().model_dump_json().encode()
        if not packs or len(data) < _PACKED_BYTES:
            return data
        headers["Content-Encoding"] = "gzip"
        return gzip.compress(data, _LEVEL)

    data = await service_of(request).threads.run(CallKind.HISTORY, written)
    return Response(data, media_type="application/json", headers=headers)


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
                while missed := await service.threads.run(CallKind.HISTORY, _missed, service, job.job, sent):
                    for message in missed:
                        sent = int(message["id"])
                        yield message
            elif update.sequence is None:
                yield {"event": update.kind, "data": json.dumps(update.data)}
            elif update.sequence > sent:
                sent = update.sequence
                yield _message(FactView(sequence=sent, at=update.data["at"], fact=update.data))
            update = await subscription.next()


def _missed(service: Service, job: str, since: int) -> list[dict[str, str]]:
    """The first of the facts that a watcher has missed; empty: none."""
    page = service.journal.page_of_facts(job, since, PAGE, newest=False)
    return [_message(entry) for entry in _views(page)]


def _message(entry: FactView) -> dict[str, str]:
    """A fact as a server-sent event."""
    return {"event": "fact", "id": str(entry.sequence), "data": entry.model_dump_json()}


def _views(stored: Sequence[StoredFact]) -> list[FactView]:
    return [FactView(sequence=s.sequence, at=s.fact.at, fact=to_json(s.fact)) for s in stored]
