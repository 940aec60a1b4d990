"""When the planner is asked, for which workers, and what is made of its answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ....pipeline.plan import Plan
from ....protocol.messages import Phase, WorkerReport
from .. import worth
from ..commands import ComputePlan, WorkerSlot
from ..events import PlanComputed
from ..facts import GenerationPlanned, HoldChanged, PlanImpossible
from ..state import Generation, JobState, Seat, vm_of
from ..turn import Turn, has_ended, seat_of
from ..vitals import Planning
from ..vms import Vm, VmStatus
from . import breaks, fitness, versions

# One that was idle before it ever took part holds nothing; one that left has handed over what it had.
_HOLDS_STATE = (Phase.IDLE, Phase.FORMING, Phase.RUNNING, Phase.BROKEN, Phase.HELD, Phase.FINISHED)
_READY = (Phase.LEFT, *_HOLDS_STATE)


def take(turn: Turn) -> None:
    """The planner's answer: plan the generation, or say why none can run."""
    event, state = turn.event, turn.state
    if not isinstance(event, PlanComputed) or event.generation != state.last_generation + 1:
        return
    asked = turn.vitals.planning
    if asked is not None and not _is_about(event, asked):
        _take_late(turn, event, asked)
        return
    turn.vitals = replace(turn.vitals, planning=None, answered_at=turn.now)
    if not _wanted(turn) or state.planned is not None or not _settled(state.current):
        return
    if _awaits_members(turn):
        return  # asked by the manager before
    if asked is not None and asked.reconsider and not _is_worth_it(turn, event):
        return
    if event.plan is None:
        if asked is not None:
            turn.vitals = replace(turn.vitals, planned_for=asked.seats)
            _say_impossible(turn, event.reason or "the planner gave no reason")
        return
    _accept(turn, event, event.plan, asked)


def _is_about(event: PlanComputed, asked: Planning) -> bool:
    return event.asked == frozenset(worker for worker, _ in asked.seats)


def _take_late(turn: Turn, event: PlanComputed, asked: Planning) -> None:
    """The answer to an earlier question than the one that is pending: good while its workers are there."""
    if not _wanted(turn) or turn.state.planned is not None or not _settled(turn.state.current):
        return
    was_reconsidered = asked.reconsider or event.current_s is not None
    if event.plan is not None and (not was_reconsidered or _is_worth_it(turn, event)):
        _accept(turn, event, event.plan, asked)


def plan(turn: Turn) -> None:
    """Ask the planner when the workers that there are call for another plan than the one that runs."""
    state = turn.state
    if not _wanted(turn) or state.spec is None or state.recipe is None or turn.isolated:
        return
    if _awaits_members(turn):
        return
    ready = _ready(turn)
    if versions.give_way(turn, ready, partial(_enough, turn)):
        return
    usable = versions.alike(turn, ready, partial(_enough, turn))
    seats = frozenset(usable)
    if seats - turn.vitals.usable:
        turn.vitals = replace(turn.vitals, grown_at=turn.now)
    if seats != turn.vitals.usable:
        turn.vitals = replace(turn.vitals, usable=seats)
    asked = turn.vitals.planning
    # A question about workers that are gone meanwhile is asked anew.
    waiting = (
        asked is not None
        and asked.seats <= seats
        and turn.now - asked.asked_at < turn.timing.planning_timeout_s
    )
    if waiting or state.planned is not None or not _settled(state.current):
        return
    if not _enough(turn, usable):
        _too_few(turn)
        return
    if not usable:
        return
    need = _need(turn, seats)
    if need is not None and fitness.fix_bits(turn, usable.values()):
        usable = _usable(turn)  # without those whose bits differ
        if not _enough(turn, usable):
            return
    if need is not None:
        _ask(turn, usable, *need)
    elif _paces_changed(turn):
        turn.vitals = replace(turn.vitals, reconsidered_at=turn.now)
        _ask(turn, usable, "paces changed", state.paces_changed_at, reconsider=True)
    elif seats == turn.vitals.planned_for:
        _hold_if_noticed(turn, "no plan does without the VMs that are under notice")


