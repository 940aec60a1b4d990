"""Which VMs the job has: asking for them, taking them in, and telling when one is gone."""

from __future__ import annotations

from dataclasses import replace

from ....protocol.hashes import short
from ....protocol.messages import Failure, Phase, WorkerReport
from ..events import Tick, VmEnding, VmTerminated
from ..facts import EndReason, IsolationChanged, VmGone, VmJoined, WorkerFailed
from ..failures import num_rounds, on_vm
from ..silence import heard_at
from ..state import staying_vms, vm_of, wanted_vms
from ..turn import Turn, has_ended, never_ran, own_steps
from ..vms import Vm, VmStatus
from . import fitness, notices, renting, surplus


def take(turn: Turn) -> None:
    """What the cloud says about a VM. Authoritative."""
    event = turn.event
    if not isinstance(event, VmTerminated | VmEnding):
        return
    vm, gone = turn.state.vms.get(event.vm), isinstance(event, VmTerminated)
    if gone and event.vm in turn.state.leaving:
        turn.fact(VmGone(at=turn.now, vm=event.vm))
    if vm is None or not vm.live:
        return
    if turn.has_joined(vm):
        turn.end_vm(event.vm, EndReason.PREEMPTED, "" if gone else "its cloud is ending it", gone=gone)
    elif gone:
        turn.end_vm(event.vm, EndReason.REQUEST_FAILED, "gone before it joined", gone=True)


def join_vms(turn: Turn) -> None:
    """A VM that was asked for joins by its first report."""
    for vm in turn.state.live_vms:
        pulse = turn.vitals.pulses.get(vm.vm)
        if vm.status is VmStatus.REQUESTED and pulse is not None:
            devices = tuple(device.model_dump() for device in pulse.report.devices)
            turn.fact(VmJoined(at=turn.now, vm=vm.vm, address=pulse.report.address, devices=devices))


def record_failures(turn: Turn) -> None:
    """A trainer's end becomes a fact once for each incarnation.

    Its agent may have started the next one before it could be heard: it tells of earlier deaths as well.
    """
    for vm, worker in (*turn.deaths(), *turn.reports()):
        failure = _failure(turn, worker)
        if failure is None or turn.state.failed.get(worker.worker, -1) >= worker.incarnation:
            continue
        turn.fact(
            WorkerFailed(
                at=turn.now,
                worker=worker.worker,
                incarnation=worker.incarnation,
                kind=failure.kind,
                message=failure.message,
                traceback=failure.traceback,
                step=max(worker.step, turn.vitals.newest_step),
                own_steps=own_steps(worker),
            )
        )
        if never_ran(worker) and worker.phase is Phase.EXITED and vm.live:
            # Nothing ever ran here (the VM's own setup failed), and its agent will not try again.
            turn.end_vm(vm.vm, EndReason.LEFT, failure.message)


def _failure(turn: Turn, worker: WorkerReport) -> Failure | None:
    recipe = turn.state.recipe
    if worker.profile is not None and worker.profile.recipe.device_kind == "other":
        return Failure(kind="recipe", message="its device is of a kind that this manager does not know")
    if recipe is not None and worker.graph_hash not in (None, recipe.graph_hash):
        message = f"its graph hash is {short(worker.graph_hash)}, the job's is {short(recipe.graph_hash)}"
        return Failure(kind="recipe", message=message)
    if fitness.differs(turn.state, worker):
        return Failure(kind="recipe", message=fitness.describe(turn.state, worker))
    if not has_ended(worker):
        return None
    return worker.failure or Failure(kind="killed", message="the process is gone")


def end_lost_vms(turn: Turn) -> None:
    """VMs that are gone for certain: they say so, or their agents must have ended themselves."""
    for vm in turn.state.live_vms:
        verdict = _verdict(turn, vm)
        if verdict is not None:
            turn.end_vm(vm.vm, *verdict)


def _verdict(turn: Turn, vm: Vm) -> tuple[EndReason, str] | None:
    pulse, timing = turn.vitals.pulses.get(vm.vm), turn.timing
    if pulse is not None and pulse.report.leaving is not None:
        return EndReason.LEFT, pulse.report.leaving
    if vm.status is VmStatus.REQUESTED:
        late = _never_joins(turn, vm)
        return (EndReason.REQUEST_FAILED, f"did not join in {timing.request_timeout_s:g} s") if late else None
    unheard_s = turn.now - heard_at(turn.vitals, vm, turn.now)
    if unheard_s > timing.given_up_after_s and vm.vm in turn.vitals.silent:
        return EndReason.LEASE_EXPIRED, f"silent for {unheard_s:.1f} s"
    deadline = notices.deadline_of(turn, vm)
    if deadline is not None and turn.now > deadline + timing.vm_lease_s:
        return EndReason.PREEMPTED, "its notice ran out"
    return None


