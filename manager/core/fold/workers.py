"""How facts about workers change a job: what they must meet, how they fail, and who is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..facts import BitsFixed, Recalibrated, RecipeFixed, WorkerFailed, WorkerPaced
from ..failures import Death, Rounds, without_progress
from ..state import JobState, Slow, vm_of
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
    if fact.step > state.progress_step:
        state = state.changed(progress_step=fact.step, internal_errors=Rounds())
    if fact.kind == "recipe":
        return state.changed(
            unfit=MappingProxyType({**state.unfit, fact.worker: fact.message}), last_error=fact.message
        )
    if fact.kind == "outdated":  # nothing failed: see `core.rules.versions`
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


def _recalibrated(state: JobState, fact: Recalibrated) -> JobState:
    calibration = dict(state.calibration or {})
    for name in ("forward_s", "backward_s", "input_s", "weight_s"):
        if not calibration.get(name):  # halves, which older calibrations do not have
            continue
        calibration[name] = [t * scale for t, scale in zip(calibration[name], fact.scales, strict=True)]
    return state.changed(calibration=calibration, recalibrated_at=fact.at, paces_changed_at=fact.at)


def _worker_paced(state: JobState, fact: WorkerPaced) -> JobState:
    slow, times = dict(state.slow), dict(state.times_slow)
    before = slow.pop(fact.worker, None)
    if fact.slowdown != 1.0:
        times[fact.worker] = times.get(fact.worker, 0) + (before is None)
        slow[fact.worker] = Slow(fact.slowdown, fact.incarnation, fact.at, times[fact.worker])
    return state.changed(
        slow=MappingProxyType(slow),
        times_slow=MappingProxyType(times),
        paces_changed_at=fact.at,
    )


RULES: Mapping[type[Any], Callable[[JobState, Any], JobState]] = {
    RecipeFixed: _recipe_fixed,
    BitsFixed: _bits_fixed,
    WorkerFailed: _worker_failed,
    Recalibrated: _recalibrated,
    WorkerPaced: _worker_paced,
}
