"""The recipe: a generation of kind `profile` measures the model, once for a job.

The first worker that is there is such a generation by itself. As with all others, newcomers and losses mean
the next one, and survivors bring what they have measured. Rank 0 reports what was found, or what an earlier
job left in the store. Links are assumed where one worker is alone, and after several could not measure
theirs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....morphing import too_deep
from ....protocol.messages import Phase, Profile, WorkerReport
from ....simulator import InvalidCalibration, Measurements
from ....simulator.calibration.assembly import profile_of
from ..commands import StoreCalibration
from ..facts import GenerationClosed, GenerationKind, GenerationPlanned, JobEnded, RecipeFixed, WorkerFailed
from ..state import Generation, JobState, Seat, vm_of
from ..turn import Turn, has_ended, seat_of
from ..vms import VmStatus
from . import ending, generations, starting

_MOST_MEMBERS = 8
_MOST_OF_A_VM = 4
_MOST_BROKEN = 2  # generations of several members; then one worker does the rest alone


def fix_recipe(turn: Turn) -> None:
    """Take the recipe that was found, else see that a generation is at it."""
    if not turn.state.active:
        return
    if turn.state.recipe is None and not _found(turn):
        _close_failed(turn)
        _plan(turn)
    _refuse_too_shallow(turn)


# ---- what was found ----------------------------------------------------------------------------------------


def _found(turn: Turn) -> bool:
    """Whether somebody reports what the recipe can be fixed by, which then is done."""
    for _, worker in turn.reports():
        found = worker.profile
        if found is None or worker.worker in turn.state.unfit:
            continue
        try:
            measured = Measurements.from_json(found.measurements) if found.measurements is not None else None
        except InvalidCalibration as error:
            _refuse(turn, worker, f"what it measured cannot be read: {error}")
            continue
        assumed = measured is not None and not found.stored and _is_assumed(turn, measured)
        if not assumed or not _awaits_others(turn, worker):
            _fix(turn, found, measured, assumed=assumed)
            return True
    return False


def _is_assumed(turn: Turn, measured: Measurements) -> bool:
    """Whether the links are of one machine, though the job may have several workers."""
    assert turn.state.spec is not None, "what is measured was submitted"
    several = turn.state.spec.resources.most_workers > 1
    return several and any(wire.source == "loopback" for wire in measured.wires)


def _awaits_others(turn: Turn, worker: WorkerReport) -> bool:
    """Whether others are there, or soon may be, to measure links with: assumed ones serve no other job."""
    state = turn.state
    if state.broken_profiles >= _MOST_BROKEN:
        return False
    if len(_members(_ready(turn), ())) > 1 or (state.profile is not None and len(state.profile.members) > 1):
        return True
    coming = any(vm.vm != vm_of(worker.worker) for vm in state.live_vms if vm.status is not VmStatus.NOTICED)
    return coming and turn.now - turn.vitals.moved_at(seat_of(worker)) < turn.timing.settle_s


def _fix(turn: Turn, found: Profile, measured: Measurements | None, *, assumed: bool) -> None:
    assert turn.state.spec is not None, "what is measured was submitted"
    spec = turn.state.spec
    if measured is not None and not found.stored and spec.parallelism.microbatch_size is None:
        chosen = profile_of(  # rank 0 knows no memory but its own
            measured,
            found.recipe,
            wanted=None,
            memory_bytes=_least_memory(turn.state),
            most_workers=spec.resources.most_workers,
        )
        found = chosen.model_copy(update={"note": found.note})
    refusal = starting.refusal(turn, found.recipe)
    if refusal:
        ending.end(turn, JobEnded(at=turn.now, status="failed", reason=refusal))
        return
    turn.fact(
        RecipeFixed(
            at=turn.now,
            recipe=starting.with_bits(turn, found.recipe),
            calibration=found.calibration,
            measurements=found.measurements,
            stored=found.stored,
            note=found.note,
        )
    )
    if found.measurements is not None and not found.stored and not assumed:
        turn.command(StoreCalibration(key=f"{turn.state.job}/calibration"))


def _least_memory(state: JobState) -> int:
    """Of any worker that there is, in bytes."""
    assert state.spec is not None, "what is measured was submitted"
    sizes = [int(device["memory_bytes"]) for vm in state.live_vms for device in vm.devices]
    cap = state.spec.resources.device_memory
    return min([*sizes, cap] if cap is not None else sizes)


def _refuse_too_shallow(turn: Turn) -> None:
    """End a job that wants more stages than the model has sections: K and P stay as they are. Trainers refuse
    it where they cut the model; what was cut before may come from a store."""
    state = turn.state
    depth = state.spec.parallelism.pipeline_parallel_degree if state.spec is not None else None
    if state.recipe is not None and depth is not None and depth > state.recipe.num_sections:
        reason = f"parallelism.{too_deep(depth, state.recipe.num_sections)}"
        ending.end(turn, JobEnded(at=turn.now, status="failed", reason=reason))


# ---- the generation ----------------------------------------------------------------------------------------


def _close_failed(turn: Turn) -> None:
    profile = turn.state.profile
    if profile is None:
        return
    if profile.opened_at is None:
        reason = generations.why_not_opened(turn, profile)
        _refuse_older(turn, profile)
    else:
        reason = _why_over(turn, profile)
    if reason:
        kind, number = GenerationKind.PROFILE, profile.number
        turn.fact(GenerationClosed(at=turn.now, kind=kind, number=number, reason=reason))
        turn.vitals = replace(turn.vitals, broken_since=None)


def _why_over(turn: Turn, profile: Generation) -> str:
    """Why the generation cannot go on; empty if it can."""
    lost = generations.why_lost(turn, profile.members)
    if lost:
        return lost
    reports = [report for seat in profile.members if (report := turn.report_of(seat)) is not None]
    broken = {
        report.worker: told.broken
        for report in reports
        if (told := report.profiling) is not None and told.generation == profile.number and told.broken
    }
    if not broken:
        turn.vitals = replace(turn.vitals, broken_since=None) if turn.vitals.broken_since else turn.vitals
        return ""
    since = turn.vitals.broken_since or turn.now
    turn.vitals = replace(turn.vitals, broken_since=since)
    if turn.now - since < turn.timing.suspect_grace_s:
        return ""  # who has died is known soon
    return f"broken at {', '.join(sorted(broken))}: {min(broken.items())[1]}"


def _refuse_older(turn: Turn, profile: Generation) -> None:
    """Trainers that know nothing of such generations never get ready for one."""
    if turn.isolated or turn.elapsed_s(profile.planned_at) <= turn.timing.prepare_timeout_s:
        return
    for seat in generations.late(turn, profile):
        report = turn.report_of(seat)
        if report is not None and report.profiling is None:
            _refuse(turn, report, "it is of a version that measures models in another way")


def _refuse(turn: Turn, worker: WorkerReport, why: str) -> None:
    """The worker takes no part in the job."""
    name, incarnation = seat_of(worker)
    turn.fact(
        WorkerFailed(
            at=turn.now, worker=name, incarnation=incarnation, kind="recipe", message=why, own_steps=0
        )
    )


def _plan(turn: Turn) -> None:
    """Plan the first one, the next after one that was closed, or one with newcomers."""
    state = turn.state
    before = state.profile.members if state.profile is not None else ()
    if state.profile is not None and not _takes_newcomers(turn, state.profile):
        return
    members = _members(_ready(turn), before)
    if state.broken_profiles >= _MOST_BROKEN:
        members = [] if before else members[:1]
    new = [worker for worker, incarnation in members if (worker, incarnation) not in before]
    if not new:
        return
    again = "again" if state.profiler is not None else "start"
    turn.fact(
        GenerationPlanned(
            at=turn.now,
            kind=GenerationKind.PROFILE,
            number=state.last_profile + 1,
            cause=f"{', '.join(sorted(new))} joined" if before else again,
            plan={},
            members=tuple(members),
            predicted_s=None,
            detected_at=turn.now,
            decided_s=0.0,
        )
    )


def _takes_newcomers(turn: Turn, profile: Generation) -> bool:
    """Whether there is something left that more members would help with."""
    first = turn.report_of(profile.members[0])
    told = first.profiling if first is not None else None
    if first is None or told is None or profile.opened_at is None or told.generation != profile.number:
        return False
    return told.stage == "sections" or first.profile is not None  # by one alone: its links are assumed


def _ready(turn: Turn) -> list[WorkerReport]:
    """Workers with nothing else to do; of those, only whoever knows such generations, if any does."""
    ready = [
        worker
        for vm, worker in turn.reports()
        if worker.phase in (Phase.IDLE, Phase.PROFILING)
        and vm.status is VmStatus.JOINED
        and not has_ended(worker)
        and not turn.is_away(seat_of(worker))
        and worker.worker not in turn.state.unfit
        and turn.vitals.left_out.get(seat_of(worker), turn.now) <= turn.now
    ]
    return [worker for worker in ready if worker.profiling is not None] or ready


def _members(ready: Sequence[WorkerReport], before: Sequence[Seat]) -> list[Seat]:
    """Some of the workers, from several VMs if there are; those of the generation `before` come first, in
    their order: rank 0 stays who it was."""
    alike = [worker for worker in ready if worker.trainer_protocol == ready[0].trainer_protocol]
    ranks = {seat: rank for rank, seat in enumerate(before)}
    by_vm: dict[str, list[Seat]] = {}
    for seat in sorted(map(seat_of, alike), key=lambda seat: ranks.get(seat, len(before))):
        by_vm.setdefault(vm_of(seat[0]), []).append(seat)
    each = min(_MOST_OF_A_VM, max(1, _MOST_MEMBERS // max(1, len(by_vm))))
    if len(by_vm) > 1:
        each = max(each, 2)  # a VM's own link, too
    members = [seat for seats in by_vm.values() for seat in seats[:each]]
    return members[:_MOST_MEMBERS]
