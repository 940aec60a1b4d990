"""Whether anything gets on, and what follows where nothing does.

A trainer's beats come from a thread of their own, and prove that the process lives; that it gets on, its
*progress* proves: a count of operations, samples and pieces of what it loads and saves. The progress of any
member resets the bound of its generation, since a step that one cannot finish stops all. The bound follows
from what a step was predicted and measured to take; waiting for data or for the store has bounds of its own.

When it is exceeded, the stacks of all members are asked for, and then the generation is closed. Members whose
own work stands still are suspected and left out for a while. Where all wait for each other nobody is: the
links are tried when the next generation forms. If that one makes no progress at the same step either, whoever
is suspected, the bound is doubled: one operation may take longer than was predicted.

A member of a closed generation sees that it is closed between two operations. So it has the time that its
operation may take, and is ended after that; this does not count as a failure of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...worker.messages import At, Phase, WorkerReport
from ..events import Tick
from ..facts import EndReason, GenerationStalled, StacksTaken, WorkerFailed
from ..state import Generation, JobState, Vm
from . import generations
from .turn import Timing, Turn, has_ended, seat_of
from .vitals import Vitals

_OWN_WORK = frozenset((At.COMPUTING, At.DATA, At.STORE))
_MOST_DOUBLINGS = 6
_MOST_STACKS = 64  # kept of one stall
_WORTH_TELLING_S = 30.0
_MOST_TOLD = 8  # workers


@dataclass(frozen=True, slots=True)
class Standstill:
    """How long a generation's members have made no progress, and what each was at when it last told."""

    silent_s: float
    bound_s: float
    standing: Mapping[str, str]

    def describe(self) -> str | None:
        """For a user, long before anything follows; None while there is nothing to say."""
        if self.silent_s < min(_WORTH_TELLING_S, self.bound_s / 3):
            return None
        at = [f"{worker} is {where}" for worker, where in list(self.standing.items())[:_MOST_TOLD]]
        if len(self.standing) > _MOST_TOLD:
            at.append(f"and {len(self.standing) - _MOST_TOLD} more")
        told = f"no progress for {self.silent_s:.0f} s of {self.bound_s:.0f} s"
        return ": ".join([told, ", ".join(at)] if at else [told])


def watch(turn: Turn) -> None:
    """At each tick: trainers that stand still alone are replaced, a generation that does is closed."""
    if not isinstance(turn.event, Tick) or turn.isolated or turn.state.finished is not None:
        return
    for vm, worker in turn.reports():
        _replace_stuck(turn, vm, worker)
    current = turn.state.current
    found = standstill(turn.state, turn.vitals, turn.now, turn.timing)
    if found is not None or turn.vitals.standstill is not None:
        turn.vitals = replace(turn.vitals, standstill=found)
    if current is not None and not turn.dead(current.members):
        _watch_generation(turn, current, found)


def record_stacks(turn: Turn) -> None:
    """The stacks that were asked for, once for each member."""
    stall = turn.state.stall
    if stall is None:
        return
    for vm in turn.state.live_vms:
        pulse = turn.vitals.pulses.get(vm.vm)
        for stacks in pulse.report.stacks if pulse is not None else ():
            seen = turn.state.stall.seen if turn.state.stall is not None else frozenset[str]()
            if stacks.number == stall.number and stacks.worker not in seen:
                text = stacks.text if len(seen) < _MOST_STACKS else ""
                turn.fact(StacksTaken(at=turn.now, number=stall.number, worker=stacks.worker, text=text))


def standstill(state: JobState, vitals: Vitals, now: float, timing: Timing) -> Standstill | None:
    """How the open generation stands; None if no member is to make progress."""
    current = state.current
    if current is None or vitals.isolated_since is not None:
        return None
    seats = current.seats if current.formed is not None else current.members
    reports = [(seat, vitals.report_of(seat)) for seat in seats]
    active = {seat[0]: r for seat, r in reports if r is not None and _works_in(r, current)}
    if current.formed is not None and not active:
        return None
    # What members still do in the generation before gets none nearer to forming this one.
    getting_on = seats if current.formed is not None else [seat for seat in seats if seat[0] in active]
    moved_at = max((vitals.moved_at(seat) for seat in getting_on), default=vitals.started_at)
    standing = {name: where for name in active if (where := vitals.at_of(name)) is not None}
    bound_s = _bound_s(state, vitals, current, set(standing.values()), timing)
    return Standstill(now - moved_at, bound_s, {name: where.value for name, where in standing.items()})


def _works_in(worker: WorkerReport, generation: Generation) -> bool:
    return worker.generation == generation.number and worker.phase in (Phase.FORMING, Phase.RUNNING)


def _bound_s(
    state: JobState, vitals: Vitals, current: Generation, standing: set[At], timing: Timing
) -> float:
    """For how long the open generation may make no progress."""
    if current.formed is None:
        bound_s = timing.form_timeout_s
    else:
        bound_s = _step_bound_s(vitals, current, vitals.newest_step, timing)
    return _waiting_bound_s(bound_s, standing, timing) * 2 ** _doublings(state, vitals, current)


def _closed_bound_s(turn: Turn, worker: WorkerReport) -> float:
    """For how long a member of a closed generation may make no progress, by what it is at: it sees only
    between two operations that the generation is closed."""
    generation = next((g for g in reversed(turn.state.history) if g.number == worker.generation), None)
    bound_s = turn.timing.progress_floor_s
    if generation is not None:
        bound_s = _step_bound_s(turn.vitals, generation, worker.step, turn.timing)
        bound_s *= 2 ** _doublings(turn.state, turn.vitals, generation)
    if worker.phase is Phase.FORMING:
        bound_s = max(bound_s, turn.timing.form_timeout_s)
    where = turn.vitals.at_of(worker.worker)
    return _waiting_bound_s(bound_s, {where} if where is not None else set(), turn.timing)