def _enough(turn: Turn, usable: Iterable[Seat]) -> bool:
    """Whether these workers may train; to save what they hold, any number will do."""
    assert turn.state.spec is not None, "plans are made for submitted jobs"
    num_vms = len({vm_of(worker) for worker, _ in usable})
    return num_vms >= turn.state.spec.resources.min_nodes or not turn.state.active or _only_saves(turn)


def _wanted(turn: Turn) -> bool:
    return turn.state.active or turn.must_save()


def _settled(current: Generation | None) -> bool:
    return current is None or current.formed is not None


def _awaits_members(turn: Turn) -> bool:
    """Whether some who run the generation are yet to be heard by this manager: they would be planned around
    and not told to switch, and the steps that they hold lost."""
    current = turn.state.current
    return current is not None and bool(turn.awaited(vm_of(worker) for worker, _ in current.seats))


def _usable(turn: Turn) -> dict[Seat, WorkerReport]:
    """The workers that a plan may use, by seat."""
    return versions.alike(turn, _ready(turn), partial(_enough, turn))


def _ready(turn: Turn) -> dict[Seat, WorkerReport]:
    """The workers of all versions that some plan may use, in the order in which their VMs were requested.

    To save what is held, also those that are to hand over will do: they live.
    """
    saves = turn.must_save() or _only_saves(turn)
    return {
        seat_of(worker): worker
        for vm, worker in turn.reports()
        if (vm.status is VmStatus.JOINED or (saves and vm.joined)) and _is_usable(turn, vm, worker)
    }


def _only_saves(turn: Turn) -> bool:
    """Whether too few VMs stay to train on, and steps are held that no checkpoint has: they are saved before
    the other VMs go."""
    state = turn.state
    if not state.active or state.current is not None or state.spec is None:
        return False
    if not any(vm.status is VmStatus.NOTICED for vm in state.live_vms):
        return False
    published = state.published[-1].step if state.published else 0
    staying = {
        vm.vm
        for vm, worker in turn.reports()
        if vm.status is VmStatus.JOINED and _is_usable(turn, vm, worker)
    }
    return len(staying) < state.spec.resources.min_nodes and turn.held_step() > published


def _is_usable(turn: Turn, vm: Vm, worker: WorkerReport) -> bool:
    state, seat = turn.state, seat_of(worker)
    if worker.phase not in _READY or has_ended(worker) or worker.worker in state.unfit:
        return False
    if state.failed.get(worker.worker, -1) >= worker.incarnation:
        return False
    if worker.phase is Phase.IDLE and (state.recipe is None or worker.graph_hash != state.recipe.graph_hash):
        return False  # it has not traced the model under the recipe yet
    if worker.phase is Phase.IDLE and not fitness.is_shown(state, worker):
        return False
    if turn.vitals.left_out.get(seat, turn.now) > turn.now:
        return False
    if vm.vm in turn.vitals.unheard:
        return False
    # With nothing running, a closed connection is reason enough not to count on a VM.
    return state.current is not None or turn.vitals.pulses[vm.vm].closed_at is None


def _need(turn: Turn, seats: frozenset[Seat]) -> tuple[str, float] | None:
    """Why another plan is needed and when that was seen; None: it is not, or not yet."""
    state, vitals, timing = turn.state, turn.vitals, turn.timing
    current = state.current
    if current is None:
        retry = turn.now - vitals.answered_at >= timing.replan_s
        if not (seats - vitals.planned_for or retry) or _expecting_word(turn) or breaks.rests(turn, seats):
            return None
        begins = state.last_generation == state.started_after
        if begins and _gathering(turn, seats):
            return None
        cause = "workers are back" if not begins else "resumed" if state.started_after else "start"
        return vitals.cause or (cause, turn.now)
    if state.head_generation > current.number:
        # The head was swapped for a generation that never opened: this one can publish nothing any more.
        return vitals.cause or ("its checkpoints are fenced off", turn.now)
    noticed = [worker for worker, _ in turn.noticed(current.seats)]
    if noticed and seats != vitals.planned_for:
        return f"notice for {', '.join(noticed)}", turn.now
    if turn.unheard(current.seats):
        return None  # they could not be told to switch: what steps would be cut off
    newcomers = seats - vitals.planned_for - set(current.seats)
    if newcomers and not _gathering(turn, seats):
        return f"{', '.join(sorted(worker for worker, _ in newcomers))} joined", vitals.grown_at
    return None


