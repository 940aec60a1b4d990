"""Whether trainers make progress, and what follows where they do not.

A trainer's beats come from a thread of their own and prove only that the process lives. Its *progress*, a
count of operations, samples and pieces of what it loads and saves, proves that it works. The progress of
any member resets the bound of its generation, since a step that one member cannot finish stops all. The bound
follows from what a step was predicted and measured to take; waiting for data or for the store has bounds of
its own.

When it is exceeded, the stacks of all members are asked for, and then the generation is closed. Members whose
own work is stalled are suspected and left out for a while. Where all wait for each other nobody is suspected:
the links are tried when the next generation forms. If that one makes no progress at the same step either, the
bound is doubled, whether or not a member is suspected: one operation may take longer than was predicted.
After several in a row at one step the job waits for a person: what hangs there hangs on any VM.

A member of a closed generation sees that it is closed between two operations. So it has the time that its
operation may take, and is ended after that; this does not count as a failure of the job.
"""

from __future__ import annotations

from typing import NamedTuple

from ....protocol.messages import At, Phase, WorkerReport
from .. import silence
from ..context import Context, has_ended, incarnation_of, never_ran, own_steps
from ..events import Tick
from ..facts import EndReason, GenerationStalled, Resumption, StacksTaken, WorkerFailed
from ..observations import NoProgress
from ..state import Generation
from ..strikes.table import Kind
from ..vms import Vm
from . import generations, waiting

_OWN_WORK = frozenset((At.COMPUTING, At.DATA, At.STORE))
_WORKS = frozenset((Phase.FORMING, Phase.RUNNING, Phase.OTHER))
_MOST_STACKS = 64  # kept of one stall


class _Bound(NamedTuple):
    """How long something may last, and the field of `Timing` that says so."""

    seconds: float
    name: str

    def times(self, factor: float) -> _Bound:
        return self._replace(seconds=self.seconds * factor)


def watch(context: Context) -> None:
    """At each tick: trainers that are stalled alone are replaced, a generation that is stalled is closed."""
    if not isinstance(context.event, Tick) or context.isolated or context.state.finished is not None:
        return
    for vm, worker in context.reports():
        _replace_stalled(context, vm, worker)
    current = context.state.current
    if current is None:
        context.note(no_progress=None)
        return
    free_s = generations.forms_since(context, current) if current.formed is None else 0.0
    found = _no_progress(context, current)
    context.note(no_progress=found)
    if not context.dead(current.members):
        _watch_generation(context, current, found, free_s)


def record_stacks(context: Context) -> None:
    """The stacks that were asked for, once for each member."""
    stall = context.state.stall
    if stall is None:
        return
    for vm in context.state.live_vms:
        last_report = context.observations.last_reports.get(vm.vm)
        for stacks in last_report.report.stacks if last_report is not None else ():
            seen = context.state.stall.seen if context.state.stall is not None else frozenset[str]()
            if stacks.number == stall.number and stacks.worker not in seen:
                text = stacks.text if len(seen) < _MOST_STACKS else ""
                context.fact(
                    StacksTaken(at=context.now, number=stall.number, worker=stacks.worker, text=text)
                )


def _no_progress(context: Context, current: Generation) -> NoProgress | None:
    """For how long the open generation made none; None if no member is to make progress."""
    observations, judged = context.observations, _judged(context, current)
    incarnations = judged.incarnations if judged.formed is not None else judged.members
    reports = context.reports_of(incarnations)
    active = [incarnation_of(report) for report in reports if _works_in(report, judged)]
    if judged.formed is not None and not active:
        return None
    # Work that a member still does for the generation before is no progress in forming this one.
    moved_at = observations.moved_at(*(incarnations if judged.formed is not None else active))
    standing = {name: where for name, _ in active if (where := observations.at_of(name)) is not None}
    bound = _bound(context, judged, set(standing.values()))
    if judged.formed is None:
        late = [report for report in reports if _leaves_closed(context, report)]
        bound = _longest(bound, *(_closed_bound(context, report) for report in late))
    told = {name: where.value for name, where in standing.items()}
    return NoProgress(context.now - moved_at, bound.seconds, bound.name, told)


