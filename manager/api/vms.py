"""VMs of jobs: list, logs and drain; and for the administrator, faults and capacity of local VMs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel, Field

from ...protocol.log_tail import tail
from ..core.events import DrainRequested
from ..providers import ProviderError
from ..providers.local import FaultKind, LocalProvider
from ..service.service import Service
from ..service.views.costs import Costs
from ..service.views.vms import VmView, vm_view
from ..threads import CallKind
from .auth import Admin, User, service_of
from .history import MOST
from .job_names import AskedJob

router = APIRouter(prefix="/api/v1", tags=["jobs"])
_LOG_TAIL_BYTES = 256 * 1024  # of one log
_LOGS_BYTES = 8 << 20  # of all logs in one answer


class VmsView(BaseModel):
    """`next`: the `offset` of the VMs after these; null: there are none."""

    vms: list[VmView]
    next: int | None = None


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


@router.get("/jobs/{job}/vms")
async def vms(
    job: AskedJob,
    request: Request,
    offset: Annotated[int, Query(ge=0, le=MOST)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> VmsView:
    """All VMs that the job ever requested, in order; `limit` of them from `offset` on."""
    names = islice(job.state.vms, offset, offset + limit)
    costs = Costs(job, service_of(request).clock())
    more = offset + limit if len(job.state.vms) > offset + limit else None
    return VmsView(vms=[vm_view(job, job.state.vms[name], costs) for name in names], next=more)


@router.get("/jobs/{job}/logs")
async def logs(job: AskedJob, request: Request, vm: str | None = None) -> LogsView:
    """The ends of the log files of a job's local VMs, by `<vm>/<file>`."""
    service, known = service_of(request), job.state.vms
    if vm is not None and vm not in known:
        raise HTTPException(404, f"vm: job {job.job} has no VM {vm!r}")
    folders = [service.vm_directory(name) for name in ([vm] if vm is not None else known)]
    return LogsView(logs=await service.threads.run(CallKind.FILES, _tails, folders))


@router.post("/vms/{vm}/drain", status_code=202)
async def drain(vm: str, request: Request, grant: User) -> VmView:
    """Move the work off a VM, release it, and request another in its place. Idempotent. 404: no job has it;
    409: its job is not training, or the VM has ended."""
    service = service_of(request)
    job = next((job for job in service.shown_to(grant.owner) if vm in job.state.vms), None)
    if job is None:
        raise HTTPException(404, f"vm: no job has a VM {vm!r}")
    if not job.state.vms[vm].live:
        raise HTTPException(409, f"vm: {vm} has ended")
    if not job.state.active:
        raise HTTPException(
            409, f"vm: job {job.job} is {job.state.status.value}: it asks for no VM in its place"
        )
    await service.handle(job.job, DrainRequested(now=service.clock(), vm=vm))
    return vm_view(job, job.state.vms[vm], Costs(job, service.clock()))


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


def _tails(folders: Sequence[Path]) -> dict[str, str]:
    paths = [path for folder in folders for path in sorted(folder.glob("*.log"))]
    most_bytes = min(_LOG_TAIL_BYTES, _LOGS_BYTES // max(1, len(paths)))
    return {f"{path.parent.name}/{path.name}": tail(path, most_bytes) for path in paths}