def _paces_changed(turn: Turn) -> bool:
    """Whether workers or sections turned out slower or faster than they were when the plan was made."""
    current = turn.state.current
    changed_at = turn.state.paces_changed_at
    if current is None or not turn.state.active or turn.unheard(current.seats):
        return False
    if changed_at > turn.now and turn.vitals.reconsidered_at > 0:
        return False  # the clock was set back before this manager began; it has asked once
    return changed_at > max(current.planned_at, turn.vitals.reconsidered_at)


def _is_worth_it(turn: Turn, event: PlanComputed) -> bool:
    """Whether another plan saves enough a step, and for long enough, to pay for the change."""
    state = turn.state
    if event.predicted_s is None or not event.current_s or state.current is None or state.spec is None:
        return False
    rest_s = worth.steps_left(turn) * event.current_s
    gain = 1.0 - event.predicted_s / event.current_s
    return gain >= worth.least_gain(turn, turn.timing.worth_it, rest_s)


def _gathering(turn: Turn, seats: frozenset[Seat]) -> bool:
    """Whether more workers are about to be ready, so that one plan can take them all in."""
    ready = {vm_of(worker) for worker, _ in seats}
    awaited = (vm.vm for vm in turn.state.live_vms if vm.status is not VmStatus.NOTICED)
    coming = any(vm not in ready and vm not in turn.vitals.unheard for vm in awaited)
    return coming and turn.now - turn.vitals.grown_at < turn.timing.settle_s


def _expecting_word(turn: Turn) -> bool:
    """Whether VMs may soon tell whether they are alive: after a restart, or when connections just closed."""
    for vm in turn.state.live_vms:
        pulse = turn.vitals.pulses.get(vm.vm)
        if vm.vm in turn.vitals.unheard:
            continue
        if vm.joined and pulse is None:
            return True  # until its first report, or its lease ends
        closed_at = pulse.closed_at if pulse is not None else None
        if closed_at is not None and turn.now - closed_at < turn.reconnection_s():
            return True
    return False


def _too_few(turn: Turn) -> None:
    state = turn.state
    assert state.spec is not None, "plans are made for submitted jobs"
    reason = f"fewer usable VMs than min_nodes ({state.spec.resources.min_nodes})"
    if state.unfit:
        reason += f"; {len(state.unfit)} workers cannot meet the recipe: {state.why_unfit}"
    if state.current is None and (state.last_generation > state.started_after or state.unfit):
        _say_impossible(turn, reason)
    _hold_if_noticed(turn, reason)


def _hold_if_noticed(turn: Turn, reason: str) -> None:
    """Have a checkpoint made before the cloud takes VMs that the plan cannot do without."""
    state = turn.state
    if state.hold or state.current is None:
        return
    if turn.noticed(state.current.seats):
        turn.fact(HoldChanged(at=turn.now, hold=True, reason=reason))


def _say_impossible(turn: Turn, reason: str) -> None:
    if turn.state.impossible != reason:
        number = turn.state.last_generation + 1
        turn.fact(PlanImpossible(at=turn.now, generation=number, reason=reason))


def _ask(
    turn: Turn,
    usable: dict[Seat, WorkerReport],
    cause: str,
    detected_at: float,
    *,
    reconsider: bool = False,
) -> None:
    generation = turn.state.last_generation + 1
    # Asked again after a restart or a timeout, the question may be another: its key has the time in it.
    key = f"{turn.state.job}/plan/{generation}/{round(turn.now * 1000)}"
    slots = tuple(slot_of(turn.state, worker) for worker, _ in usable)
    turn.command(ComputePlan(key=key, generation=generation, workers=slots, reconsider=reconsider))
    asked = Planning(generation, frozenset(usable), turn.now, cause, detected_at, reconsider)
    turn.vitals = replace(turn.vitals, planning=asked)


