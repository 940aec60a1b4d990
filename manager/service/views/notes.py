"""What users are told about a job in words: troubles, stalls, and notes."""

from __future__ import annotations

from collections.abc import Iterable

from ....pipeline.plan import Plan
from ....protocol.messages import Phase
from ...core.state import JobState, vm_of, wanted_vms
from ..runtime import Job
from .costs import not_released


def stalled(job: Job) -> str | None:
    found, state = job.observations.no_progress, job.state
    if found is None or state.current is None or state.finished is not None or isolated(job):
        return None
    return found.describe()


def isolated(job: Job) -> str | None:
    if job.observations.isolated_since is None or job.state.ended is not None:
        return None
    num_joined = sum(vm.joined for vm in job.state.live_vms)
    unheard = f"{len(job.observations.unheard)} of {num_joined} for more than their lease"
    return f"isolated: most VMs fell silent at about the same time, {unheard}; nothing is changed for it"


def troubles(job: Job, retried: Iterable[str]) -> list[str]:
    """What goes wrong and may pass; `retried`: commands that the manager tries again."""
    return sorted({*retried, *_not_understood(job), *_not_saved(job), *_unfit(job)})


def _not_understood(job: Job) -> list[str]:
    live = {vm.vm for vm in job.state.live_vms}
    holding = {vm: report.holding for vm, report in job.reports.items() if report.holding}
    return [f"VM {vm}: {why}" for vm, why in {**holding, **job.not_understood}.items() if vm in live]


def _not_saved(job: Job) -> set[str]:
    return {
        f"{'load' if worker.phase is Phase.FORMING else 'save'}_checkpoint: {worker.store_trouble}"
        for report in job.reports.values()
        for worker in report.workers
        if worker.store_trouble
    }


def _unfit(job: Job) -> list[str]:
    """The note that VMs are requested one at a time, since the newest were unfit."""
    wait_s = job.observations.asks_singly_s
    if wait_s is None or not job.state.active:
        return []
    why = f"the newest VMs cannot meet the recipe ({job.state.why_unfit})"
    return [f"request_vm: {why}: one at a time is asked for, {wait_s:g} s after the last"]


def notes(job: Job, now: float) -> list[str]:
    """What is no fault, but worth knowing."""
    state = job.state
    bits_hash = state.recipe.bits_hash if state.recipe is not None else None
    choices = state.start.other_choices(bits_hash) if state.start is not None else ""
    why_no_vm = job.observations.why_no_vm if state.active else ""
    asks_no_more = f"no more VMs are requested for now: {why_no_vm}" if why_no_vm else ""
    found = (
        choices,
        *_damaged(state),
        _unused_vms(job),
        _beyond_use(state),
        asks_no_more,
        _not_compared(state),
        _few_copies(state),
    )
    return [*not_released(job, now), *filter(None, found)]


def _damaged(state: JobState) -> list[str]:
    """The notes on checkpoints that could not be read; on one of its own as long as the head lists it."""
    told = [
        f"the checkpoint of step {found.checkpoint.step} is damaged, and training went on from that of step "
        f"{found.instead.step}: {found.why}"
        for found in state.damaged
    ]
    copied = state.copied
    if copied is not None and copied.skipped:
        step = copied.checkpoint.step
        told.append(f"it starts from step {step} of another job, not from the newest: {copied.skipped}")
    return told


def _unused_vms(job: Job) -> str:
    """Why VMs that are ready have no work; empty if all have."""
    current, state = job.state.current, job.state
    if current is None or current.formed is None or not state.active or state.planned is not None:
        return ""
    working = {vm_of(worker) for worker, _ in current.incarnations}
    considered = {vm_of(worker) for worker, _ in job.observations.planned_for}
    idle = [vm.vm for vm in state.live_vms if vm.vm in considered - working]
    if not idle:
        return ""
    fixed = state.spec is not None and (
        state.spec.parallelism.pipeline_parallel_degree or state.spec.parallelism.data_parallel_degree
    )
    why = "the job file fixes P or D" if fixed else "none with more of them is faster or fits"
    return f"{', '.join(idle)}: without work in the plan {current.shape}, and kept as a reserve: {why}"


def _beyond_use(state: JobState) -> str:
    """The note that fewer VMs are requested than the job may have, and why; else empty."""
    if state.spec is None or state.recipe is None or not state.active:
        return ""
    wanted, most = wanted_vms(state), state.spec.resources.max_nodes
    if wanted >= most:
        return ""
    sizes = f"{state.recipe.num_sections} sections and {state.recipe.num_micro_batches} micro-batches"
    return (
        f"max_nodes is {most}, but no plan gives more than {wanted} VMs work ({sizes}): "
        "more are not asked for"
    )


def _not_compared(state: JobState) -> str:
    """The note that silent corruption is not found in some sections."""
    current = state.current
    if current is None or current.formed is None or not state.running:
        return ""
    plan = Plan.from_json(current.plan)
    num_alone = sum(len(plan.hosts(section)) == 1 for section in range(plan.num_sections))
    if not num_alone:
        return ""
    if num_alone == plan.num_sections:
        return "silent corruption is found by comparing hosts of a section, and each section has one host"
    which = f"{num_alone} of {plan.num_sections} sections"
    return f"silent corruption is found by comparing hosts of a section, and {which} have one host"


def _few_copies(state: JobState) -> str:
    """Where fewer deaths than the job file says may need a checkpoint."""
    if state.few_copies is None or state.spec is None or not state.running:
        return ""
    lives = f"some section lives on {state.few_copies} VM{'s' if state.few_copies > 1 else ''} only"
    wanted = state.spec.resilience.tolerated_failures + 1
    told = f"{lives}, resilience.tolerated_failures asks for {wanted}"
    enough, most = state.enough_vms, state.spec.resources.max_nodes
    num_vms = sum(vm.joined for vm in state.live_vms)
    if enough is not None and num_vms >= enough and state.current and state.current.best_until is not None:
        return (
            f"{told}: the plan is the one of before, rerouted around lost VMs, until the next change of plan"
        )
    if enough is None:
        return f"{told}: there are too few VMs for now"
    more = f", resources.max_nodes is {most}" if enough > most else ""
    return f"{told}: there are too few VMs for now, {enough} like these would do{more}"
