"""The recipe: a generation of kind `profile` measures the model, once for a job.

The first worker that is there is such a generation by itself. As with all others, newcomers and losses mean
the next one, and survivors bring what they have measured. Rank 0 reports what was found, or what an earlier
job left in the store. Links are assumed where one worker is alone, and after several could not measure
theirs twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....morphing import too_deep
from ....protocol.messages import Phase, Profile, WorkerReport
from ....simulator import InvalidCalibration, Measurements
from ....simulator.calibration.microbatch_size import profile_of
from ..commands import StoreCalibration
from ..context import Context, has_ended, incarnation_of
from ..facts import GenerationClosed, GenerationKind, GenerationPlanned, JobEnded, RecipeFixed, WorkerFailed
from ..state import Generation, Incarnation, vm_of
from ..strikes.table import Kind
from ..vms import VmStatus
from . import ending, generations, starting, versions

_MOST_MEMBERS = 8
_MOST_OF_A_VM = 4


def fix_recipe(context: Context) -> None:
    """Take the recipe that was found, else see that a generation is at it."""
    if not context.state.active:
        return
    if context.state.recipe is None and not _found(context):
        _close_failed(context)
        _plan(context)
    _refuse_too_shallow(context)


# ---- what was found ----------------------------------------------------------------------------------------


def _found(context: Context) -> bool:
    """Whether somebody reports what the recipe can be fixed by, which then is done."""
    for _, worker in context.reports():
        found = worker.profile
        if found is None or worker.worker in context.state.unfit:
            continue
        try:
            measured = Measurements.from_json(found.measurements) if found.measurements is not None else None
        except InvalidCalibration as error:
            _refuse(context, worker, f"what it measured cannot be read: {error}")
            continue
        assumed = measured is not None and not found.stored and _is_assumed(context, measured)
        if not assumed or not _awaits_others(context, worker):
            _fix(context, found, measured, assumed=assumed)
            return True
    return False


def _is_assumed(context: Context, measured: Measurements) -> bool:
    """Whether the links are of one machine, though the job may have several workers."""
    several = context.spec.resources.most_workers > 1
    return several and any(wire.source == "loopback" for wire in measured.wires)


def _awaits_others(context: Context, worker: WorkerReport) -> bool:
    """Whether others are there, or soon may be, to measure links with: assumed ones serve no other job."""
    state = context.state
    if context.is_reached(Kind.PROFILE):
        return False
    if len(_members(_ready(context), ())) > 1 or (
        state.profile is not None and len(state.profile.members) > 1
    ):
        return True
    coming = any(vm.vm != vm_of(worker.worker) for vm in state.live_vms if vm.status is not VmStatus.NOTICED)
    return (
        coming
        and context.now - context.observations.moved_at(incarnation_of(worker)) < context.timing.settle_s
    )


def _fix(context: Context, found: Profile, measured: Measurements | None, *, assumed: bool) -> None:
    spec = context.spec
    if measured is not None and not found.stored and spec.parallelism.microbatch_size is None:
        chosen = profile_of(  # rank 0 knows no memory but its own
            measured,
            found.recipe,
            wanted=None,
            memory_bytes=_least_memory(context),
            most_workers=spec.resources.most_workers,
        )
        found = chosen.model_copy(update={"note": found.note})
    refusal = starting.refusal(context, found.recipe)
    if refusal:
        ending.end(context, JobEnded(at=context.now, status="failed", reason=refusal))
        return
    context.fact(
        RecipeFixed(
            at=context.now,
            recipe=starting.with_bits(context, found.recipe),
            calibration=found.calibration,
            measurements=found.measurements,
            stored=found.stored,
            note=found.note,
        )
    )
    if found.measurements is not None and not found.stored and not assumed:
        context.command(StoreCalibration(key=f"{context.state.job}/calibration"))


def _least_memory(context: Context) -> int:
    """Of any worker that there is, in bytes."""
    sizes = [int(device["memory_bytes"]) for vm in context.state.live_vms for device in vm.devices]
    cap = context.spec.resources.device_memory
    return min([*sizes, cap] if cap is not None else sizes)


def _refuse_too_shallow(context: Context) -> None:
    """End a job that wants more stages than the model has sections: K and P stay as they are. Trainers refuse
    it where they cut the model; what was cut before may come from a store."""
    recipe, depth = context.state.recipe, context.spec.parallelism.pipeline_parallel_degree
    if recipe is not None and depth is not None and depth > recipe.num_sections:
        reason = f"parallelism.{too_deep(depth, recipe.num_sections)}"
        ending.end(context, JobEnded(at=context.now, status="failed", reason=reason))


# ---- the generation ----------------------------------------------------------------------------------------


def _close_failed(context: Context) -> None:
    profile = context.state.profile
    if profile is None:
        return
    if profile.opened_at is None:
        reason = generations.why_not_opened(context, profile)
        _end_older(context, profile)
    else:
        reason = _why_over(context, profile)
    if reason:
        kind, number = GenerationKind.PROFILE, profile.number
        context.fact(GenerationClosed(at=context.now, kind=kind, number=number, reason=reason))
        context.note(broken_since=None)


def _why_over(context: Context, profile: Generation) -> str:
    """Why the generation cannot go on; empty if it can."""
    lost = generations.why_lost(context, profile.members)
    if lost:
        return lost
    broken = {
        report.worker: told.broken
        for report in context.reports_of(profile.members)
        if (told := report.profiling) is not None and told.generation == profile.number and told.broken
    }
    if not broken:
        context.note(broken_since=None)
        return ""
    since = context.observations.broken_since or context.now
    context.note(broken_since=since)
    if context.now - since < context.timing.suspect_grace_s:
        return ""  # who has died is known soon
    return f"broken at {', '.join(sorted(broken))}: {min(broken.items())[1]}"


def _end_older(context: Context, profile: Generation) -> None:
    """Trainers that know nothing of such generations never get ready for one: they are started anew, and
    refused if they come back as old."""
    if context.isolated or context.elapsed_s(profile.planned_at) <= context.timing.prepare_timeout_s:
        return
    for report in context.reports_of(generations.late(context, profile)):
        if report.profiling is None:
            again = context.is_reached(Kind.OUTDATED, report.worker)
            end = _refuse if again else versions.restart
            end(context, report, "it is of a version that measures models in another way")


def _refuse(context: Context, worker: WorkerReport, why: str) -> None:
    """The worker takes no part in the job."""
    context.fact(
        WorkerFailed(
            at=context.now,
            worker=worker.worker,
            incarnation=worker.incarnation,
            kind="recipe",
            message=why,
            own_steps=0,
        )
    )


def _plan(context: Context) -> None:
    """Plan the first one, the next after one that was closed, or one with newcomers."""
    state = context.state
    before = state.profile.members if state.profile is not None else ()
    if state.profile is not None and not _takes_newcomers(context, state.profile):
        return
    members = _members(_ready(context), before)
    if context.is_reached(Kind.PROFILE):
        members = [] if before else _knows_most(_ready(context))
    new = [member.worker for member in members if member not in before]
    if not new:
        return
    again = "again" if state.profiler is not None else "start"
    context.fact(
        GenerationPlanned(
            at=context.now,
            kind=GenerationKind.PROFILE,
            number=state.last_profile + 1,
            cause=f"{', '.join(sorted(new))} joined" if before else again,
            plan={},
            members=tuple(members),
            predicted_s=None,
            detected_at=context.now,
            decided_s=0.0,
        )
    )


def _takes_newcomers(context: Context, profile: Generation) -> bool:
    """Whether there is something left that more members would help with."""
    first = context.report_of(profile.members[0])
    told = first.profiling if first is not None else None
    if first is None or told is None or profile.opened_at is None or told.generation != profile.number:
        return False
    return told.stage == "sections" or first.profile is not None  # by one alone: its links are assumed


def _ready(context: Context) -> list[WorkerReport]:
    """Workers with nothing else to do; of those, only whoever knows such generations, if any does."""
    ready = [
        worker
        for vm, worker in context.reports()
        if worker.phase in (Phase.IDLE, Phase.PROFILING)
        and vm.status is VmStatus.JOINED
        and not has_ended(worker)
        and not context.is_away(incarnation_of(worker))
        and worker.worker not in context.state.unfit
        and not context.is_left_out(incarnation_of(worker))
    ]
    return [worker for worker in ready if worker.profiling is not None] or ready


def _members(ready: Sequence[WorkerReport], before: Sequence[Incarnation]) -> list[Incarnation]:
    """Those of the generation `before`, in their order, so that rank 0 and what they know stay; and newcomers
    of the same protocol, from several VMs if there are. Nobody if rank 0 of `before` cannot take part."""
    protocols = {incarnation_of(worker): worker.trainer_protocol for worker in ready}
    if not ready or (before and before[0] not in protocols):
        return []
    protocol = protocols[before[0]] if before else ready[0].trainer_protocol
    alike = [incarnation for incarnation, its in protocols.items() if its == protocol]
    members = [incarnation for incarnation in before if incarnation in alike]
    num_of_vm = Counter(vm_of(worker) for worker, _ in members)
    several_vms = len({vm_of(worker) for worker, _ in alike}) > 1
    most_of_vm = 2 if several_vms else _MOST_OF_A_VM  # two: a VM's own link is measured, too
    by_vm: dict[str, list[Incarnation]] = {}
    for incarnation in alike:
        if incarnation not in before:
            by_vm.setdefault(vm_of(incarnation.worker), []).append(incarnation)
    for vm, newcomers in by_vm.items():
        members += newcomers[: max(0, most_of_vm - num_of_vm[vm])]
    return members[:_MOST_MEMBERS]


def _knows_most(ready: Sequence[WorkerReport]) -> list[Incarnation]:
    """One worker: of those that took part in the newest generation, the first."""
    best = max(ready, key=lambda w: w.profiling.generation if w.profiling is not None else -1, default=None)
    return [incarnation_of(best)] if best is not None else []