def _never_joins(turn: Turn, vm: Vm) -> bool:
    """Whether a VM was waited for long enough since it was made, by this manager and those before it.

    It may be on its way still, for it could not join while there was no manager. Of a time that is later than
    now, by a clock that was set back since, nobody knows how long ago it was: long enough.
    """
    timing, now = turn.timing, turn.now
    if now - turn.vitals.started_at <= min(timing.join_grace_s, timing.request_timeout_s):
        return False
    return vm.awaited_since > now or now - vm.awaited_since > timing.request_timeout_s


def record_isolation(turn: Turn) -> None:
    """Isolation decides nothing, but a user finds among the events when it began and ended."""
    isolated = turn.isolated
    if not isinstance(turn.event, Tick) or isolated == turn.state.isolated:
        return
    if not isolated and not turn.vitals.pulses:
        return  # this manager has only begun, and nobody was heard yet
    num_vms = sum(vm.joined for vm in turn.state.live_vms)
    turn.fact(IsolationChanged(at=turn.now, isolated=isolated, num_vms=num_vms))


def replace_unusable(turn: Turn) -> None:
    """VMs on which trainers die again and again, or none of whose workers meets the recipe, give way to
    others."""
    state, bound = turn.state, turn.timing.max_deaths_on_vm
    for vm in {death.vm: None for death in state.deaths}:
        deaths = on_vm(state.deaths, vm)
        if state.vms[vm].live and num_rounds(deaths) >= bound:
            detail = f"{bound} deaths of its trainers without a new step; the last: {deaths[-1].message}"
            turn.end_vm(vm, EndReason.WORKERS_DIED, detail)
    for worker, why in state.unfit.items():
        vm = vm_of(worker)
        known = turn.state.vms.get(vm)
        if known is not None and known.live and not fitness.may_fit(turn, known):
            turn.end_vm(vm, EndReason.UNFIT, why)


def request_vms(turn: Turn) -> None:
    """Ask for VMs up to `max_nodes`, of a cloud's for those that pay, with a tick's fresh ids; wait longer
    after each refusal.

    After VMs that were unfit, one at a time, until one is fit.
    """
    state, event = turn.state, turn.event
    if not isinstance(event, Tick) or not state.active or state.spec is None:
        return
    singly = fitness.asks_singly(turn)
    num_replaced = max(state.worn_vms + state.unfit_rounds.count, int(singly))
    _say_singly(turn, num_replaced if singly else None)
    if _waits(turn, state.request_failures, state.request_failed_at):
        return
    if _waits(turn, num_replaced, state.replaced_at):
        return
    # A VM at risk is counted on by plans, but not to stay: where there is room, a spare is asked for.
    wanted, num_staying = surplus.wanted(turn), len(staying_vms(state))
    missing = min(wanted - num_staying, state.spec.resources.max_nodes - len(state.counted_vms))
    most = missing
    if singly:
        missing = min(missing, 0 if fitness.on_trial(turn) else 1)
    if missing <= 0:
        lowered = wanted < wanted_vms(state) and num_staying >= wanted
        turn.vitals = turn.vitals.told_why_no_vm(surplus.LOWERED if lowered else "")
        return
    fresh = [vm for vm in event.new_vms if vm not in state.vms]
    renting.request(turn, fresh[:missing], most)


def _waits(turn: Turn, failures: int, failed_at: float) -> bool:
    """Whether so many failures in a row call for more patience."""
    if not failures:
        return False
    if failed_at > turn.now:
        failed_at = turn.vitals.started_at  # the clock was set back before this manager began
    return turn.now - failed_at < turn.timing.backoff_s(failures)


def _say_singly(turn: Turn, num_replaced: int | None) -> None:
    """Keep for the job's view that VMs are asked for one at a time, and how long after each other."""
    wait_s = turn.timing.backoff_s(num_replaced) if num_replaced is not None else None
    if wait_s != turn.vitals.asks_singly_s:
        turn.vitals = replace(turn.vitals, asks_singly_s=wait_s)
