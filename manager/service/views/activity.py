"""What a job waits for while it makes no steps, in words for users."""

from __future__ import annotations

from ....protocol.messages import Phase, WorkerReport
from ...core.pools.claims import least_vms
from ...core.state import Generation, JobState, Status, wanted_vms
from ..runtime import Job


def activity(job: Job) -> str:
    """What is waited for; empty while steps are made, for a person, or after the end."""
    state = job.state
    if state.ended is not None or state.waiting is not None or state.spec is None:
        return ""
    if state.finished is not None:
        return "the weights are exported"
    if state.stop_ordered_at is not None:
        return "workers publish a checkpoint"
    if state.copying and state.start is not None:
        return f"copies a checkpoint of job {state.start.job}"
    if state.planned is not None:
        return _preparing(job, state.planned)
    if state.current is not None:
        return "" if state.current.formed is not None else _forming(job, state.current)
    if state.recipe is None:
        return _before_recipe(job)
    return _before_plan(job)


def _before_recipe(job: Job) -> str:
    profile = job.state.profile
    first = job.observations.report_of(profile.members[0]) if profile is not None else None
    told = first.profiling if first is not None else None
    if profile is not None and told is not None and told.total:
        if told.stage == "links" and told.generation == profile.number:
            return f"profiling: the links between {len(profile.members)} workers"
        done = sum(worker.profiling.done for worker in _workers(job) if worker.profiling is not None)
        return f"profiling: {min(done, told.total)} of {told.total} sections measured"
    if job.state.status is Status.PROFILING:
        return "one worker traces the model and cuts it into sections"
    return _coming(job)


def _before_plan(job: Job) -> str:
    planning = job.observations.planning
    if planning is not None:
        number = len(planning.incarnations)
        return f"planning for {number} worker{'s' if number > 1 else ''}"
    workers = _workers(job)
    traced = sum(worker.graph_hash is not None for worker in workers)
    if workers and traced < len(workers):
        return f"workers trace the model: {traced} of {len(workers)} have"
    return _coming(job)


def _coming(job: Job) -> str:
    """The message while VMs boot or their trainers start."""
    state = job.state
    joined = sum(vm.joined for vm in state.live_vms)
    workers, why_no_vm = _workers(job), job.observations.why_no_vm
    starting = sum(worker.phase is Phase.STARTING for worker in workers)
    if why_no_vm and joined == len(state.live_vms) < least_vms(state, job.observations):
        return f"waits for VMs: {why_no_vm}"
    if joined < len(state.live_vms) or not joined:
        return f"VMs boot: {joined} of {len(state.live_vms) or wanted_vms(state)} have joined"
    return f"trainers start: {len(workers) - starting} of {_expected(state)} are ready"


def _expected(state: JobState) -> int:
    assert state.spec is not None, "whoever has VMs was submitted"
    return sum(vm.joined for vm in state.live_vms) * state.spec.resources.workers_per_node


def _preparing(job: Job, planned: Generation) -> str:
    if planned.prepared_at is not None:
        return f"{planned.shape}: its head is opened in the store{_meanwhile(job)}"
    ready = sum(
        report is not None and report.prepared >= planned.number
        for report in map(job.observations.report_of, planned.members)
    )
    return f"{planned.shape}: {ready} of {len(planned.members)} members are ready for it{_meanwhile(job)}"


def _meanwhile(job: Job) -> str:
    current = job.state.current
    return f"; {current.shape} steps on" if current is not None and current.formed is not None else ""


def _forming(job: Job, current: Generation) -> str:
    reports = [job.observations.report_of(member) for member in current.members]
    stepping = sum(
        report is not None and report.phase is Phase.RUNNING and report.generation < current.number
        for report in reports
    )
    if stepping:
        return f"{current.shape}: {stepping} of {len(current.members)} workers have to end their step first"
    formed = sum(
        report is not None and report.formed is not None and report.formed.generation >= current.number
        for report in reports
    )
    return f"{current.shape}: weights are loaded, {formed} of {len(current.members)} members have theirs"


def _workers(job: Job) -> list[WorkerReport]:
    last_reports = (job.observations.last_reports.get(vm.vm) for vm in job.state.live_vms)
    return [
        worker
        for last_report in last_reports
        if last_report is not None
        for worker in last_report.report.workers
    ]
