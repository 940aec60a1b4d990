"""Views of a job for users: projections of its state and of the newest reports, as the API sends them."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from ...pipeline import Plan
from ...protocol.messages import CheckpointRef, Phase, StepMetrics, WorkerReport
from ..core.state import Generation, JobState, vm_of
from ..core.vms import Vm
from ..core.worth import forming_s
from .activity import activity
from .costs.views import Costs, JobCost, VmCost, not_released
from .quarantine import STATUS
from .runtime import FirstStep, Job
from .waiting_view import WaitingView, beyond_use, unused_vms, waiting_view, waits_for_vms

_MOST_ENDED = 100  # VMs that ended, in a job's view
_MOST_MORPHS = 100


class StepView(BaseModel):
    """One committed step; `loss` None is not a number."""

    step: int
    generation: int
    loss: float | None
    grad_norm: float | None
    seconds: float
    samples: int
    loss_scale: float | None  # fp16 only
    skipped: bool  # its gradient overflowed in fp16: nothing was updated


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


class StepInFlightView(BaseModel):
    """What became of the step that a morph cut off, in micro-batches: one of which some sections' gradients
    were kept counts in part. `moved`: of the kept ones, those that went to another worker; `left`: those that
    were left to do, whether lost or not begun before; `dropped`: what workers short of memory dropped.

    `took_s`: from the step before to the commit of this one, the morph included; `undisturbed_s`: what steps
    took before. The manager remembers them until it restarts."""

    kept: float
    moved: float
    left: float
    dropped: float
    took_s: float | None = None
    undisturbed_s: float | None = None


class MorphView(BaseModel):
    """A change of plan. `phases_s`: decide (with detection), prepare, open, finish (the plan of before ends
    its step, if it steps), form, as far as known, and first_step: training again, until the first commit;
    `inside_form_s`: the phases of `form` on one worker; `in_flight`: None if nothing was kept of a step."""

    generation: int
    shape: str
    before: str | None
    cause: str
    at: float
    step: int | None
    rung: str | None
    lost_steps: int
    in_flight: StepInFlightView | None
    predicted_s: float | None
    phases_s: dict[str, float]
    inside_form_s: dict[str, float]
    total_s: float | None
    ended: str | None


class VmView(BaseModel):
    vm: str
    status: str
    requested_at: float
    joined_at: float | None
    ended_at: float | None
    deadline: float | None
    notice: str  # why it hands over, or may have to: the cloud's word, "drained" or "at risk"
    reason: str | None
    detail: str
    workers: list[str]
    cost: VmCost | None


class JobView(BaseModel):
    """A job as `GET /api/v1/jobs/{job}` shows it, with the last hundred ended VMs and morphs.

    `num_vms` and `num_morphs` count all; `/vms` lists all VMs.
    """

    job: str
    name: str
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


def to_json(value: BaseModel) -> dict[str, Any]:
    """Plain JSON values; NaN and infinities become null."""
    return json.loads(value.model_dump_json())


def step_view(metrics: StepMetrics) -> StepView:
    return StepView(
        step=metrics.step,
        generation=metrics.generation,
        loss=_finite(metrics.loss),
        grad_norm=_finite(metrics.grad_norm),
        seconds=metrics.seconds,
        samples=metrics.samples,
        loss_scale=metrics.loss_scale,
        skipped=metrics.skipped,
    )


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
        status=STATUS if aside else state.status.value,
        reason=aside.reason if aside else _reason(job),
        doing=activity(job) if aside is None else "",
        waiting=waiting_view(state, step),
        traceback=aside.traceback if aside else _traceback(state),
        trouble=sorted(
            {*trouble.values(), *_not_understood(job), *_not_saved(workers.values()), *_unfit(job)}
        ),
        notes=[*not_released(job, now), *_notes(job)],
        stalled=_stalled(job),
        isolated=_isolated(job),
        step=step,
        steps=state.spec.training.steps if state.spec else 0,
        loss=_finite(last.loss) if last is not None else None,
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
        vms=_shown_vms(job, costs),
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


def _stalled(job: Job) -> str | None:
    found, state = job.observations.no_progress, job.state
    if found is None or state.current is None or state.finished is not None or _isolated(job):
        return None
    return found.describe()


def _isolated(job: Job) -> str | None:
    if job.observations.isolated_since is None or job.state.ended is not None:
        return None
    num_joined = sum(vm.joined for vm in job.state.live_vms)
    unheard = f"{len(job.observations.unheard)} of {num_joined} for more than their lease"
    return f"isolated: most VMs fell silent at about the same time, {unheard}; nothing is changed for it"


def _not_understood(job: Job) -> list[str]:
    live = {vm.vm for vm in job.state.live_vms}
    holding = {vm: report.holding for vm, report in job.reports.items() if report.holding}
    return [f"VM {vm}: {why}" for vm, why in {**holding, **job.not_understood}.items() if vm in live]


def _not_saved(workers: Iterable[WorkerReport]) -> set[str]:
    return {
        f"{'load' if worker.phase is Phase.FORMING else 'save'}_checkpoint: {worker.store_trouble}"
        for worker in workers
        if worker.store_trouble
    }


def _unfit(job: Job) -> list[str]:
    """The note that VMs are requested one at a time, since the newest were unfit."""
    wait_s = job.observations.asks_singly_s
    if wait_s is None or not job.state.active:
        return []
    why = f"the newest VMs cannot meet the recipe ({job.state.why_unfit})"
    return [f"request_vm: {why}: one at a time is asked for, {wait_s:g} s after the last"]


def _notes(job: Job) -> list[str]:
    state = job.state
    bits_hash = state.recipe.bits_hash if state.recipe is not None else None
    choices = state.start.other_choices(bits_hash) if state.start is not None else ""
    why_no_vm = job.observations.why_no_vm if state.active else ""
    asks_no_more = f"no more VMs are asked for now: {why_no_vm}" if why_no_vm else ""
    notes = (choices, unused_vms(job), beyond_use(state), asks_no_more, _few_copies(state))
    return [note for note in notes if note]


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


def measured_s(job: Job) -> float | None:
    """Mean seconds of the newest generation's last steps, without its first one if there are others: that may
    be the rest of a step, or have run twice."""
    newest = job.recent[-1].generation if job.recent else None
    seconds = [metrics.seconds for metrics in job.recent if metrics.generation == newest]
    return _mean(seconds[1:] or seconds)


def newest_step(state: JobState, last: StepMetrics | None) -> int:
    """The newest step of the job's current history; steps that are being repeated do not count."""
    number, step = max(_beginnings(state), default=(0, 0))
    steps = [step] + [c.step for c in state.published if c.generation >= number]
    if last is not None and last.generation >= number:
        steps.append(last.step)
    return max(steps)


