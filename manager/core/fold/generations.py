"""How generations change a job: their plans, their lives, and the checkpoints that they publish."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ....pipeline.plan import shape_of
from ....protocol.messages import CheckpointRef
from ..facts import (
    CheckpointDamaged,
    CheckpointPublished,
    CheckpointRetired,
    CopiesChanged,
    GenerationClosed,
    GenerationFormed,
    GenerationKind,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    GenerationStalled,
    PlanImpossible,
    StacksTaken,
    StateCorrupted,
    StepInterrupted,
    StepMiscounted,
)
from ..state import Generation, Incarnation, JobState, Stall, order_of, order_of_miscount, vm_of, vms_of
from ..strikes.ledger import JOB, forgive_on_progress, strike
from ..strikes.table import Kind, Progress
from . import renting


def _planned(state: JobState, fact: GenerationPlanned) -> JobState:
    profiles = fact.kind is GenerationKind.PROFILE
    members = tuple(Incarnation(*member) for member in fact.members)
    planned = Generation(
        number=fact.number,
        cause=fact.cause,
        plan=fact.plan,
        shape="" if profiles else shape_of(fact.plan),
        members=members,
        num_workers=len(members if profiles else fact.plan["ranges"]),
        detected_at=fact.detected_at,
        planned_at=fact.at,
        decided_s=fact.decided_s,
        predicted_s=fact.predicted_s,
        saves_only=fact.saves_only,
        best_until=fact.best_until,
        kind=fact.kind,
    )
    if profiles:
        last = max(state.last_profile, fact.number)
        return state.changed(profile=planned, profiler=members[0], last_profile=last)
    return state.changed(planned=planned, last_generation=fact.number, impossible=None)


def _prepared(state: JobState, fact: GenerationPrepared) -> JobState:
    if state.planned is None or state.planned.number != fact.number:
        return state
    planned = replace(state.planned, endpoint=fact.endpoint, prepared_at=fact.at)
    return state.changed(planned=planned, head_generation=max(state.head_generation, fact.number))


def _opened(state: JobState, fact: GenerationOpened) -> JobState:
    if fact.kind is GenerationKind.PROFILE:
        return _profile_opened(state, fact)
    if state.planned is None or state.planned.number != fact.number:
        return state
    history = state.history
    if state.current is not None:
        history = _with_closed(history, state.current, fact.at, f"superseded by {fact.number}")
    current = replace(state.planned, endpoint=fact.endpoint, opened_at=fact.at, checkpoints=fact.checkpoints)
    base = fact.checkpoints[0] if fact.checkpoints else None
    head = max(state.head_generation, fact.number)
    return state.changed(
        planned=None,
        current=current,
        history=history,
        base=base,
        hold=False,
        head_generation=head,
        opened_generation=fact.number,
        restarting=False,
    )


def _profile_opened(state: JobState, fact: GenerationOpened) -> JobState:
    if state.profile is None or state.profile.number != fact.number:
        return state
    return state.changed(profile=replace(state.profile, endpoint=fact.endpoint, opened_at=fact.at))


def _profile_closed(state: JobState, fact: GenerationClosed) -> JobState:
    if state.profile is None or state.profile.number != fact.number:
        return state
    strikes = state.strikes
    if state.profile.opened_at is not None and len(state.profile.members) > 1:
        strikes = strike(strikes, Kind.PROFILE, JOB, fact.at, why=fact.reason)
    return state.changed(profile=None, strikes=strikes)


def _interrupted(state: JobState, fact: StepInterrupted) -> JobState:
    if state.current is None or state.current.number != fact.number:
        return state
    current = replace(state.current, interrupted=fact.superseded)
    return state.changed(current=current, abandoned=max(state.abandoned, fact.superseded))


def _formed(state: JobState, fact: GenerationFormed) -> JobState:
    if state.current is None or state.current.number != fact.number:
        return state
    formed = replace(state.current, formed=fact.formed, formed_at=fact.at, lost_steps=fact.lost_steps)
    state = renting.without_enough(state, formed)
    if _has_newer_vm(state, formed, Kind.UNFIT_VM):
        state = state.changed(strikes=forgive_on_progress(state.strikes, Progress.NEWER_FORMED))
    if _shows_fit_vms(state, formed):
        state = state.changed(newest_unfit="")
    ranges = ((start, stop) for start, stop in formed.plan["ranges"])
    hosts = MappingProxyType(dict(zip(formed.incarnations, ranges, strict=True)))
    return _progressed(state.changed(current=formed, hosts=hosts, hosts_plan=formed.plan), fact.formed.step)


def _has_newer_vm(state: JobState, generation: Generation, kind: Kind) -> bool:
    """Whether a VM takes part that joined since one was last replaced for this."""
    vms = (state.vms.get(vm) for vm in vms_of(generation))
    since = state.strikes.of(kind).since
    return any(vm is not None and (vm.joined_at or 0.0) > since for vm in vms)


def _shows_fit_vms(state: JobState, generation: Generation) -> bool:
    """Whether a VM takes part that is as new as the newest that was unfit."""
    unfit = state.vms.get(state.newest_unfit)
    if unfit is None:
        return False
    vms = (state.vms.get(vm_of(worker)) for worker, _ in generation.incarnations)
    return any(vm is not None and vm.is_as_new_as(unfit) for vm in vms)


def _closed(state: JobState, fact: GenerationClosed) -> JobState:
    if fact.kind is GenerationKind.PROFILE:
        return _profile_closed(state, fact)
    if state.planned is not None and state.planned.number == fact.number:
        history = _with_closed(state.history, state.planned, fact.at, fact.reason)
        # With an older generation still stepping, only the preparation ends: nobody must be woken mid-step.
        abandoned = state.abandoned if state.current is not None else fact.number
        return state.changed(planned=None, history=history, abandoned=abandoned)
    if state.current is not None and state.current.number == fact.number:
        history = _with_closed(state.history, state.current, fact.at, fact.reason)
        return state.changed(current=None, history=history, abandoned=fact.number)
    return state


def _stalled(state: JobState, fact: GenerationStalled) -> JobState:
    strikes = strike(state.strikes, Kind.STALL, JOB, fact.at, by=[fact.generation], step=fact.step)
    return state.changed(stall=Stall(fact.number, fact.generation, fact.suspects), strikes=strikes)


def _stacks_taken(state: JobState, fact: StacksTaken) -> JobState:
    if state.stall is None or state.stall.number != fact.number:
        return state
    return state.changed(stall=replace(state.stall, seen=state.stall.seen | {fact.worker}))


def _miscounted(state: JobState, fact: StepMiscounted) -> JobState:
    return state.changed(miscounts=state.miscounts + 1, newest_miscount=order_of_miscount(fact.miscount))


def _corrupted(state: JobState, fact: StateCorrupted) -> JobState:
    found, strikes = fact.corruption, state.strikes
    why = f"at step {found.step}, sections {', '.join(map(str, found.sections))}"
    vms = sorted({vm_of(worker) for worker in found.suspects} & state.vms.live.keys())
    for kind, subject in ((Kind.DIFFERENCE, JOB), *((Kind.CORRUPT_STATE, vm) for vm in vms)):
        strikes = strike(strikes, kind, subject, fact.at, by=[found.generation], step=found.step, why=why)
    return state.changed(strikes=strikes, void_until=_void_until(state, found.generation))


def _void_until(state: JobState, found: int) -> int:
    """The newest generation whose members may hold state of generation `found`, in which hosts differed.

    A member that left it before its peers found the difference may have gone on from its state, in all
    generations that were opened since, up to the first that began from the store.
    """
    if found <= state.void_until:
        return state.void_until
    void = found
    current = () if state.current is None else (state.current,)
    for later in (*state.history, *current):
        if later.opened_at is None or later.number <= found:
            continue
        if later.formed is not None and later.formed.rung != "peers":
            break
        void = later.number
    return void


def _with_closed(
    history: tuple[Generation, ...], generation: Generation, at: float, reason: str
) -> tuple[Generation, ...]:
    """The history with one more. Members of those before the last that was opened are of no use any more."""
    closed = replace(generation, plan={}, ended_at=at, end_reason=reason)
    kept = next((n for n in range(len(history), 0, -1) if not history[n - 1].members), 0)
    older = history[kept:]
    if closed.opened_at is not None:
        older = tuple(replace(before, members=()) for before in older)
    return (*history[:kept], *older, closed)


def _plan_impossible(state: JobState, fact: PlanImpossible) -> JobState:
    return state.changed(impossible=fact.reason)


def _copies_changed(state: JobState, fact: CopiesChanged) -> JobState:
    few = fact.copies < fact.wanted
    return state.changed(few_copies=fact.copies if few else None, enough_vms=fact.enough_vms if few else None)


def _published(state: JobState, fact: CheckpointPublished) -> JobState:
    if fact.checkpoint in state.published:
        return state
    published = tuple(sorted((*state.published, fact.checkpoint), key=order_of))
    current = state.current
    if fact.checkpoint.step > state.saved_step:
        state = state.changed(strikes=forgive_on_progress(state.strikes, Progress.SAVED))
    progressed = fact.checkpoint.step > state.progress_step
    if progressed and current is not None and current.number == fact.checkpoint.generation:
        state = _prove(state, current)
    return _progressed(state.changed(published=published), fact.checkpoint.step)


def _prove(state: JobState, generation: Generation) -> JobState:
    """The generation's VMs have committed steps: earlier deaths on them are forgotten."""
    strikes = forgive_on_progress(state.strikes, Progress.OWN_STEP, vms_of(generation))
    if _has_newer_vm(state, generation, Kind.WORN_VM):
        strikes = forgive_on_progress(strikes, Progress.NEWER_STEPPED)
    return state.changed(strikes=strikes)


