"""`apply`: how each fact changes the state of a job. A fact about something unknown is counted, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..spec.job_spec import JobSpec
from . import fold_continuing, fold_generations, fold_notices, fold_pace, fold_renting
from .facts import (
    BitsFixed,
    EndReason,
    Fact,
    HoldChanged,
    IsolationChanged,
    JobEnded,
    JobResumed,
    Obsolete,
    PersonNeeded,
    RecipeFixed,
    Resumption,
    StopOrdered,
    Submitted,
    TrainingFinished,
    VmEnded,
    VmJoined,
    VmRequested,
    WorkerFailed,
)
from .failures import Death, Rounds, without_progress
from .fold_notices import without_deaths
from .state import JobState, Vm, VmStatus, Waiting, order_of, vm_of


def apply(state: JobState, fact: Fact) -> JobState:
    """The state after `fact`. Pure; the fold of a job's facts from `JobState()` is the job."""
    after = _RULES[type(fact)](state, fact)
    return after.changed(num_facts=state.num_facts + 1)


def fold(facts: Iterable[Fact]) -> JobState:
    """The state that a journal tells."""
    state = JobState()
    for fact in facts:
        state = apply(state, fact)
    return state


def _submitted(state: JobState, fact: Submitted) -> JobState:
    spec = JobSpec.model_validate(fact.spec)
    return state.changed(
        job=fact.job,
        spec=spec,
        bundle_sha256=fact.bundle_sha256,
        submitted_at=fact.at,
        start=fact.start,
        copying=fact.start is not None,
    )


def _vm_requested(state: JobState, fact: VmRequested) -> JobState:
    if fact.vm in state.vms:
        return state
    return state.with_vm(Vm(fact.vm, requested_at=fact.at, number=len(state.vms)))


def _vm_joined(state: JobState, fact: VmJoined) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    joined = replace(
        vm, status=VmStatus.JOINED, joined_at=fact.at, address=fact.address, devices=fact.devices
    )
    return fold_renting.with_joined(state.with_vm(joined).changed(request_failures=0), joined)


def _vm_ended(state: JobState, fact: VmEnded) -> JobState:
    vm = state.vms.get(fact.vm)
    if vm is None or not vm.live:
        return state
    counted = vm.requested_at < state.request_failed_at <= fact.at  # not if the clock was set back since
    refused = vm.attempt is not None and vm.attempted_at is None  # that place is left alone, not the others
    if fact.reason is EndReason.REQUEST_FAILED and not counted and not refused:
        # VMs asked for together and refused together are one failure: the wait doubles once, not six times.
        state = state.changed(request_failures=state.request_failures + 1, request_failed_at=fact.at)
    if fact.reason is EndReason.UNUSED:
        state = fold_renting.with_enough(state, fact.at)
    if fact.reason in (EndReason.WORKERS_DIED, EndReason.UNFIT):
        state = state.changed(replaced_at=fact.at)
    if fact.reason is EndReason.WORKERS_DIED:
        state = state.changed(worn_vms=state.worn_vms + 1)
    elif fact.reason is EndReason.UNFIT:
        # Those that came together are one, as for failures; no generation makes a difference here.
        rounds, newest = state.unfit_rounds.failed(fact.at, 0, fact.vm, 0), state.vms.get(state.newest_unfit)
        state = state.changed(unfit_rounds=rounds)
        if newest is None or vm.number > newest.number:
            state = state.changed(newest_unfit=fact.vm)
    if fact.reason not in (EndReason.WORKERS_DIED, EndReason.UNFIT):
        state = without_deaths(state, fact.vm)  # what ended its trainers was the end of the VM
        if _is_last_host(state, fact.vm):
            # Unfit VMs beside one that was fit harmed nobody: only those that come now do.
            state = state.changed(unfit_rounds=Rounds())
    ended = replace(vm, status=VmStatus.ENDED, ended_at=fact.at, reason=fact.reason, detail=fact.detail)
    forgotten = {name: _without(fact.vm, getattr(state, name)) for name in ("slow", "times_slow", "given_up")}
    outdated = frozenset(worker for worker in state.outdated if vm_of(worker) != fact.vm)
    state = state.changed(**forgotten, outdated=outdated).with_vm(ended)
    return fold_renting.with_ended(state, ended, gone=fact.gone)


def _is_last_host(state: JobState, vm: str) -> bool:
    """Whether the VM, and none other that lives, has workers of the newest generation that formed."""
    hosts = {vm_of(worker) for worker, _ in state.hosts}
    return vm in hosts and not any(other.vm in hosts for other in state.live_vms if other.vm != vm)