def surviving(state: JobState, rows: Iterable[StepMetrics]) -> list[StepMetrics]:
    """The rows without steps that were lost because a later generation began at an earlier step."""
    beginnings = sorted(_beginnings(state))
    numbers = [number for number, _ in beginnings]
    # For each generation, the first step of it and all later ones: earlier rows beyond that are lost.
    left = list(accumulate((step for _, step in reversed(beginnings)), min))[::-1]
    places = ((row, bisect_right(numbers, row.generation)) for row in rows)
    return [row for row, place in places if place == len(left) or row.step <= left[place]]


def _beginnings(state: JobState) -> list[tuple[int, int]]:
    """(number, first step) of each generation that formed."""
    present = [g for g in (state.current, state.planned) if g is not None]
    return [(g.number, g.formed.step) for g in (*state.history, *present) if g.formed is not None]


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


def morphs(state: JobState, first_steps: Mapping[int, FirstStep]) -> list[MorphView]:
    """The last planned generations by number; `before` is the plan that ran when each was planned.

    (The history is ordered by end: a generation that never formed ends before the one that ran.)
    """
    present = tuple(g for g in (state.current, state.planned) if g is not None)
    shown = state.history[-_MOST_MORPHS:]
    earlier = state.history[: len(state.history) - len(shown)]
    before = next((g.shape for g in reversed(earlier) if g.formed is not None), None)
    # Numbers of those that formed, by their ends; of several that ended at a time, the first.
    formed = {g.ended_at: g.number for g in reversed(state.history) if g.formed is not None}
    views: list[MorphView] = []
    for generation in sorted((*shown, *present), key=lambda generation: generation.number):
        stepped = formed.get(generation.opened_at, generation.number) < generation.number
        first_step = first_steps.get(generation.number)
        views.append(_morph(state, generation, before, first_step, stepped=stepped))
        if generation.formed is not None:
            before = generation.shape
    return views


