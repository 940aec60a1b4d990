"""`numerics: exact`: a worker takes part in plans only if its kernels give the bits that the job's do.

Trainers show a hash of what their kernels make of the job's own sections (`worker.trainer.fitness`). At the
first plan the hash that most workers show becomes the job's; from then on a worker that shows another is
unfit. So is one that traces another graph, whatever the numerics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ...protocol.hashes import short
from ...protocol.messages import WorkerReport
from ..spec.start_source import StartSource
from .context import Context
from .facts import BitsFixed
from .state import JobState, vm_of
from .vms import Vm, VmStatus


def fix_bits(context: Context, workers: Collection[WorkerReport]) -> bool:
    """Fix the job's bits, if that was not done yet, for a first plan that these workers could take part in.

    Among as many the earliest worker decides. Trainers of a version that shows none are taken as they are.
    """
    recipe, start = context.state.recipe, context.state.start
    if recipe is None or context.spec.training.numerics != "exact" or recipe.bits_hash is not None:
        return False
    shown = {worker.worker: worker.bits_hash for worker in workers}
    found = [bits for bits in shown.values() if bits is not None]
    if not found or len(found) < len(shown):
        return False
    [(most, _)] = Counter(found).most_common(1)
    alike = tuple(worker for worker in workers if worker.bits_hash == most)
    context.fact(
        BitsFixed(
            at=context.now,
            bits_hash=most,
            kernels_hash=recipe.kernels_hash or alike[0].kernels_hash,
            workers=tuple(worker.worker for worker in alike),
            note=start.other_choices(most) if start is not None else "",
        )
    )
    return True


def is_shown(state: JobState, worker: WorkerReport) -> bool:
    """Whether the worker has shown the job's bits, if it has to."""
    wanted, shown = _compared(state, worker)
    return wanted in (None, shown)


def differs(state: JobState, worker: WorkerReport) -> bool:
    """Whether the worker has shown other bits than the job's."""
    wanted, shown = _compared(state, worker)
    return shown is not None and wanted not in (None, shown)


def _compared(state: JobState, worker: WorkerReport) -> tuple[str | None, str | None]:
    """(hash that the job wants, hash that the worker shows): before a first plan, those of the kernels."""
    recipe = state.recipe
    if recipe is None:
        return None, worker.bits_hash
    if recipe.bits_hash is None:
        return recipe.kernels_hash, worker.kernels_hash
    return recipe.bits_hash, worker.bits_hash


def describe(state: JobState, worker: WorkerReport) -> str:
    """Why a worker that `differs` is unfit, and what would help."""
    wanted, shown = _compared(state, worker)
    assert wanted is not None, "bits are compared under a recipe"
    assert shown is not None, "it has shown them"
    return (
        f"its kernels give other bits ({short(shown)}) than the job's ({short(wanted)}): it has "
        "another kind of processor or other libraries, or the job's dataset or optimizer depends on its "
        "environment; training.instruction_set makes more machines alike"
        + (_about_start(state.start) if state.start is not None else "")
    )


def _about_start(start: StartSource) -> str:
    return (
        f". The job's bits are those of {start.job}, which it starts from: with another loss than there, or "
        "on other machines, submit it with training.numerics: fast"
    )


def may_fit(context: Context, vm: Vm) -> bool:
    """Whether a worker of the VM meets the recipe, or it is not known yet that none does."""
    state, workers = context.state, context.observations.workers_on(vm.vm)
    if not workers or vm.status is VmStatus.REQUESTED or _takes_part(state, vm):
        return True
    return any(worker.worker not in state.unfit for worker in workers)


def asks_singly(context: Context) -> bool:
    """Whether the newest VMs were unfit, and none that is as new is known to be fit."""
    newest = context.state.vms.get(context.state.newest_unfit)
    return newest is not None and not any(
        vm.is_as_new_as(newest) and _is_fit(context, vm) for vm in context.state.live_vms
    )


def on_trial(context: Context) -> bool:
    """Whether a VM is on its way, or has not shown yet whether it is fit: for as long as a trainer may take
    to start."""
    return any(
        context.elapsed_s(vm.joined_at or context.now) <= context.timing.start_wait_s
        and vm.vm not in context.observations.unheard
        and may_fit(context, vm)
        and not _is_fit(context, vm)
        for vm in context.state.live_vms
    )


def _is_fit(context: Context, vm: Vm) -> bool:
    """Whether a worker of the VM is known to meet the recipe."""
    state = context.state
    if state.recipe is None or vm.vm not in context.observations.last_reports:
        return False
    return _takes_part(state, vm) or any(
        worker.graph_hash == state.recipe.graph_hash
        and is_shown(state, worker)
        and worker.worker not in state.unfit
        for worker in context.observations.workers_on(vm.vm)
    )


def _takes_part(state: JobState, vm: Vm) -> bool:
    """Whether the VM has workers of the newest generation that formed, or the one that traced the model."""
    profiler = (state.profiler,) if state.profiler is not None else ()
    return any(
        vm_of(worker) == vm.vm and worker not in state.unfit for worker, _ in (*state.hosts, *profiler)
    )
