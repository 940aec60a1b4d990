"""The workers that a plan may use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...protocol.messages import Phase, WorkerReport
from . import fitness
from .context import Context, has_ended, incarnation_of
from .state import Incarnation, vm_of
from .vms import Vm, VmStatus

# One that was idle before it ever took part holds nothing; one that left has handed over what it had.
_HOLDS_STATE = (Phase.IDLE, Phase.FORMING, Phase.RUNNING, Phase.BROKEN, Phase.HELD, Phase.FINISHED)
_READY = (Phase.LEFT, *_HOLDS_STATE)


def ready(context: Context) -> dict[Incarnation, WorkerReport]:
    """The workers of all versions that some plan may use, in the order in which their VMs were requested.

    To save what is held, also those that are to hand over will do: they live.
    """
    any_will_do = saves(context)
    return {
        incarnation_of(worker): worker
        for vm, worker in context.reports()
        if (vm.status is VmStatus.JOINED or (any_will_do and vm.joined)) and _is_usable(context, vm, worker)
    }


def enough(context: Context, incarnations: Iterable[Incarnation]) -> bool:
    """Whether these workers may train; to save what they hold, any number will do."""
    num_vms = len({vm_of(worker) for worker, _ in incarnations})
    return num_vms >= context.spec.resources.min_nodes or saves(context)


def saves(context: Context) -> bool:
    """Whether the next generation is only to save what is held: the job is to stop, or too few VMs stay to
    train on, and steps are held that no checkpoint has; they are saved before the other VMs go."""
    state = context.state
    if not state.active or state.current is not None:
        return context.must_save()
    if not any(vm.status is VmStatus.NOTICED for vm in state.live_vms):
        return False
    staying = {
        vm.vm
        for vm, worker in context.reports()
        if vm.status is VmStatus.JOINED and _is_usable(context, vm, worker)
    }
    return len(staying) < context.spec.resources.min_nodes and context.held_step() > state.saved_step


def donors(
    context: Context, incarnations: tuple[Incarnation, ...], usable: Mapping[Incarnation, WorkerReport]
) -> list[Incarnation]:
    """Living workers outside the plan that may hold sections that others need."""
    used = set(incarnations)
    spoken = {usable[incarnation].trainer_protocol for incarnation in incarnations}
    return [
        incarnation_of(worker)
        for _, worker in context.reports()
        if worker.phase in _HOLDS_STATE
        and worker.trainer_protocol in spoken
        and worker.generation > 0
        and incarnation_of(worker) not in used
        and not context.is_away(incarnation_of(worker))
        and not context.is_left_out(incarnation_of(worker))
    ]


def _is_usable(context: Context, vm: Vm, worker: WorkerReport) -> bool:
    state, incarnation = context.state, incarnation_of(worker)
    if worker.phase not in _READY or has_ended(worker) or worker.worker in state.unfit:
        return False
    if state.has_failed(incarnation):
        return False
    if worker.phase is Phase.IDLE and (state.recipe is None or worker.graph_hash != state.recipe.graph_hash):
        return False  # it has not traced the model under the recipe yet
    if worker.phase is Phase.IDLE and not fitness.is_shown(state, worker):
        return False
    if context.is_left_out(incarnation) or vm.vm in context.observations.unheard:
        return False
    # With nothing running, a closed connection is reason enough not to count on a VM.
    return state.current is not None or context.observations.last_reports[vm.vm].closed_at is None