def _step_bound_s(vitals: Vitals, generation: Generation, step: int, timing: Timing) -> float:
    """From what its steps were predicted and measured to take; longer until its first step is done."""
    step_s = max(generation.predicted_s or 0.0, vitals.measured_s(generation.number))
    bound_s = max(timing.progress_floor_s, timing.progress_factor * step_s)
    first = generation.formed is not None and step <= generation.formed.step
    return bound_s * timing.first_step_factor if first else bound_s


def _waiting_bound_s(bound_s: float, standing: set[At], timing: Timing) -> float:
    """The bound, where some wait for what lies outside the job."""
    if At.DATA in standing:
        bound_s = max(bound_s, timing.data_wait_s)
    if At.STORE in standing:
        bound_s = max(bound_s, timing.store_wait_s)
    return bound_s


def _doublings(state: JobState, vitals: Vitals, generation: Generation) -> int:
    """How many generations before this one made no progress at the step that it is to do.

    Whoever was suspected: each host in turn may have needed longer for one operation than was predicted.
    """
    stall = state.stall
    if stall is None or vitals.newest_step > stall.step:
        return 0
    repeats = stall.doublings + (1 if stall.generation < generation.number else 0)
    return min(repeats, _MOST_DOUBLINGS)


def _watch_generation(turn: Turn, current: Generation, found: Standstill | None) -> None:
    silent_s = found.silent_s if found is not None else 0.0
    if current.formed is None:
        silent_s = min(silent_s, generations.forms_since(turn, current))
    asked = turn.vitals.asked_for_stacks
    if found is None or silent_s <= found.bound_s:
        if asked is not None:
            turn.vitals = replace(turn.vitals, asked_for_stacks=None)
        return
    if asked is None or asked[0] != current.number:
        _ask_for_stacks(turn, current, found, silent_s)
        return
    stall = turn.state.stall
    all_came = stall is not None and stall.seen >= {worker for worker, _ in current.seats}
    if stall is not None and (all_came or turn.now - asked[1] >= turn.timing.stacks_s):
        for_s = max(turn.timing.left_out_s, 2 * turn.timing.progress_floor_s)
        generations.leave_out(turn, [s for s in current.members if s[0] in stall.suspects], for_s)
        if current.formed is None:
            generations.leave_out(turn, generations.idle_members(turn, current))
        what = "did not form: " if current.formed is None else ""
        generations.close(turn, f"{what}no progress for {silent_s:.0f} s", turn.now)


def _ask_for_stacks(turn: Turn, current: Generation, found: Standstill, silent_s: float) -> None:
    stall = turn.state.stall
    turn.vitals = replace(turn.vitals, asked_for_stacks=(current.number, turn.now))
    turn.fact(
        GenerationStalled(
            at=turn.now,
            generation=current.number,
            number=stall.number + 1 if stall is not None else 1,
            step=turn.vitals.newest_step,
            silent_s=silent_s,
            bound_s=found.bound_s,
            standing=dict(found.standing),
            suspects=_suspects(turn, current, found),
            doublings=_doublings(turn.state, turn.vitals, current),
        )
    )


def _suspects(turn: Turn, current: Generation, found: Standstill) -> tuple[str, ...]:
    """Those whose own work stands still while others wait; nobody, if all work or all wait."""
    own = tuple(name for name, where in found.standing.items() if At(where) in _OWN_WORK)
    members = {worker for worker, _ in current.seats}
    return own if members - set(own) else ()


def _replace_stuck(turn: Turn, vm: Vm, worker: WorkerReport) -> None:
    """Have a trainer ended that starts or profiles for too long, or does not leave a closed generation."""
    seat = seat_of(worker)
    if vm.vm in turn.vitals.unheard or has_ended(worker) or turn.state.failed.get(seat[0], -1) >= seat[1]:
        return
    bound_s, closed = _own_bound_s(turn, worker)
    silent_s = turn.now - turn.vitals.moved_at(seat)
    if bound_s is None or silent_s <= bound_s:
        return
    if closed and turn.elapsed_s(turn.vitals.closed_at) <= turn.timing.progress_floor_s:
        return  # it is given time to see that its generation is closed
    where = turn.vitals.at_of(worker.worker)
    at = f" ({where.value})" if where is not None else ""
    message = f"no progress for {silent_s:.0f} s while {worker.phase.value}{at}"
    turn.fact(
        WorkerFailed(
            at=turn.now,
            worker=worker.worker,
            incarnation=worker.incarnation,
            kind="stuck",
            message=message,
            step=worker.step,
            counted=not closed,
        )
    )
    if worker.incarnation == 0 and vm.live:  # no trainer runs yet: the VM's own setup comes to no end
        turn.end_vm(vm.vm, EndReason.LEFT, message)


def _own_bound_s(turn: Turn, worker: WorkerReport) -> tuple[float | None, bool]:
    """For how long this trainer alone may make no progress, and whether its generation is closed.

    No time where it works in an open generation: there the progress of any member counts.
    """
    if worker.phase is Phase.STARTING:
        return turn.timing.start_wait_s, False
    if worker.phase is Phase.PROFILING:
        return turn.timing.profile_wait_s, False
    if worker.phase in (Phase.FORMING, Phase.RUNNING) and 0 < worker.generation <= turn.state.abandoned:
        return _closed_bound_s(turn, worker), True
    return None, False