def _without(vm: str, by_worker: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is known of workers of a VM that has ended."""
    if not any(vm_of(worker) == vm for worker in by_worker):
        return by_worker
    return MappingProxyType({worker: item for worker, item in by_worker.items() if vm_of(worker) != vm})


def _worker_failed(state: JobState, fact: WorkerFailed) -> JobState:
    state = state.changed(failed=MappingProxyType({**state.failed, fact.worker: fact.incarnation}))
    if fact.step > state.progress_step:
        state = state.changed(progress_step=fact.step, internal_errors=Rounds())
    if fact.kind == "recipe":
        return state.changed(
            unfit=MappingProxyType({**state.unfit, fact.worker: fact.message}), last_error=fact.message
        )
    if fact.kind == "outdated":  # nothing failed: see `core.versions`
        return state.changed(
            given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}),
            outdated=state.outdated | {fact.worker},
        )
    if fact.kind == "stuck":
        state = state.changed(given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}))
        if not fact.counted:
            return _died(state, fact, closed=True)
    elif fact.kind not in ("user", "internal"):
        return _died(state, fact)
    state = state.changed(last_error=fact.message, last_traceback=fact.traceback)
    mark = fact.at, state.last_generation, fact.worker, fact.incarnation
    if fact.kind == "user":
        return state.changed(user_errors=state.user_errors.failed(*mark))
    return state.changed(internal_errors=state.internal_errors.failed(*mark))


def _died(state: JobState, fact: WorkerFailed, *, closed: bool = False) -> JobState:
    """A trainer that a signal, its lease, or not leaving a closed generation ended; of a VM that is gone, or
    was to go, that is no wonder."""
    vm = state.vms.get(vm_of(fact.worker))
    if vm is None or not vm.live or vm.status is VmStatus.NOTICED or fact.own_steps is None:
        return state
    death = Death(
        vm.vm,
        fact.worker,
        fact.incarnation,
        fact.at,
        state.last_generation,
        state.progress_step,
        fact.message,
        closed,
    )
    kept = [d for d in state.deaths if fact.own_steps == 0 or d.vm != vm.vm]
    return state.changed(deaths=(*_still_counted(state, kept), death))


def _still_counted(state: JobState, deaths: Iterable[Death]) -> list[Death]:
    """Those on VMs that live; and of others for as long as the job has not gone on since."""
    live = {vm.vm for vm in state.live_vms}
    newest = without_progress(deaths, state.progress_step)
    return [death for death in deaths if death.vm in live or death in newest]


def _recipe_fixed(state: JobState, fact: RecipeFixed) -> JobState:
    version = state.num_facts + 1
    return state.changed(
        recipe=fact.recipe,
        calibration=fact.calibration,
        measurements=fact.measurements,
        profile=None,
        recipe_version=version,
    )


def _unchanged(state: JobState, fact: Obsolete) -> JobState:
    return state


def _bits_fixed(state: JobState, fact: BitsFixed) -> JobState:
    if state.recipe is None:
        return state
    bits = {"bits_hash": fact.bits_hash, "kernels_hash": fact.kernels_hash}
    return state.changed(recipe=state.recipe.model_copy(update=bits))


def _hold_changed(state: JobState, fact: HoldChanged) -> JobState:
    return state.changed(hold=fact.hold)


def _isolation_changed(state: JobState, fact: IsolationChanged) -> JobState:
    return state.changed(isolated=fact.isolated)


def _stop_ordered(state: JobState, fact: StopOrdered) -> JobState:
    """What was impossible was so for training; to save what is held, any number of workers will do."""
    return state.changed(stop_ordered_at=fact.at, failure=fact.failure, waiting=None, impossible=None)


def _training_finished(state: JobState, fact: TrainingFinished) -> JobState:
    return state.changed(finished=fact.checkpoint)


def _person_needed(state: JobState, fact: PersonNeeded) -> JobState:
    found = fact.head_generation, fact.checkpoints, fact.console
    return state.changed(waiting=Waiting(fact.at, fact.reason, fact.offers, fact.vms_until, *found))


def _job_resumed(state: JobState, fact: JobResumed) -> JobState:
    """Generations go on above the head's, whoever opened that."""
    state = fold_renting.without_not_joined(state).changed(
        waiting=None,
        answered=fact.how,
        hold=False,
        impossible=None,
        unfit_rounds=Rounds(),
        refusals=MappingProxyType({}),
        enough=None,
        last_generation=max(state.last_generation, fact.head_generation),
        head_generation=max(state.head_generation, fact.head_generation),
    )
    if state.recipe is not None and (fact.how is Resumption.RESTART or state.progress_step == 0):
        # No step was made with the old bits that those to come would have to match.
        state = state.changed(recipe=state.recipe.without_bits())
    if fact.how is Resumption.AGAIN:
        return state
    published = tuple(sorted(fact.checkpoints, key=order_of)) if fact.how is Resumption.FROM_HEAD else ()
    return state.changed(
        published=published,
        # What the head lacks is no more believed when a worker reports it.
        retired=max([state.retired, *map(order_of, state.published)]),
        base=None,
        opened_generation=fact.head_generation,
        restarting=fact.how is Resumption.RESTART,
        progress_step=max((c.step for c in published), default=0),
    )


def _job_ended(state: JobState, fact: JobEnded) -> JobState:
    return state.changed(ended=fact, ended_at=fact.at)


_RULES: dict[type[Any], Callable[[JobState, Any], JobState]] = {
    **fold_pace.RULES,
    **fold_continuing.RULES,
    **fold_generations.RULES,
    **fold_notices.RULES,
    **fold_renting.RULES,
    Submitted: _submitted,
    VmRequested: _vm_requested,
    VmJoined: _vm_joined,
    VmEnded: _vm_ended,
    WorkerFailed: _worker_failed,
    RecipeFixed: _recipe_fixed,
    Obsolete: _unchanged,
    BitsFixed: _bits_fixed,
    HoldChanged: _hold_changed,
    IsolationChanged: _isolation_changed,
    StopOrdered: _stop_ordered,
    TrainingFinished: _training_finished,
    PersonNeeded: _person_needed,
    JobResumed: _job_resumed,
    JobEnded: _job_ended,
}
