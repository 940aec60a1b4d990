"""Routes from which a VM fetches its software before it has an agent, with its join or worker token."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request, Response

from ..boot.payload import constraints, torch_version, wheel
from ..service.tokens import Scope
from ..threads import CallKind
from .auth import service_of, vm_of_job
from .description import answers

router = APIRouter(prefix="/api/v1", tags=["agents"])
_PARTS = {"wheel": wheel, "constraints": constraints}


@router.get(
    "/jobs/{job}/boot/{part}",
    response_class=Response,
    responses=answers("application/octet-stream", "text/plain"),
)
async def boot_part(job: str, part: str, request: Request) -> Response:
    """`wheel`: the worker's side of this version. `constraints`: what it needs, as pip reads it. `torch`: the
    version that this job's VMs are to have. For the VMs of this job alone."""
    service = service_of(request)
    await vm_of_job(request, job, Scope.JOIN, Scope.WORKER)
    if part == "torch":
        recipe = service.jobs[job].state.recipe
        return Response(torch_version(recipe.torch_version if recipe is not None else None))
    if part not in _PARTS:
        raise HTTPException(404, f"part: expected {', '.join(_PARTS)}, torch")
    data = await service.threads.run(CallKind.FILES, _PARTS[part])
    return Response(data, media_type="application/octet-stream")
