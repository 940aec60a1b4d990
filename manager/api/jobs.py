"""The REST resources under /api/v1 that users and their programs work with."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Form, Header, HTTPException, Query, Request, Response, UploadFile
from pydantic import BaseModel, Field
from sse_starlette import EventSourceResponse

from ...protocol.log_tail import tail
from ...protocol.messages import CheckpointRef
from ..core.facts import Resumption
from ..providers import ProviderError
from ..providers.local import FaultKind, LocalProvider
from ..service.costs.quote import Quote
from ..service.costs.views import Costs
from ..service.pubsub import Subscription
from ..service.runtime import Job
from ..service.service import Service
from ..service.tokens import Grant
from ..service.views import JobView, StepView, VmView, job_view, step_view, surviving, to_json, vm_view
from ..threads import CallKind
from .auth import Admin, User, service_of
from .before_renting import MachineType
from .continuing import go_on, is_going_on
from .exporting import ExportView, export_now
from .job_names import AskedJob
from .query import MOST, Limit, Since
from .starting import StartView
from .submission import Submission, accept, check_settings

router = APIRouter(prefix="/api/v1", tags=["jobs"])
_LOG_TAIL_BYTES = 256 * 1024  # of one log
_LOGS_BYTES = 8 << 20  # of all logs in one answer


class SubmittedJob(BaseModel):
    """The job created by a submission."""

    job: str
    new: bool


class Accepted(BaseModel):
    """The largest code bundle accepted, what the job starts from (None: step 0), the types of VM that it may
    rent, and their price (None: it rents nothing, or was submitted before)."""

    packed_bytes: int
    unpacked_bytes: int
    files: int
    start: StartView | None
    machines: list[MachineType]
    quote: Quote | None


class FactView(BaseModel):
    """One entry of a job's history, as it was journalled."""

    sequence: int
    at: float
    fact: dict[str, Any]


class JobsView(BaseModel):
    jobs: list[JobView]


class EventsView(BaseModel):
    events: list[FactView]


class MetricsView(BaseModel):
    metrics: list[StepView]


class VmsView(BaseModel):
    vms: list[VmView]


class CheckpointsView(BaseModel):
    checkpoints: list[CheckpointRef]


class LogsView(BaseModel):
    """The ends of log files, by `<vm>/<file>`."""

    logs: dict[str, str]


class Capacity(BaseModel):
    """How many local VMs may live at a time; None is any number."""

    vms: int | None = Field(ge=0)


class Fault(BaseModel):
    """What to do to a local VM; `deadline_s` is for a notice."""

    kind: FaultKind
    deadline_s: float = Field(default=5.0, ge=0.0, le=3600.0)


class Answer(BaseModel):
    """`again`: the cause is fixed; `from_head`: from what the head lists; `restart`: from step 0.

    The other fields are for a job that was stopped or failed, which continues with `again`: the values of the
    secrets that its job file names, and new numbers of VMs and caps in USD. `budget` is for its whole life,
    including what it has cost.
    """

    how: Resumption = Resumption.AGAIN
    secrets: dict[str, str] = Field(default_factory=dict)
    min_nodes: int | None = None
    max_nodes: int | None = None
    max_hourly_cost: float | None = None
    budget: float | None = None

    @property
    def changes(self) -> dict[str, float]:
        """The changes of the job's `resources`."""
        return self.model_dump(exclude={"how", "secrets"}, exclude_none=True)


class Wanted(BaseModel):
    """`step` of the checkpoint (None: the newest); `secrets`: for an ended job, the keys of its store."""

    step: int | None = Field(default=None, ge=0)
    secrets: dict[str, str] = Field(default_factory=dict)