def _progressed(state: JobState, step: int) -> JobState:
    if step <= state.progress_step:
        return state
    return state.changed(progress_step=step, strikes=forgive_on_progress(state.strikes, Progress.STEP))


def _damaged(state: JobState, fact: CheckpointDamaged) -> JobState:
    """It leaves `published`, which lists what can be gone on from; at least `instead` stays there."""
    readable = tuple(c for c in state.published if c != fact.checkpoint)
    base = fact.instead if state.base == fact.checkpoint else state.base
    return state.changed(published=readable, base=base, damaged=(*state.damaged, fact))


def _retired(state: JobState, fact: CheckpointRetired) -> JobState:
    kept: tuple[CheckpointRef, ...] = tuple(c for c in state.published if c != fact.checkpoint)
    damaged = tuple(found for found in state.damaged if found.checkpoint != fact.checkpoint)
    retired = max(state.retired, order_of(fact.checkpoint))
    return state.changed(published=kept, damaged=damaged, retired=retired)


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    GenerationPlanned: _planned,
    GenerationPrepared: _prepared,
    GenerationOpened: _opened,
    StepInterrupted: _interrupted,
    GenerationFormed: _formed,
    GenerationStalled: _stalled,
    StacksTaken: _stacks_taken,
    StepMiscounted: _miscounted,
    StateCorrupted: _corrupted,
    GenerationClosed: _closed,
    PlanImpossible: _plan_impossible,
    CopiesChanged: _copies_changed,
    CheckpointPublished: _published,
    CheckpointDamaged: _damaged,
    CheckpointRetired: _retired,
}
