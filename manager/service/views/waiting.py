"""Views of a job that waits for a person, or for VMs."""

from __future__ import annotations

from pydantic import BaseModel

from ....protocol.messages import Phase
from ...core.state import JobState
from ...core.vms import VmStatus
from ..runtime import Job


class WaitingView(BaseModel):
    """A decision for a person: answer with `POST /api/v1/jobs/{job}/resume` and one of `offers`.

    `vms_until`, Unix seconds: when its VMs save and are released; None: not while its generation steps.
    `unsaved_steps`: the first and the last step that only living VMs hold, and that cannot be saved for now.
    `start_from`: the job whose checkpoint it began with, to which `restart` does not return. `console`: the
    end of the output of the last VM that did not join, if that is the reason; untrusted text.
    """

    since: float
    reason: str
    offers: list[str]
    vms_until: float | None
    unsaved_steps: tuple[int, int] | None
    start_from: str | None
    console: str


def waiting_view(state: JobState, step: int) -> WaitingView | None:
    """The view, or None if the job does not wait for a person. `step`: the newest committed one."""
    waiting = state.waiting
    if waiting is None or state.ended is not None:
        return None
    saved = state.saved_step
    takes_more = state.current is not None and state.current.number == waiting.head_generation
    return WaitingView(
        since=waiting.since,
        reason=waiting.reason,
        offers=[offer.value for offer in waiting.offers],
        vms_until=state.vms_kept_until,
        unsaved_steps=None if takes_more or step <= saved else (saved + 1, step),
        start_from=state.start.job if state.start is not None else None,
        console=waiting.console,
    )


def waits_for_vms(job: Job) -> str | None:
    """How many VMs are starting for a job that does not run yet; None if it runs, or none is starting."""
    if job.state.current is not None or not job.state.active:
        return None
    asked_for = sum(vm.status is VmStatus.REQUESTED for vm in job.state.live_vms)
    starting = sum(vm.status is VmStatus.JOINED and _starts(job, vm.vm) for vm in job.state.live_vms)
    parts = [f"{asked_for} asked for"] * (asked_for > 0) + [f"{starting} starting"] * (starting > 0)
    return f"waits for VMs ({', '.join(parts)})" if parts else None


def _starts(job: Job, vm: str) -> bool:
    if vm in job.observations.unheard:
        return False
    report = job.reports.get(vm)
    return report is None or all(worker.phase is Phase.STARTING for worker in report.workers)
