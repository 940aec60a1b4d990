"""How facts about workers change a job: what they must meet, how they fail, and who is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..facts import BitsFixed, Recalibrated, RecipeFixed, WorkerFailed, WorkerPaced
from ..state import JobState, Slow, vm_of
from ..strikes.ledger import JOB, Subject, forgive_on_progress, strike
from ..strikes.table import Kind, Progress
from ..vms import VmStatus


def _recipe_fixed(state: JobState, fact: RecipeFixed) -> JobState:
    version = state.num_facts + 1
    return state.changed(
        recipe=fact.recipe,
        calibration=fact.calibration,
        measurements=fact.measurements,
        profile=None,
        recipe_version=version,
    )


def _bits_fixed(state: JobState, fact: BitsFixed) -> JobState:
    if state.recipe is None:
        return state
    bits = {"bits_hash": fact.bits_hash, "kernels_hash": fact.kernels_hash}
    return state.changed(recipe=state.recipe.model_copy(update=bits))


def _worker_failed(state: JobState, fact: WorkerFailed) -> JobState:
    state = state.changed(failed=MappingProxyType({**state.failed, fact.worker: fact.incarnation}))
    step = state.possible(fact.step)
    if step > state.progress_step:
        strikes = forgive_on_progress(state.strikes, Progress.STEP)
        state = state.changed(progress_step=step, strikes=strikes)
    if fact.kind == "recipe":
        return state.changed(
            unfit=MappingProxyType({**state.unfit, fact.worker: fact.message}), last_error=fact.message
        )
    if fact.kind == "unreadable":  # no trainer's fault: a person is asked, see `rules.waiting`
        return state.changed(last_error=fact.message, last_traceback=None)
    if fact.kind == "outdated":  # nothing failed: see `core.rules.versions`
        return state.changed(
            given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}),
            strikes=strike(state.strikes, Kind.OUTDATED, fact.worker, fact.at, by=[fact.incarnation]),
        )
    if fact.kind == "stuck":
        state = state.changed(given_up=MappingProxyType({**state.given_up, fact.worker: fact.incarnation}))
        if not fact.counted:
            return _died(state, fact, Kind.VM_DEATH)
    elif fact.kind not in ("user", "internal"):
        return _died(state, fact, Kind.VM_DEATH, Kind.DEATH)
    state = state.changed(last_error=fact.message, last_traceback=fact.traceback)
    kind = Kind.USER_ERROR if fact.kind == "user" else Kind.INTERNAL_ERROR
    return _struck(state, fact, kind, JOB, fact.message)


def _died(state: JobState, fact: WorkerFailed, *kinds: Kind) -> JobState:
    """A trainer that a signal, its lease, or not leaving a closed generation ended; of a VM that is gone, or
    was to go, that is no wonder."""
    vm = state.vms.get(vm_of(fact.worker))
    if vm is None or not vm.live or vm.status is VmStatus.NOTICED:
        return state
    if fact.own_steps:
        state = state.changed(strikes=forgive_on_progress(state.strikes, Progress.OWN_STEP, {vm.vm}))
    for kind in kinds:
        state = _struck(state, fact, kind, vm.vm, f"{fact.worker}: {fact.message}")
    return state


def _struck(state: JobState, fact: WorkerFailed, kind: Kind, subject: Subject, why: str) -> JobState:
    """Trainers fail together in one generation: once the next is open, another try was made."""
    strikes = strike(
        state.strikes,
        kind,
        subject,
        fact.at,
        by=[fact.worker],
        step=state.progress_step,
        generation=state.opened_generation,
        why=why,
    )
    return state.changed(strikes=strikes)


def _recalibrated(state: JobState, fact: Recalibrated) -> JobState:
    calibration = dict(state.calibration or {})
    for name in ("forward_s", "backward_s", "input_s", "weight_s"):
        if not calibration.get(name):  # halves, which older calibrations do not have
            continue
        calibration[name] = [t * scale for t, scale in zip(calibration[name], fact.scales, strict=True)]
    return state.changed(calibration=calibration, recalibrated_at=fact.at, paces_changed_at=fact.at)


def _worker_paced(state: JobState, fact: WorkerPaced) -> JobState:
    slow, strikes = dict(state.slow), state.strikes
    before = slow.pop(fact.worker, None)
    if fact.slowdown != 1.0:
        slow[fact.worker] = Slow(fact.slowdown, fact.incarnation, fact.at)
        if before is None:
            strikes = strike(strikes, Kind.SLOW, fact.worker, fact.at)
    return state.changed(slow=MappingProxyType(slow), strikes=strikes, paces_changed_at=fact.at)


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    RecipeFixed: _recipe_fixed,
    BitsFixed: _bits_fixed,
    WorkerFailed: _worker_failed,
    Recalibrated: _recalibrated,
    WorkerPaced: _worker_paced,
}