def _judged(context: Context, current: Generation) -> Generation:
    """Whose progress counts: the generation before, until its members are free to form the open one."""
    forming = context.observations.forming
    if current.formed is not None or (forming is not None and forming[0] == current.number):
        return current
    return silence.stepping_generation(context.state) or current


def _works_in(worker: WorkerReport, generation: Generation) -> bool:
    return worker.generation == generation.number and worker.phase in _WORKS


def _bound(context: Context, current: Generation, standing: set[At]) -> _Bound:
    """For how long the open generation may make no progress."""
    if current.formed is None:
        bound = _Bound(context.timing.form_timeout_s, "form_timeout_s")
    else:
        bound = _step_bound(context, current, context.observations.newest_step)
    return _waiting_bound(context, bound, standing).times(2 ** _doublings(context, current))


def _leaves_closed(context: Context, worker: WorkerReport) -> bool:
    """Whether the worker is in a generation that is closed."""
    return worker.phase in (Phase.FORMING, Phase.RUNNING) and 0 < worker.generation <= context.state.abandoned


def _closed_bound(context: Context, worker: WorkerReport) -> _Bound:
    """For how long a member of a closed generation may make no progress, by what it is at: it sees only
    between two operations that the generation is closed, and the next one waits for it."""
    timing, history = context.timing, context.state.history
    generation = next((g for g in reversed(history) if g.number == worker.generation), None)
    bound = _Bound(timing.progress_floor_s, "progress_floor_s")
    if generation is not None:
        bound = _step_bound(context, generation, worker.step).times(2 ** _doublings(context, generation))
    if worker.phase is Phase.FORMING:
        bound = _longest(bound, _Bound(timing.form_timeout_s, "form_timeout_s"))
    where = context.observations.at_of(worker.worker)
    return _waiting_bound(context, bound, {where} if where is not None else set())


def _step_bound(context: Context, generation: Generation, step: int) -> _Bound:
    """From what its steps were predicted and measured to take; longer until its first step is done."""
    timing = context.timing
    step_s = max(generation.predicted_s or 0.0, context.observations.measured_s(generation.number))
    bound = _longest(
        _Bound(timing.progress_floor_s, "progress_floor_s"),
        _Bound(timing.progress_factor * step_s, "progress_factor"),
    )
    if generation.formed is not None and step <= generation.formed.step:
        return _Bound(bound.seconds * timing.first_step_factor, f"{bound.name}, first_step_factor")
    return bound


def _waiting_bound(context: Context, bound: _Bound, standing: set[At]) -> _Bound:
    """The bound, where some wait for what lies outside the job, or perhaps do."""
    timing = context.timing
    if At.DATA in standing:
        bound = _longest(_Bound(timing.data_wait_s, "data_wait_s"), bound)
    if At.STORE in standing or At.OTHER in standing:
        bound = _longest(_Bound(timing.store_wait_s, "store_wait_s"), bound)
    return bound


def _longest(*bounds: _Bound) -> _Bound:
    """The first of the longest."""
    return max(bounds, key=lambda bound: bound.seconds)


def _doublings(context: Context, generation: Generation) -> int:
    """How many generations before this one made no progress at the step that it is to do.

    It does not matter which members were suspected: each host in turn may need longer for one operation than
    was predicted.
    """
    stall, count = context.state.stall, context.strikes(Kind.STALL).count
    if stall is not None and count and stall.generation >= generation.number:
        count -= 1
    limit = context.row(Kind.STALL).limit
    return min(count, limit - 1) if limit is not None else count


