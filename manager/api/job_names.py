"""Finds the job of a request, by its id or its name (the newest job of that name).

Names are the user's own. Another's job does not exist for a user; an administrator gives its id.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from ..service.runtime import Job
from ..service.service import Service
from .auth import User, service_of


def find(service: Service, said: str, owner: str | None) -> Job | None:
    """Find a job by id, or by name among the owner's own."""
    by_id = service.jobs.get(said)
    if by_id is not None and by_id.is_shown_to(owner):
        return by_id
    own = (job for job in reversed(service.jobs.values()) if job.state.owner == owner)
    return next((job for job in own if _name(job) == said), None)


def similar(service: Service, said: str, owner: str | None) -> str | None:
    """A suggestion: the newest job's id with this prefix, else the id or name of most similar spelling."""
    shown = service.shown_to(owner)[::-1]
    known = [job.job for job in shown]
    names = list(dict.fromkeys(n for job in shown if job.state.owner == owner and (n := _name(job))))
    begins = [id_ for id_ in known if said and id_.startswith(said)]
    return next(iter(begins or get_close_matches(said, names + known, n=1)), None)


def _name(job: Job) -> str | None:
    return job.state.spec.name if job.state.spec is not None else None


async def _asked(job: str, request: Request, grant: User) -> Job:
    """Find the job of a request, after authentication. 404 if there is no such job for this user."""
    service = service_of(request)
    found = find(service, job, grant.owner)
    if found is None:
        meant = similar(service, job, grant.owner)
        hint = f"did you mean {meant}?" if meant is not None else "`makara ps` lists all"
        raise HTTPException(404, f"there is no job {job!r}; {hint}")
    return found


AskedJob = Annotated[Job, Depends(_asked)]
