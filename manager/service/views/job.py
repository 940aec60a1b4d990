"""The view of a whole job, as the API sends it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import BaseModel

from ....pipeline import Plan
from ....protocol.messages import CheckpointRef, WorkerReport
from ...core.state import Generation, JobState, vm_of
from ..quarantine import STATUS
from ..runtime import Job
from .activity import activity
from .costs import Costs, JobCost
from .morphs import MorphView, morphs
from .notes import isolated, notes, stalled, troubles
from .steps import measured_s, newest_step
from .vms import VmView, shown_vms
from .waiting import WaitingView, waiting_view, waits_for_vms


class JobView(BaseModel):
    """A job as `GET /api/v1/jobs/{job}` shows it, with the last hundred ended VMs and morphs.

    `num_vms` and `num_morphs` count all; `/vms` lists all VMs.
    """

    job: str
    name: str
    owner: str | None  # the user whose job it is; None: the administrators
    status: str
    reason: str | None
    doing: str  # what the job waits for while it makes no steps
    waiting: WaitingView | None
    traceback: str | None
    trouble: list[str]
    notes: list[str]  # no faults, but worth knowing
    stalled: str | None  # no member makes progress: for how long, the bound, and what each is doing
    isolated: str | None  # the manager seems to be cut off from most VMs, and waits to hear from them
    step: int
    steps: int
    loss: float | None
    seconds_per_step: float | None
    samples_per_s: float | None
    predicted_s: float | None
    generation: int
    shape: str | None
    num_sections: int | None
    num_micro_batches: int | None
    microbatch_size: int | None
    placement: list[SeatView]
    morphs: list[MorphView]
    num_morphs: int
    checkpoints: list[CheckpointRef]
    vms: list[VmView]
    num_vms: int
    num_live_vms: int
    submitted_at: float
    ended_at: float | None
    export_uri: str | None
    export_sha256: str | None
    checkpoint_uri: str
    max_nodes: int
    cost: JobCost | None
    secrets: list[str]  # names; their values are needed to resume the job after its end


class SeatView(BaseModel):
    """A worker of the running plan: stage `stage` of path `replica`, hosting sections start..stop-1."""

    worker: str
    vm: str
    rank: int
    replica: int
    stage: int
    start: int
    stop: int
    phase: str | None


def job_view(job: Job, trouble: Mapping[str, str], now: float) -> JobView:
    """Everything about one job that changes while it runs."""
    state = job.state
    last = job.recent[-1] if job.recent else None
    step, seconds = newest_step(state, last), measured_s(job)
    workers = {w.worker: w for report in job.reports.values() for w in report.workers}
    generation = state.current
    aside = job.quarantine if job.set_aside else None
    costs = Costs(job, now)
    return JobView(
        job=job.job,
        name=state.spec.name if state.spec else job.job,
        owner=state.owner,
        status=STATUS if aside else state.status.value,
        reason=aside.reason if aside else _reason(job),
        doing=activity(job) if aside is None else "",
        waiting=waiting_view(state, step),
        traceback=aside.traceback if aside else _traceback(state),
        trouble=troubles(job, trouble.values()),
        notes=notes(job, now),
        stalled=stalled(job),
        isolated=isolated(job),
        step=step,
        steps=state.spec.training.steps if state.spec else 0,
        loss=last.loss if last is not None and math.isfinite(last.loss) else None,
        seconds_per_step=seconds,
        samples_per_s=last.samples / seconds if last is not None and seconds else None,
        predicted_s=generation.predicted_s if generation else None,
        generation=generation.number if generation else state.last_generation,
        shape=generation.shape if generation else None,
        num_sections=state.recipe.num_sections if state.recipe else None,
        num_micro_batches=state.recipe.num_micro_batches if state.recipe else None,
        microbatch_size=state.recipe.microbatch_size if state.recipe else None,
        placement=placement(generation, workers) if generation else [],
        morphs=morphs(state, job.first_steps),
        num_morphs=len(state.history) + (state.current is not None) + (state.planned is not None),
        checkpoints=list(reversed(state.published)),
        vms=shown_vms(job, costs),
        num_vms=len(state.vms),
        num_live_vms=len(state.live_vms),
        submitted_at=state.submitted_at,
        ended_at=state.ended_at,
        export_uri=state.ended.export_uri if state.ended else None,
        export_sha256=state.ended.export_sha256 if state.ended else None,
        checkpoint_uri=state.spec.checkpoint.uri if state.spec else "",
        max_nodes=state.spec.resources.max_nodes if state.spec else 0,
        cost=costs.of_job(),
        secrets=state.spec.secrets if state.spec else [],
    )


def placement(generation: Generation, workers: Mapping[str, WorkerReport]) -> list[SeatView]:
    """One seat for each hop of each path; a worker on several paths is shown on each."""
    plan = Plan.from_json(generation.plan)
    seats: list[SeatView] = []
    for replica, path in enumerate(plan.paths):
        for stage, hop in enumerate(path.hops):
            worker = generation.members[hop.worker].worker
            report = workers.get(worker)
            span = plan.ranges[hop.worker]
            seats.append(
                SeatView(
                    worker=worker,
                    vm=vm_of(worker),
                    rank=hop.worker,
                    replica=replica,
                    stage=stage,
                    start=span.start,
                    stop=span.stop,
                    phase=report.phase.value if report is not None else None,
                )
            )
    return seats


def _traceback(state: JobState) -> str | None:
    failed = state.ended or state.failure
    return failed.traceback if failed else state.last_traceback


def _reason(job: Job) -> str | None:
    state = job.state
    if state.ended is not None:
        return state.ended.reason or None
    if state.waiting is not None:
        return f"waits for a person: {state.waiting.reason}"
    if state.start is not None and state.copying and state.stop_ordered_at is None:
        return f"copies the checkpoint that it starts from, of job {state.start.job}"
    if state.failure is not None:
        return f"fails, once its workers have saved their steps: {state.failure.reason}"
    vms = waits_for_vms(job)
    if state.impossible and vms is not None:
        return f"{vms}: {state.impossible}"
    return state.impossible or state.last_error or None