def _morph(
    state: JobState,
    generation: Generation,
    before: str | None,
    first_step: FirstStep | None,
    *,
    stepped: bool,
) -> MorphView:
    """`stepped`: whether the plan of before still stepped as this generation was opened."""
    marks = {
        "decide": generation.planned_at,
        "prepare": generation.prepared_at,
        "open": generation.opened_at,
        "finish": _finished_at(generation) if stepped else None,
        "form": generation.formed_at,
        "first_step": None if first_step is None else first_step.at,
    }
    phases: dict[str, float] = {}
    reached = generation.detected_at
    for name, at in marks.items():
        if at is not None:
            phases[name] = max(0.0, at - reached)
            reached = max(reached, at)
    return MorphView(
        generation=generation.number,
        shape=generation.shape,
        before=before,
        cause=generation.cause,
        at=generation.planned_at,
        step=generation.formed.step if generation.formed else None,
        rung=generation.formed.rung if generation.formed else None,
        lost_steps=generation.lost_steps,
        in_flight=step_in_flight(state, generation, first_step),
        predicted_s=generation.predicted_s,
        phases_s=phases,
        inside_form_s=dict(generation.formed.phases_s) if generation.formed else {},
        total_s=reached - generation.detected_at if generation.formed_at is not None else None,
        ended=generation.end_reason or None,
    )


def _finished_at(generation: Generation) -> float | None:
    """When the plan of before, which still stepped, had finished its step."""
    if generation.formed is None or generation.formed_at is None:
        return None
    return generation.formed_at - forming_s(generation.formed)


def step_in_flight(
    state: JobState, generation: Generation, first_step: FirstStep | None = None
) -> StepInFlightView | None:
    """What a generation that has formed kept of the step that was cut off; None: nothing."""
    found = generation.formed.in_flight if generation.formed else None
    if found is None or state.recipe is None:
        return None
    each = state.recipe.num_micro_batches / (found.kept + found.missing)
    return StepInFlightView(
        kept=found.kept * each,
        moved=found.moved * each,
        left=found.missing * each,
        dropped=found.dropped * each,
        took_s=None if first_step is None else first_step.since_last_s,
        undisturbed_s=None if first_step is None else first_step.before_s,
    )


def vm_view(job: Job, vm: Vm, costs: Costs) -> VmView:
    report = job.reports.get(vm.vm) if vm.live else None
    silent = vm.live and vm.vm in job.observations.unheard
    workers, unfit = report.workers if report is not None else [], job.state.unfit
    unused = "; ".join(f"{w.worker} is not used: {unfit[w.worker]}" for w in workers if w.worker in unfit)
    return VmView(
        vm=vm.vm,
        status=vm.status.value,
        requested_at=vm.requested_at,
        joined_at=vm.joined_at,
        ended_at=vm.ended_at,
        deadline=vm.deadline,
        notice=_notice(vm),
        reason=vm.reason.value if vm.reason is not None else None,
        detail=vm.detail or ("silent" if silent else unused),
        workers=[f"{w.worker}: {'unfit' if w.worker in unfit else w.phase.value}" for w in workers],
        cost=costs.of_vm(vm),
    )


def _notice(vm: Vm) -> str:
    if not vm.live:
        return ""
    if vm.deadline is not None:
        return vm.action or "notice"
    return "drained" if vm.drained_at is not None else "at risk" if vm.at_risk else ""


def _shown_vms(job: Job, costs: Costs) -> list[VmView]:
    """The living VMs and the last that ended, in the order of their requests."""
    vms = {vm.vm: vm for vm in (*job.state.counted_vms, *job.state.vms.ended(-_MOST_ENDED))}
    return [vm_view(job, vm, costs) for vm in sorted(vms.values(), key=lambda vm: vm.number)]


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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
