"""Finds the job of a request, by its id or its name (the newest job of that name)."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

from fastapi import Depends, HTTPException, Request

from ..service.runtime import Job
from .auth import User, service_of


def find(jobs: dict[str, Job], said: str) -> Job | None:
    """Find a job by id or name. `jobs` are by id, oldest first."""
    by_id = jobs.get(said)
    if by_id is not None and by_id.submitted:
        return by_id
    return next((job for job in reversed(jobs.values()) if _name(job) == said), None)


def similar(jobs: dict[str, Job], said: str) -> str | None:
    """A suggestion: the newest job's id with this prefix, else the id or name of most similar spelling."""
    known = [id_ for id_, job in reversed(jobs.items()) if job.submitted]
    names = list(dict.fromkeys(name for job in reversed(jobs.values()) if (name := _name(job))))
    begins = [id_ for id_ in known if said and id_.startswith(said)]
    return next(iter(begins or get_close_matches(said, names + known, n=1)), None)


def _name(job: Job) -> str | None:
    return job.state.spec.name if job.state.spec is not None else None


async def _asked(job: str, request: Request, _: User) -> Job:
    """Find the job of a request, after authentication. 404 if there is no such job."""
    jobs = service_of(request).jobs
    found = find(jobs, job)
    if found is None:
        meant = similar(jobs, job)
        hint = f"did you mean {meant}?" if meant is not None else "`makara ps` lists all"
        raise HTTPException(404, f"there is no job {job!r}; {hint}")
    return found


AskedJob = Annotated[Job, Depends(_asked)]
