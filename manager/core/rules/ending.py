"""How a job begins and ends: submitted, stopped, trained and exported, or given up."""

from __future__ import annotations

from ....morphing import covers
from ....protocol.messages import Phase
from ..commands import ExportWeights
from ..context import Context
from ..events import JobCommandFailed, JobSubmitted, StopRequested, WeightsExported
from ..facts import EndReason, JobEnded, StopOrdered, Submitted, TrainingFinished
from ..state import order_of
from ..strikes.table import Kind
from . import retention, starting


def take(context: Context) -> None:
    """Events that begin or end the job."""
    state, event = context.state, context.event
    if isinstance(event, JobSubmitted) and state.spec is None:
        context.fact(
            Submitted(
                at=context.now,
                job=event.job,
                spec=event.spec,
                bundle_sha256=event.bundle_sha256,
                start=event.start,
                owner=event.owner,
            )
        )
        starting.order_copy(context)
    if context.state.spec is None or context.state.ended is not None:
        return
    match event:
        case StopRequested() if state.finished is not None:
            reason = f"as requested; trained {state.finished.step} steps, whose weights are not exported"
            end(context, JobEnded(at=context.now, status="stopped", reason=reason))
        case StopRequested() if state.stop_ordered_at is None:
            order_stop(context)
        case WeightsExported() if state.finished is not None:
            reason = f"trained {state.finished.step} steps"
            if event.step != state.finished.step:
                reason += f", but the weights exported are those of step {event.step}: {event.note}"
            ended = JobEnded(
                at=context.now,
                status="finished",
                reason=reason,
                export_uri=event.uri,
                export_sha256=event.sha256,
            )
            end(context, ended)
        case JobCommandFailed() if event.command == "compute_growth":
            pass  # the job does without: see `growth`
        case JobCommandFailed() if event.command == "compute_plan" and state.running:
            pass  # the plan that runs goes on: see `answers`
        case JobCommandFailed() if state.failure is not None:
            end_stopped(context, f"{event.command}: {event.error}")  # it fails already, for another reason
        case JobCommandFailed() if event.command != "copy_checkpoint" or state.copying:
            _fail_by(context, event)
        case _:
            pass


def order_stop(context: Context, failure: JobEnded | None = None) -> None:
    """Have workers save; then the job ends, as a person wanted or as `failure` says."""
    context.fact(StopOrdered(at=context.now, failure=failure))
    context.note(planned_for=frozenset())  # the planner is asked for the save
    _drop_planned(context)


def _drop_planned(context: Context) -> None:
    """Give up a generation that a job which is to stop does not need: no state depends on it yet.

    One that takes over from a broken one, or for which the head may be swapped already, is formed all the
    same: only there can the last steps still be saved.
    """
    planned, state = context.state.planned, context.state
    if planned is None or planned.prepared_at is not None:
        return
    if state.current is not None or max(state.progress_step, context.observations.newest_step) == 0:
        context.close_planned("the job is to stop")


def finish(context: Context) -> None:
    """Once the last step is published, training is over: the VMs go, and the manager exports the weights."""
    state = context.state
    if state.finished is not None:
        return
    final = next((c for c in reversed(state.published) if c.step >= context.spec.training.steps), None)
    if final is not None:
        context.fact(TrainingFinished(at=context.now, checkpoint=final))
        context.command(export_of(context))
        context.close_generations("the job is trained")
        _release_vms(context)


def export_of(context: Context) -> ExportWeights:
    """The command to export the last checkpoint, or the newest before it that can be read."""
    state, final = context.state, context.state.finished
    assert final is not None, "what is trained is exported"
    key = f"{state.job}/export/{final.step}-g{final.generation}/{state.num_facts}"
    older = tuple(c for c in reversed(state.published) if order_of(c) < order_of(final))
    return ExportWeights(key=key, checkpoint=final, older=older)


def give_up(context: Context) -> None:
    """Errors of the job's own code are counted against its allowance; our own, and deaths that nobody
    explains against fixed bounds."""
    state = context.state
    if state.finished is not None:
        return
    reason = ""
    if context.strikes(Kind.USER_ERROR).count > context.spec.retry.max_restarts_on_errors:
        reason = state.last_error
    elif context.is_reached(Kind.INTERNAL_ERROR):
        count = context.strikes(Kind.INTERNAL_ERROR).count
        reason = f"{count} failures without a new step in between; the last: {state.last_error}"
    else:
        reason = _deadly(context)
    if not reason or state.failure is not None:
        return
    _fail(context, JobEnded(at=context.now, status="failed", reason=reason, traceback=state.last_traceback))


