"""Which VMs the job has: asking for them, taking them in, and telling when one is gone."""

from __future__ import annotations

from ....protocol.hashes import short
from ....protocol.messages import Failure, Phase, WorkerReport
from .. import fitness
from ..context import Context, has_ended, incarnation_of, never_ran, own_steps
from ..events import Tick, VmEndingSeen, VmListed, VmTerminated
from ..facts import EndReason, IsolationChanged, StepMiscounted, VmGone, VmJoined, VmSeen, WorkerFailed
from ..fold.renting import is_unconfirmed
from ..silence import heard_at
from ..state import order_of_miscount, staying_vms, vm_of, wanted_vms
from ..strikes.table import Kind
from ..vms import Vm, VmStatus
from . import notices, renting, surplus, waiting


def take(context: Context) -> None:
    """What the cloud says about a VM. Authoritative."""
    event = context.event
    if isinstance(event, VmListed):
        _listed(context, event)
        return
    if not isinstance(event, VmTerminated | VmEndingSeen):
        return
    vm = context.state.vms.get(event.vm)
    if isinstance(event, VmTerminated) and event.vm in context.state.leaving:
        context.fact(VmGone(at=context.now, vm=event.vm, ran_s=event.ran_s))
    if vm is None or not vm.live:
        return
    if not isinstance(event, VmTerminated):
        if context.has_joined(vm):
            why, taken = event.taken_back or "its cloud is ending it", bool(event.taken_back)
            context.end_vm(event.vm, EndReason.PREEMPTED, why, taken=taken)
    elif context.has_joined(vm):
        why, taken = event.taken_back, bool(event.taken_back)
        context.end_vm(event.vm, EndReason.PREEMPTED, why, gone=True, taken=taken, ran_s=event.ran_s)
    elif event.taken_back or renting.is_probably_taken(context, vm):
        why = event.taken_back or "its cloud no longer has it"
        renting.taken_back(context, vm, why, gone=True, ran_s=event.ran_s)
    else:
        why = "gone before it joined"
        context.end_vm(event.vm, EndReason.REQUEST_FAILED, why, gone=True, ran_s=event.ran_s)


def _listed(context: Context, event: VmListed) -> None:
    state = context.state
    vm = state.vms.live.get(event.vm) or state.leaving.get(event.vm)
    if vm is None or vm.attempted_at is None or vm.num_attempts != event.number:
        return
    if not vm.existed or (event.lives and vm.must_end_by is not None):
        context.fact(VmSeen(at=context.now, vm=vm.vm, lives=event.lives))


def join_vms(context: Context) -> None:
    """A VM that was asked for joins by its first report."""
    for vm in context.state.live_vms:
        last_report = context.observations.last_reports.get(vm.vm)
        if vm.status is VmStatus.REQUESTED and last_report is not None:
            devices = tuple(device.model_dump() for device in last_report.report.devices)
            context.fact(
                VmJoined(
                    at=context.now,
                    vm=vm.vm,
                    address=last_report.report.address,
                    devices=devices,
                    step=context.highest_step,
                )
            )


def record_failures(context: Context) -> None:
    """A trainer's end becomes a fact once for each incarnation.

    Its agent may have started the next one before it could be heard: it tells of earlier deaths as well.
    """
    for vm, worker in (*context.deaths(), *context.reports()):
        failure = _failure(context, worker)
        if failure is None or context.state.has_failed(incarnation_of(worker)):
            continue
        step = worker.step if worker.generation > context.state.discarded else 0
        context.fact(
            WorkerFailed(
                at=context.now,
                worker=worker.worker,
                incarnation=worker.incarnation,
                kind=failure.kind,
                message=failure.message,
                traceback=failure.traceback,
                step=context.state.possible(max(step, context.observations.newest_step)),
                own_steps=own_steps(worker),
            )
        )
        if failure.kind == "unreadable" and not context.state.running:  # else of a generation that is past
            waiting.ask_for_checkpoints(context, failure.message)
        if never_ran(worker) and worker.phase is Phase.EXITED and vm.live:
            # Nothing ever ran here (the VM's own setup failed), and its agent will not try again.
            context.end_vm(vm.vm, EndReason.LEFT, failure.message)


def record_miscounts(context: Context) -> None:
    """Attempts at steps whose sums did not hold each micro-batch's gradients exactly once.

    All workers of a generation find so alike at the commit, and redo the step.
    """
    for _, worker in (*context.deaths(), *context.reports()):
        miscount = worker.miscount
        if miscount is not None and order_of_miscount(miscount) > context.state.newest_miscount:
            context.fact(StepMiscounted(at=context.now, miscount=miscount, worker=worker.worker))


def _failure(context: Context, worker: WorkerReport) -> Failure | None:
    recipe = context.state.recipe
    if worker.profile is not None and worker.profile.recipe.device_kind == "other":
        return Failure(kind="recipe", message="its device is of a kind that this manager does not know")
    if recipe is not None and worker.graph_hash not in (None, recipe.graph_hash):
        message = f"its graph hash is {short(worker.graph_hash)}, the job's is {short(recipe.graph_hash)}"
        return Failure(kind="recipe", message=message)
    if fitness.differs(context.state, worker):
        return Failure(kind="recipe", message=fitness.describe(context.state, worker))
    if not has_ended(worker):
        return None
    return worker.failure or Failure(kind="killed", message="the process is gone")