@router.post("/jobs", status_code=201)
async def submit(
    request: Request,
    response: Response,
    _: User,
    spec: Annotated[str, Form(max_length=1 << 20)],
    bundle: UploadFile,
    secrets: Annotated[str, Form(max_length=1 << 20)] = "{}",
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> SubmittedJob:
    """Submit a job: the job file as JSON, its code as tar.gz. 201: it is durable; 422 lists faults."""
    service = service_of(request)
    data = await bundle.read(service.config.max_bundle_bytes + 1)
    if len(data) > service.config.max_bundle_bytes:
        raise HTTPException(413, f"bundle: more than {service.config.max_bundle_bytes} bytes")
    job, new = await accept(service, Submission(spec, data, secrets, idempotency_key))
    response.headers["Location"] = f"/api/v1/jobs/{job}"
    if not new:
        response.status_code = 200
    return SubmittedJob(job=job, new=new)


@router.post("/jobs/check")
async def check(
    request: Request,
    _: User,
    spec: Annotated[str, Form(max_length=1 << 20)],
    secrets: Annotated[str, Form(max_length=1 << 20)] = "{}",
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Accepted:
    """Check whether a job would be accepted, except for its code, and return the limit on its size. Tries its
    store; stores no job. 422: faults."""
    service = service_of(request)
    preview = await check_settings(service, spec, secrets, idempotency_key)
    bounds = service.config.bundle_bounds
    return Accepted(
        packed_bytes=service.config.max_bundle_bytes,
        unpacked_bytes=bounds.unpacked_bytes,
        files=bounds.members,
        start=preview.start,
        machines=list(preview.machines),
        quote=preview.quote,
    )


@router.get("/jobs")
async def jobs(request: Request, _: User) -> JobsView:
    """All jobs, newest first."""
    service = service_of(request)
    views = [_view(service, job) for job in service.jobs.values() if job.submitted]
    return JobsView(jobs=views[::-1])


@router.get("/jobs/{job}")
async def job(job: AskedJob, request: Request) -> JobView:
    """One job, by its id or its name: status, progress, plan, morphs, checkpoints, VMs."""
    return _view(service_of(request), job)


@router.post("/jobs/{job}/stop", status_code=202)
async def stop(job: AskedJob, request: Request) -> JobView:
    """Stop a job: it publishes a checkpoint and releases its VMs. Idempotent."""
    service = service_of(request)
    await service.stop(job.job)
    return _view(service, job)


@router.post("/jobs/{job}/resume", status_code=202)
async def resume(job: AskedJob, body: Answer, request: Request) -> JobView:
    """Continue a job that was stopped or failed, or answer one that waits for a person with one of its
    `waiting.offers`. Idempotent. 409: the job can do neither."""
    service = service_of(request)
    if await is_going_on(service, job, body.how, body.secrets, body.changes):
        return _view(service, job)
    waiting = job.state.waiting
    if waiting is None or job.state.ended is not None:
        if body.how is not Resumption.AGAIN:
            why = f"how: job {job.job} does not wait for you: it goes on from its newest checkpoint (`again`)"
            raise HTTPException(409, why)
        await go_on(service, job, body.secrets, body.changes)
        return _view(service, job)
    if body.secrets or body.changes:
        what = "secrets, numbers of VMs and caps are for a job that was stopped or failed"
        raise HTTPException(409, f"{what}; job {job.job} waits for you with those that it has")
    if not await service.resume(job.job, body.how):
        offers = ", ".join(waiting.offers)
        why = f"how: job {job.job}: it cannot go on by {body.how.value}; it offers {offers}"
        raise HTTPException(409, why)
    return _view(service, job)


@router.post("/jobs/{job}/export")
async def export(job: AskedJob, body: Wanted, request: Request) -> ExportView:
    """Export the weights of a published checkpoint; answers when done. Idempotent."""
    if job.state.spec is None:
        raise HTTPException(409, f"job {job.job}: not all of its history can be read")
    return await export_now(service_of(request), job, body.step, body.secrets)


@router.get("/jobs/{job}/events", response_model=EventsView)
async def events(job: AskedJob, request: Request, since: Since = 0, limit: Limit = None) -> Response:
    """The job's history after sequence number `since`, or the newest `limit` entries of that."""
    service = service_of(request)

    def read() -> bytes:
        return EventsView(events=_history(service, job.job, since, limit)).model_dump_json().encode()

    return Response(await service.threads.run(CallKind.HISTORY, read), media_type="application/json")


@router.get("/jobs/{job}/metrics", response_model=MetricsView)
async def metrics(job: AskedJob, request: Request, since: Since = 0) -> Response:
    """Loss, gradient norm and time of each committed step after step `since`."""
    service, state = service_of(request), job.state

    def read() -> bytes:
        rows = surviving(state, service.journal.metrics(job.job, since))
        return MetricsView(metrics=[step_view(row) for row in rows]).model_dump_json().encode()

    return Response(await service.threads.run(CallKind.HISTORY, read), media_type="application/json")


@router.get("/jobs/{job}/calibration")
async def calibration(job: AskedJob) -> dict[str, Any]:
    """The measurements of the job's model (`simulator.Measurements`, or a single calibration)."""
    if job.state.calibration is None:
        raise HTTPException(404, f"calibration: job {job.job} has not been measured yet")
    return dict(job.state.measurements or job.state.calibration)


@router.get("/jobs/{job}/vms")
async def vms(
    job: AskedJob,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=MOST)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> VmsView:
    """All VMs that the job ever requested, in order; `limit` of them from `offset` on."""
    names = islice(job.state.vms, offset, offset + limit)
    costs = Costs(job, service_of(request).clock())
    return VmsView(vms=[vm_view(job, job.state.vms[name], costs) for name in names])


@router.get("/jobs/{job}/checkpoints")
async def checkpoints(job: AskedJob) -> CheckpointsView:
    """The published checkpoints, newest first."""
    return CheckpointsView(checkpoints=list(reversed(job.state.published)))


@router.get("/jobs/{job}/logs")
async def logs(job: AskedJob, request: Request, vm: str | None = None) -> LogsView:
    """The ends of the log files of a job's local VMs, by `<vm>/<file>`."""
    service, known = service_of(request), job.state.vms
    if vm is not None and vm not in known:
        raise HTTPException(404, f"vm: job {job.job} has no VM {vm!r}")
    folders = [service.vm_directory(name) for name in ([vm] if vm is not None else known)]
    return LogsView(logs=await service.threads.run(CallKind.FILES, _tails, folders))


@router.get("/jobs/{job}/stream")
@router.get("/jobs/{job}/events/stream")
async def stream(
    job: AskedJob,
    request: Request,
    grant: User,
    last_event_id: Annotated[int | None, Header(ge=0, le=MOST)] = None,
) -> Response:
    """Server-sent events: `status` (the whole job), `step`, `fact`. Last-Event-ID resumes the facts."""
    updates = _updates(service_of(request), job, last_event_id, grant)
    return EventSourceResponse(updates, ping=15, headers={"Cache-Control": "no-store"})


@router.post("/vms/{vm}/fault", status_code=202)
async def fault(vm: str, body: Fault, request: Request, _: Admin) -> dict[str, str]:
    """Inject a fault into a local VM, for demonstrations and tests. Admin token only."""
    service = service_of(request)
    try:
        await service.threads.run(CallKind.FILES, _local(service).inject, vm, body.kind, body.deadline_s)
    except ProviderError as error:
        raise HTTPException(404, f"vm: {error}") from error
    return {"vm": vm, "kind": body.kind}


@router.post("/providers/local/capacity", status_code=202)
async def capacity(body: Capacity, request: Request, _: Admin) -> Capacity:
    """Set how many VMs the local provider offers from now on; living VMs stay. Admin token only."""
    _local(service_of(request)).set_capacity(body.vms)
    return body


def _local(service: Service) -> LocalProvider:
    provider = service.providers.get("local")
    if not isinstance(provider, LocalProvider):
        raise HTTPException(409, "providers: this manager has no local provider")
    return provider


def _view(service: Service, runtime: Job) -> JobView:
    return job_view(runtime, service.effects.trouble.get(runtime.job, {}), service.clock())


def _history(service: Service, job: str, since: int, limit: int | None = None) -> list[FactView]:
    """Blocking: a history may be long."""
    stored = service.journal.facts(job, since, limit)
    return [FactView(sequence=s.sequence, at=s.fact.at, fact=to_json(s.fact)) for s in stored]


async def _missed(service: Service, job: str, since: int) -> list[dict[str, str]]:
    """The facts after `since`, as server-sent events."""

    def read() -> list[dict[str, str]]:
        return [_sent_fact("fact", entry) for entry in _history(service, job, since)]

    return await service.threads.run(CallKind.HISTORY, read)


def _sent_fact(kind: str, entry: FactView) -> dict[str, str]:
    return {"event": kind, "id": str(entry.sequence), "data": entry.model_dump_json()}


async def _updates(
    service: Service, runtime: Job, after: int | None, grant: Grant
) -> AsyncIterator[dict[str, str]]:
    """Yield the current status, the facts since `after`, then live updates, while the token is valid."""
    with service.hub.subscribe(runtime.job, grant.token_id) as subscription:
        yield {"event": "status", "data": _view(service, runtime).model_dump_json()}
        sent = runtime.sequence if after is None else after
        for message in await _missed(service, runtime.job, sent):
            sent = int(message["id"])
            yield message
        async for message in _live(service, runtime, subscription, sent):
            yield message


async def _live(
    service: Service, runtime: Job, subscription: Subscription, sent: int
) -> AsyncIterator[dict[str, str]]:
    while (update := await subscription.next()) is not None:
        if update.kind == "behind":
            for message in await _missed(service, runtime.job, sent):
                sent = int(message["id"])
                yield message
        elif update.sequence is None:
            yield {"event": update.kind, "data": json.dumps(update.data)}
        elif update.sequence > sent:
            sent = update.sequence
            entry = FactView(sequence=update.sequence, at=update.data["at"], fact=update.data)
            yield _sent_fact(update.kind, entry)


def _tails(folders: Sequence[Path]) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted(folder.glob("*.log"))]
    most_bytes = min(_LOG_TAIL_BYTES, _LOGS_BYTES // max(1, len(paths)))
    return {f"{path.parent.name}/{path.name}": tail(path, most_bytes) for path in paths}