def _fail_by(context: Context, event: JobCommandFailed) -> None:
    """A fault of ours in a command ends the job. If the head could not be opened, its generation never is."""
    reason = f"{event.command}: {event.error}"
    if event.command == "open_head":
        context.close_planned(reason)
    _fail(context, JobEnded(at=context.now, status="failed", reason=reason))


def _fail(context: Context, failure: JobEnded) -> None:
    """The job fails, once its workers have saved what they hold."""
    if context.state.stop_ordered_at is None and _can_save(context):
        order_stop(context, failure)
    else:
        end(context, failure)


def _can_save(context: Context) -> bool:
    """Whether workers that live hold every section as of a step that no checkpoint has."""
    state = context.state
    if state.recipe is None or context.held_step() <= state.saved_step:
        return False
    held = [
        range(start, stop)
        for incarnation, (start, stop) in state.hosts.items()
        if not context.is_away(incarnation)
    ]
    return covers(held, state.recipe.num_sections)


def _deadly(context: Context) -> str:
    """Why trainers that die everywhere end the job; empty if they do not."""
    by_vm, count = context.state.strikes.all(Kind.DEATH), context.state.strikes.total(Kind.DEATH)
    if not context.timing.strikes[Kind.DEATH].is_reached(count):
        return ""
    last = max(by_vm.values(), key=lambda strikes: strikes.since)
    return (
        f"{count} deaths of trainers on {len(by_vm)} VMs without a new step in between; the last, {last.why}"
    )


def stop(context: Context) -> None:
    """A job that is to stop, or fails, ends when its workers hold after a checkpoint, or none has anything
    to save."""
    state = context.state
    if state.stop_ordered_at is None or state.finished is not None:
        return
    if state.planned is None and not context.must_save() and (state.current is None or all_held(context)):
        end_stopped(context)
    elif context.stop_is_late():
        end_stopped(context, f"its workers did not hold in {context.timing.stop_timeout_s:g} s")


def end_stopped(context: Context, trouble: str = "") -> None:
    """The job ends as a person wanted, or as it failed; the reason says which steps are lost by that, and by
    what trouble."""
    state, failure = context.state, context.state.failure
    newest = state.possible(max(context.observations.newest_step, context.held_step())) or state.progress_step
    saved = state.saved_step
    reason = failure.reason if failure is not None else "as requested"
    if newest > saved:
        stores = sorted({worker.store_trouble for _, worker in context.reports()})
        if context.fenced_off:
            stores.append("the head of its store is not open for its generation any more")
        lost = f"step {newest} is" if newest == saved + 1 else f"steps {saved + 1} to {newest} are"
        why = "; ".join(filter(None, (trouble, state.impossible, *stores)))
        reason += f", but {lost} not saved" + (f": {why}" if why else "")
    elif trouble:
        reason += f", though {trouble}"
    ended = failure or JobEnded(at=context.now, status="stopped")
    end(context, ended.model_copy(update={"at": context.now, "reason": reason}))


def all_held(context: Context) -> bool:
    """Whether every worker of the open generation has stopped after a checkpoint."""
    current = context.state.current
    if current is None or current.formed is None:
        return False
    reports = [context.report_of(incarnation) for incarnation in current.incarnations]
    return all(r is not None and r.phase in (Phase.HELD, Phase.FINISHED) for r in reports)


def end(context: Context, ended: JobEnded) -> None:
    """The job is over: its VMs are released, and what it leaves in the store is looked through once more."""
    context.close_generations(f"the job {ended.status}")
    retention.retire_at_end(context)
    context.fact(ended)
    _release_vms(context)
    if context.state.opened_generation or context.state.copying:
        retention.order_sweep(context, context.now + context.timing.delete_after_s)


def _release_vms(context: Context) -> None:
    for vm in context.state.live_vms:
        context.end_vm(vm.vm, EndReason.RELEASED)
