"""Continues a job that was stopped or failed; everything is checked before anything is stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..core import can_go_on
from ..core.cost import spent_by
from ..core.facts import Resumption
from ..core.state import Status
from ..service.runtime import Job
from ..service.service import Service
from ..service.store_access import for_submission
from ..spec.job_spec import JobSpec, parse_spec
from ..threads import CallKind
from .before_renting import check_renting
from .submission import check_providers, check_secrets, check_store


class CannotGoOn(Exception):
    """The job's status, which the message names, does not allow it to continue."""


async def go_on(
    service: Service,
    job: Job,
    secrets: Mapping[str, str],
    changes: Mapping[str, float],
) -> None:
    """Continue an ended job, with these `changes` of its `resources`. Durable on return.

    `secrets`: the values of all that its job file names, since those of an ended job are deleted. Raises
    `CannotGoOn`, `JobSpecError` with every fault, `StoreUnavailable`, `CloudAway`; then nothing is stored.
    """
    spec = _changed(_spec_of(job), changes)
    check_providers(spec, service, job.state.owner)
    given = check_secrets(spec, secrets)
    stores = service.stores_of(job)
    check = partial(check_store, spec, job.job, given, stores)
    await for_submission(service.threads, job.state.owner, check)
    if job.state.finished is None:  # else no VM is needed: its weights are exported
        await check_renting(service, spec, spent_by(job.state, service.clock()).at_most)
    if not await service.admission.go_on(job.job, spec.resources, given):
        _spec_of(job)  # it went on meanwhile, and this says so
        raise CannotGoOn(f"job {job.job} cannot go on")


async def is_going_on(
    service: Service,
    job: Job,
    how: Resumption,
    secrets: Mapping[str, str],
    changes: Mapping[str, float],
) -> bool:
    """Whether this same request took effect before: a client that lost the answer repeats it."""
    state = job.state
    if state.spec is None or state.ended is not None or state.waiting is not None or state.answered != how:
        return False
    if state.stop_ordered_at is not None:
        return False  # it was told to stop since
    if any(getattr(state.spec.resources, name) != value for name, value in changes.items()):
        return False
    kept = await service.threads.run(CallKind.FILES, service.files.secrets, job.job)
    return not secrets or dict(secrets) == kept


def _spec_of(job: Job) -> JobSpec:
    state = job.state
    if job.quarantine is not None and not job.quarantine.readable:
        raise CannotGoOn(f"job {job.job} cannot go on: not all of its history can be read")
    if state.spec is None or state.ended is None:
        is_what = state.status.value
        why = "only a job that waits for you, or that was stopped or failed, can be resumed"
        then = f"; it can once `makara follow {job.job}` ends" if state.status is Status.STOPPING else ""
        raise CannotGoOn(f"job {job.job} is {is_what}; {why}{then}")
    if not can_go_on(state):
        done = f"it trained all {state.spec.training.steps} steps, and nothing is left to do"
        raise CannotGoOn(f"job {job.job} is {state.ended.status}: {done}")
    return state.spec


def _changed(spec: JobSpec, changes: Mapping[str, float]) -> JobSpec:
    """The same job with changed `resources`. Raises `JobSpecError` if they are invalid."""
    value = spec.model_dump(mode="json")
    value["resources"] |= changes
    return parse_spec(value)