def _watch_generation(context: Context, current: Generation, found: NoProgress | None, free_s: float) -> None:
    judged = _judged(context, current)
    lasted_s = found.lasted_s if found is not None else 0.0
    if judged.formed is None:
        lasted_s = min(lasted_s, free_s)
    asked = context.observations.asked_for_stacks
    if found is None or lasted_s <= found.bound_s:
        context.note(asked_for_stacks=None)
        return
    if asked is None or asked[0] != current.number:
        _ask_for_stacks(context, current, found, lasted_s)
        return
    stall = context.state.stall
    all_came = stall is not None and stall.seen >= {worker for worker, _ in current.incarnations}
    if stall is not None and (all_came or context.now - asked[1] >= context.timing.stacks_s):
        for_s = max(context.timing.left_out_s, 2 * context.timing.progress_floor_s)
        context.leave_out([m for m in current.members if m.worker in stall.suspects], for_s)
        if judged.formed is None:
            context.leave_out(generations.idle_members(context, current))
        what = "did not form: " if current.formed is None else ""
        generations.close(context, f"{what}no progress for {lasted_s:.0f} s", context.now)
        if context.state.active and context.is_reached(Kind.STALL):
            _ask_a_person(context, found)


def _ask_a_person(context: Context, found: NoProgress) -> None:
    strikes = context.strikes(Kind.STALL)
    times = f"{strikes.count} generations in a row stalled there"
    reason = f"no step after step {strikes.step} is made: {times}; the last: {found.describe()}"
    waiting.wait(context, reason, (Resumption.AGAIN,))


def _ask_for_stacks(context: Context, current: Generation, found: NoProgress, lasted_s: float) -> None:
    stall = context.state.stall
    context.note(asked_for_stacks=(current.number, context.now))
    context.fact(
        GenerationStalled(
            at=context.now,
            generation=current.number,
            number=stall.number + 1 if stall is not None else 1,
            step=context.observations.newest_step,
            silent_s=lasted_s,
            bound_s=found.bound_s,
            standing=dict(found.standing),
            suspects=_suspects(context, current, found),
        )
    )


def _suspects(context: Context, current: Generation, found: NoProgress) -> tuple[str, ...]:
    """Those whose own work is stalled while others wait; nobody, if all work or all wait."""
    own = tuple(name for name, where in found.standing.items() if At(where) in _OWN_WORK)
    members = {worker for worker, _ in _judged(context, current).incarnations}
    return own if members - set(own) else ()


def _replace_stalled(context: Context, vm: Vm, worker: WorkerReport) -> None:
    """Have a trainer ended that starts or profiles for too long, or does not leave a closed generation."""
    bound_s, closed = _own_bound_s(context, worker)
    incarnation = incarnation_of(worker)
    lasted_s = context.now - context.observations.moved_at(incarnation) if bound_s is not None else 0.0
    if bound_s is None or lasted_s <= bound_s:
        return
    if vm.vm in context.observations.unheard or has_ended(worker) or context.state.has_failed(incarnation):
        return
    if closed and context.elapsed_s(context.observations.closed_at) <= context.timing.progress_floor_s:
        return  # it is given time to see that its generation is closed
    where = context.observations.at_of(worker.worker)
    at = f" ({where.value})" if where is not None else ""
    message = f"no progress for {lasted_s:.0f} s while {worker.phase.value}{at}"
    context.fact(
        WorkerFailed(
            at=context.now,
            worker=worker.worker,
            incarnation=worker.incarnation,
            kind="stuck",
            message=message,
            step=worker.step,
            own_steps=own_steps(worker),
            counted=not closed,
        )
    )
    if never_ran(worker) and vm.live:  # no trainer runs yet: the VM's own setup does not end
        context.end_vm(vm.vm, EndReason.LEFT, message)


def _own_bound_s(context: Context, worker: WorkerReport) -> tuple[float | None, bool]:
    """For how long this trainer alone may make no progress, and whether its generation is closed.

    None for a trainer in an open generation: there the progress of any member counts.
    """
    if worker.phase is Phase.STARTING:
        return context.timing.start_wait_s, False
    if worker.phase is Phase.PROFILING:
        waits = context.observations.at_of(worker.worker) is At.MEMBERS  # whom it waits for is judged first
        return context.timing.profile_wait_s * (2 if waits else 1), False
    if _leaves_closed(context, worker):
        return _closed_bound(context, worker).seconds, True
    return None, False
