"""The jobs under /api/v1: to submit, see, stop, resume and export them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Form, Header, HTTPException, Query, Request, Response, UploadFile
from pydantic import BaseModel, Field

from ...protocol.messages import CheckpointRef
from ..core.facts import Resumption
from ..service.views.job import JobView
from .auth import User, service_of
from .continuing import go_on, is_going_on
from .exporting import ExportView, export_now
from .history import MOST
from .job_names import AskedJob
from .submission import Accepted, Submission, accept, check_settings

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class SubmittedJob(BaseModel):
    """The job created by a submission."""

    job: str
    new: bool


class JobsView(BaseModel):
    """`next`: the `offset` of the jobs after these; null: there are none."""

    jobs: list[JobView]
    next: int | None = None


class CheckpointsView(BaseModel):
    checkpoints: list[CheckpointRef]


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


@router.post("/jobs", status_code=201, responses={200: {"model": SubmittedJob, "description": "As before"}})
async def submit(
    request: Request,
    response: Response,
    grant: User,
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
    job, new = await accept(service, Submission(spec, data, secrets, idempotency_key, grant.owner))
    response.headers["Location"] = f"/api/v1/jobs/{job}"
    if not new:
        response.status_code = 200
    return SubmittedJob(job=job, new=new)


@router.post("/jobs/check")
async def check(
    request: Request,
    grant: User,
    spec: Annotated[str, Form(max_length=1 << 20)],
    secrets: Annotated[str, Form(max_length=1 << 20)] = "{}",
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Accepted:
    """Check whether a job would be accepted, except for its code, and return the limit on its size. Tries its
    store; stores no job. 422: faults."""
    submission = Submission(spec, b"", secrets, idempotency_key, grant.owner)
    return await check_settings(service_of(request), submission)


@router.get("/jobs")
async def jobs(
    request: Request,
    grant: User,
    offset: Annotated[int, Query(ge=0, le=MOST)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> JobsView:
    """All jobs of the user, newest first; for an administrator, of all users. `limit` of them from `offset`
    on."""
    service = service_of(request)
    newest_first = list(service.shown_to(grant.owner))[::-1]
    views = [service.view(job) for job in newest_first[offset : offset + limit]]
    return JobsView(jobs=views, next=offset + limit if len(newest_first) > offset + limit else None)


@router.get("/jobs/{job}")
async def job(job: AskedJob, request: Request) -> JobView:
    """One job, by its id or its name: status, progress, plan, morphs, checkpoints, VMs."""
    return service_of(request).view(job)


@router.post("/jobs/{job}/stop", status_code=202)
async def stop(job: AskedJob, request: Request) -> JobView:
    """Stop a job: it publishes a checkpoint and releases its VMs. Idempotent."""
    service = service_of(request)
    await service.stop(job.job)
    return service.view(job)


@router.post("/jobs/{job}/resume", status_code=202)
async def resume(job: AskedJob, body: Answer, request: Request) -> JobView:
    """Continue a job that was stopped or failed, or answer one that waits for a person with one of its
    `waiting.offers`. Idempotent. 409: the job can do neither."""
    service = service_of(request)
    if await is_going_on(service, job, body.how, body.secrets, body.changes):
        return service.view(job)
    waiting = job.state.waiting
    if waiting is None or job.state.ended is not None:
        if body.how is not Resumption.AGAIN:
            why = f"how: job {job.job} does not wait for you: it goes on from its newest checkpoint (`again`)"
            raise HTTPException(409, why)
        await go_on(service, job, body.secrets, body.changes)
        return service.view(job)
    if body.secrets or body.changes:
        what = "secrets, numbers of VMs and caps are for a job that was stopped or failed"
        raise HTTPException(409, f"{what}; job {job.job} waits for you with those that it has")
    if not await service.resume(job.job, body.how):
        offers = ", ".join(waiting.offers)
        why = f"how: job {job.job}: it cannot go on by {body.how.value}; it offers {offers}"
        raise HTTPException(409, why)
    return service.view(job)


@router.post("/jobs/{job}/export")
async def export(job: AskedJob, body: Wanted, request: Request) -> ExportView:
    """Export the weights of a published checkpoint; answers when done. Idempotent."""
    if job.state.spec is None:
        raise HTTPException(409, f"job {job.job}: not all of its history can be read")
    return await export_now(service_of(request), job, body.step, body.secrets)


@router.get("/jobs/{job}/calibration")
async def calibration(job: AskedJob) -> dict[str, Any]:
    """The measurements of the job's model (`simulator.Measurements`, or a single calibration)."""
    if job.state.calibration is None:
        raise HTTPException(404, f"calibration: job {job.job} has not been measured yet")
    return dict(job.state.measurements or job.state.calibration)


@router.get("/jobs/{job}/checkpoints")
async def checkpoints(job: AskedJob) -> CheckpointsView:
    """The published checkpoints, newest first."""
    return CheckpointsView(checkpoints=list(reversed(job.state.published)))