def end_lost_vms(context: Context) -> None:
    """VMs that are gone for certain: they say so, or their agents must have ended themselves."""
    for vm in context.state.live_vms:
        verdict = _verdict(context, vm)
        if verdict is not None and verdict[0] is EndReason.REQUEST_FAILED and is_unconfirmed(vm):
            renting.give_up_unanswered(context, vm)
        elif verdict is not None:
            context.end_vm(vm.vm, *verdict)


def _verdict(context: Context, vm: Vm) -> tuple[EndReason, str] | None:
    last_report, timing = context.observations.last_reports.get(vm.vm), context.timing
    if last_report is not None and last_report.report.leaving is not None:
        return EndReason.LEFT, last_report.report.leaving
    if vm.status is VmStatus.REQUESTED:
        late = _never_joins(context, vm)
        return (EndReason.REQUEST_FAILED, f"did not join in {timing.request_timeout_s:g} s") if late else None
    unheard_s = context.now - heard_at(context.observations, vm, context.now)
    if unheard_s > timing.given_up_after_s and vm.vm in context.observations.silent:
        return EndReason.LEASE_EXPIRED, f"silent for {unheard_s:.1f} s"
    deadline = notices.deadline_of(context, vm)
    if deadline is not None and context.now > deadline + timing.vm_lease_s:
        return EndReason.PREEMPTED, "its notice ran out"
    return None


def _never_joins(context: Context, vm: Vm) -> bool:
    """Whether a VM was waited for long enough since it was made, by this manager and those before it.

    It may be on its way still, for it could not join while there was no manager. Of a time that is later than
    now, by a clock that was set back since, nobody knows how long ago it was: long enough.
    """
    timing, now = context.timing, context.now
    if now - context.observations.started_at <= min(timing.join_grace_s, timing.request_timeout_s):
        return False
    return vm.awaited_since > now or now - vm.awaited_since > timing.request_timeout_s


def record_isolation(context: Context) -> None:
    """Isolation decides nothing, but a user finds among the events when it began and ended."""
    isolated = context.isolated
    if not isinstance(context.event, Tick) or isolated == context.state.isolated:
        return
    if not isolated and not context.observations.last_reports:
        return  # this manager has only begun, and nobody was heard yet
    num_vms = sum(vm.joined for vm in context.state.live_vms)
    context.fact(IsolationChanged(at=context.now, isolated=isolated, num_vms=num_vms))


def replace_unusable(context: Context) -> None:
    """VMs on which trainers die again and again, or none of whose workers meets the recipe, give way to
    others."""
    state = context.state
    for vm in state.live_vms:
        for kind, (reason, failures) in _REPLACED.items():
            if vm.vm in context.state.vms.live and context.is_reached(kind, vm.vm):
                strikes = context.strikes(kind, vm.vm)
                context.end_vm(vm.vm, reason, f"{strikes.count} {failures}; the last: {strikes.why}")
    for worker, why in state.unfit.items():
        vm = vm_of(worker)
        known = context.state.vms.get(vm)
        if known is not None and known.live and not fitness.may_fit(context, known):
            context.end_vm(vm, EndReason.UNFIT, why)


_REPLACED = {
    Kind.VM_DEATH: (EndReason.WORKERS_DIED, "deaths of its trainers without a new step"),
    Kind.CORRUPT_STATE: (EndReason.CORRUPT_STATE, "times its state was another than that of its peers"),
}


def request_vms(context: Context) -> None:
    """Ask for VMs up to `max_nodes`, of a cloud's for those that pay, with a tick's fresh ids; wait longer
    after each refusal.

    After VMs that were unfit, one at a time, until one is fit.
    """
    state, event = context.state, context.event
    if not isinstance(event, Tick) or not state.active:
        return
    singly = fitness.asks_singly(context)
    num_unfit = max(1, context.strikes(Kind.UNFIT_VM).count)
    context.note(asks_singly_s=context.row(Kind.UNFIT_VM).pause_s(num_unfit) if singly else None)
    if any(context.is_paused(kind) for kind in (Kind.REQUEST, Kind.WORN_VM, Kind.UNFIT_VM, Kind.LOST_VM)):
        return
    # A VM at risk is counted on by plans, but not to stay: where there is room, a spare is asked for.
    wanted, num_staying = surplus.wanted(context), len(staying_vms(state))
    missing = min(wanted - num_staying, context.spec.resources.max_nodes - len(state.counted_vms))
    most = missing
    if singly:
        missing = min(missing, 0 if fitness.on_trial(context) else 1)
    if missing <= 0:
        lowered = wanted < wanted_vms(state) and num_staying >= wanted
        context.note(why_no_vm=surplus.LOWERED if lowered else "")
        return
    fresh = [vm for vm in event.new_vms if vm not in state.vms]
    renting.request(context, fresh[:missing], most)
