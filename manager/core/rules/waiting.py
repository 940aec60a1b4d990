"""A job that waits for a person, or has ended: why it waits, what happens to its VMs, and how it goes on.

It waits where going on by itself could lose or overwrite what a user paid for. VMs are kept for a while, in
case that the answer comes soon; then their workers save what they can and they are released.

One that was stopped, or that failed, goes on from its newest checkpoint. Nothing of its VMs is left, and
nothing that they said counts. The generation that opens next fences off those that still live: until then
they may publish, and the job goes on from what they publish.
"""

from __future__ import annotations

from .. import fitness, worth
from ..context import Context
from ..events import CommandStuck, ContinueRequested, HeadDiffers, ResumeRequested
from ..facts import EndReason, HoldChanged, JobContinued, JobResumed, PersonNeeded, Resumption
from ..state import JobState
from ..strikes.table import Kind
from . import ending, starting

_KEPT = {"min_nodes", "max_nodes", "max_hourly_cost", "budget"}


def take(context: Context) -> None:
    """What calls for a person, and the person's answer."""
    state, event = context.state, context.event
    if state.spec is None or state.ended is not None:
        return
    match event:
        case HeadDiffers() if state.planned is not None and state.planned.number == event.generation:
            _head_differs(context, event)
        case CommandStuck() if _matters(context, event):
            _stuck(context, event)
        case ResumeRequested() if state.waiting is not None and event.how in state.waiting.offers:
            _resume(context, event.how)
        case _:
            pass


def go_on(context: Context) -> None:
    """A person has a job go on that had ended."""
    event = context.event
    if not isinstance(event, ContinueRequested) or not can_go_on(context.state):
        return
    context.fact(JobContinued(at=context.now, **event.model_dump(include=_KEPT)))
    if context.state.finished is not None:
        context.command(ending.export_of(context))
    starting.order_copy(context)


def can_go_on(state: JobState) -> bool:
    """Whether the job has ended with something left to do."""
    return state.ended is not None and state.ended.status != "finished"


def ask_for_fit_vms(context: Context) -> None:
    """Whoever asks for VMs may ask for others, where those that come cannot meet the recipe."""
    state = context.state
    times = context.strikes(Kind.UNFIT_VM).count
    if not state.active or not context.is_reached(Kind.UNFIT_VM):
        return
    if any(fitness.may_fit(context, vm) for vm in state.live_vms):
        return
    reason = f"VMs that cannot meet the recipe came {times} times in a row; the last: {state.why_unfit}"
    # From step 0 is not what was asked for where it starts from a checkpoint, whose bits these VMs lack.
    offers = (Resumption.AGAIN, Resumption.RESTART) if state.start is None else (Resumption.AGAIN,)
    wait(context, reason, offers)


def ask_about_lost_vms(context: Context) -> None:
    """What ends the machines, again and again at one step, may be of the job: a sample, or an operation."""
    if not context.state.active or not context.is_reached(Kind.LOST_VM):
        return
    lost = context.strikes(Kind.LOST_VM)
    reason = (
        f"VMs were lost {lost.count} times in a row before step {lost.step + 1} was committed; the last, "
        f"{lost.why}. Perhaps the job's code ends its machine: a sample, or an operation of this step"
    )
    wait(context, reason, (Resumption.AGAIN,))


def ask_for_checkpoints(context: Context, why: str) -> None:
    """No checkpoint can be read: a person may put back the objects, or give up the steps and begin again."""
    state = context.state
    if state.waiting is None and state.finished is None and state.failure is None:
        wait(context, why, (Resumption.AGAIN, Resumption.RESTART))


def release_vms(context: Context) -> None:
    """Keep the VMs of a job that waits for a while; then have its workers save, and let the VMs go.

    A generation that steps and can publish is no matter of the question: its VMs are kept.
    """
    state, timing = context.state, context.timing
    since = state.vms_idle_since
    if state.waiting is None or since is None or not state.live_vms or context.isolated:
        return
    if context.elapsed_s(since) <= timing.keep_waiting_s:
        return
    saved = state.current is None or ending.all_held(context)
    if not saved and not context.save_is_late(since + timing.keep_waiting_s):
        if not state.hold:
            context.fact(
                HoldChanged(at=context.now, hold=True, reason="nobody has answered the job's question")
            )
        return
    context.close_generations("the job waits for a person")
    for vm in state.live_vms:
        context.end_vm(vm.vm, EndReason.RELEASED, "the job waits for a person")


def _head_differs(context: Context, event: HeadDiffers) -> None:
    offers = (Resumption.AGAIN, Resumption.RESTART)
    if event.difference != "missing":
        offers = (Resumption.AGAIN, Resumption.FROM_HEAD, Resumption.RESTART)
    wait(context, event.reason, offers, event)


def _matters(context: Context, event: CommandStuck) -> bool:
    """Whether the job hangs on it: the head of the planned generation, the weights of a trained job, or the
    checkpoint that it starts from."""
    state = context.state
    if event.generation is not None:
        return state.planned is not None and state.planned.number == event.generation
    hangs_on = (event.command == "export_weights" and state.finished is not None) or (
        event.command == "copy_checkpoint" and state.copying
    )
    return hangs_on and state.waiting is None


def _stuck(context: Context, event: CommandStuck) -> None:
    reason, state = f"{event.command}: {event.error}", context.state
    if event.generation is None or state.current is None:
        wait(context, reason, (Resumption.AGAIN,))
        return
    # The open generation goes on without the change; `planning` asks for another soon.
    context.close_planned(reason)
    context.note(planned_for=frozenset())


def wait(
    context: Context,
    reason: str,
    offers: tuple[Resumption, ...],
    found: HeadDiffers | None = None,
    console: str = "",
) -> None:
    """The job waits until a person gives one of these answers. `console`: as in `PersonNeeded`."""
    context.close_planned(reason)
    if context.state.stop_ordered_at is not None:
        ending.end_stopped(context, reason)
        return
    context.fact(
        PersonNeeded(
            at=context.now,
            reason=reason,
            offers=offers,
            vms_until=context.now + context.timing.keep_waiting_s,
            head_generation=found.head_generation if found is not None else 0,
            checkpoints=found.checkpoints if found is not None else (),
            console=console,
        )
    )


def _resume(context: Context, how: Resumption) -> None:
    waiting = context.state.waiting
    assert waiting is not None, "only a job that waits is resumed"
    context.fact(
        JobResumed(
            at=context.now,
            how=how,
            head_generation=waiting.head_generation,
            checkpoints=waiting.checkpoints if how is Resumption.FROM_HEAD else (),
        )
    )
    last = worth.last_formed(context.state)
    if last is not None and last.number <= context.state.discarded:
        context.note(newest_step=context.state.progress_step)
    # The answer may be another than the one the planner gave about the same workers.
    context.note(planned_for=frozenset(), cause=("a person had it go on", context.now))
    if context.state.finished is not None:
        context.command(ending.export_of(context))
    starting.order_copy(context)
    if how is Resumption.RESTART:
        context.close_generations("the job begins anew")
        for vm in context.state.live_vms:
            context.end_vm(vm.vm, EndReason.RELEASED, "it holds a state that the job does not go on from")