def slot_of(state: JobState, worker: str) -> WorkerSlot:
    """A worker as the planner is told of it."""
    vm, slow = state.vms[vm_of(worker)], state.slow.get(worker)
    return WorkerSlot(
        worker=worker,
        vm=vm.vm,
        memory_bytes=memory_bytes(state, vm, int(worker.rpartition(".")[2])),
        slowdown=slow.slowdown if slow is not None else 1.0,
    )


def memory_bytes(state: JobState, vm: Vm, index: int) -> int:
    """What the worker of this index on a VM that has joined may use."""
    assert state.spec is not None, "plans are made for submitted jobs"
    has = int(vm.devices[min(index, len(vm.devices) - 1)]["memory_bytes"])
    return min(has, state.spec.resources.device_memory or has)


def _accept(turn: Turn, event: PlanComputed, value: dict[str, Any], asked: Planning | None) -> None:
    """Plan the generation, if all of its workers are still there."""
    ready = {worker.worker: seat_of(worker) for worker in _usable(turn).values()}
    if any(worker not in ready for worker in event.workers) or _left_out_member(turn, event, ready):
        return
    seats = tuple(ready[worker] for worker in event.workers)
    plan = Plan.from_json(
        value
    )  # a planner that answers with an invalid plan is a fault of ours: it may raise
    assert plan.num_workers == len(seats), "the planner names one worker for each rank"
    if asked is not None and _is_about(event, asked):
        considered = asked.seats
    else:
        considered = frozenset(seat for worker, seat in ready.items() if worker in event.asked)
    turn.vitals = replace(turn.vitals, planned_for=considered)
    if _is_same(turn, value, seats):
        turn.vitals = replace(turn.vitals, cause=None)
        return
    cause, detected_at = (asked.cause, asked.detected_at) if asked is not None else ("replanned", turn.now)
    turn.fact(
        GenerationPlanned(
            at=turn.now,
            number=event.generation,
            cause=cause,
            plan=value,
            members=(*seats, *_donors(turn, seats)),
            predicted_s=event.predicted_s,
            detected_at=detected_at,
            decided_s=turn.now - asked.asked_at if asked is not None else 0.0,
            saves_only=turn.must_save() or _only_saves(turn),
        )
    )
    turn.vitals = replace(turn.vitals, cause=None, planning=None)


def _left_out_member(turn: Turn, event: PlanComputed, ready: Mapping[str, Seat]) -> bool:
    """Whether the question left out a worker of the plan that runs, on which one can count again: its notice
    was withdrawn."""
    current = turn.state.current
    if current is None:
        return False
    return any(ready.get(seat[0]) == seat and seat[0] not in event.asked for seat in current.seats)


def _is_same(turn: Turn, value: dict[str, Any], seats: tuple[Seat, ...]) -> bool:
    """Whether the answer is what already runs, so that nothing needs to move."""
    current = turn.state.current
    if current is None or turn.state.head_generation > current.number or set(seats) != set(current.seats):
        return False
    return {**value, "generation": 0} == {**current.plan, "generation": 0}


def _donors(turn: Turn, seats: tuple[Seat, ...]) -> list[Seat]:
    """Living workers outside the plan that may hold sections that others need."""
    used, usable = set(seats), _usable(turn)
    spoken = {usable[seat].trainer_protocol for seat in seats}
    return [
        seat_of(worker)
        for _, worker in turn.reports()
        if worker.phase in _HOLDS_STATE
        and worker.trainer_protocol in spoken
        and worker.generation > 0
        and seat_of(worker) not in used
        and not turn.is_away(seat_of(worker))
        and turn.vitals.left_out.get(seat_of(worker), turn.now) <= turn.now
    ]
