"""The route that drains a VM."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request

from ..core.events import DrainRequested
from ..service.costs.views import Costs
from ..service.views import VmView, vm_view
from .auth import User, service_of

router = APIRouter(prefix="/api/v1", tags=["jobs"])


@router.post("/vms/{vm}/drain", status_code=202)
async def drain(vm: str, request: Request, _: User) -> VmView:
    """Move the work off a VM, release it, and request another in its place. Idempotent. 404: no job has it;
    409: its job is not training, or the VM has ended."""
    service = service_of(request)
    job = next((job for job in service.jobs.values() if vm in job.state.vms), None)
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
