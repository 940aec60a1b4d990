"""`numerics: exact`: a worker takes part in plans only if its kernels give the bits that the job's do.

Trainers show a hash of what their kernels make of the job's own sections (`worker.fitness`). At the first
plan the hash that most workers show becomes the job's; from then on a worker that shows another is unfit.
So is one that traces another graph, whatever the numerics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ...worker.messages import WorkerReport
from ..facts import BitsFixed
from ..state import JobState, Vm, VmStatus, vm_of
from .turn import Turn


def fix_bits(turn: Turn, workers: Iterable[WorkerReport]) -> bool:
    """Fix the job's bits, if that was not done yet, for a first plan that these workers could take part in.

    Among as many the earliest worker decides. Trainers of a version that shows none are taken as they are.
    """
    spec, recipe = turn.state.spec, turn.state.recipe
    if spec is None or recipe is None or spec.training.numerics != "exact" or recipe.bits_hash is not None:
        return False
    shown = {worker.worker: worker.bits_hash for worker in workers}
    found = [bits for bits in shown.values() if bits is not None]
    if not found or len(found) < len(shown):
        return False
    [(most, _)] = Counter(found).most_common(1)
    alike = tuple(worker for worker, bits in shown.items() if bits == most)
    turn.fact(BitsFixed(at=turn.now, bits_hash=most, workers=alike))
    return True


def is_shown(state: JobState, worker: WorkerReport) -> bool:
    """Whether the worker has shown the job's bits, if it has to."""
    return state.recipe is None or state.recipe.bits_hash in (None, worker.bits_hash)


def differs(state: JobState, worker: WorkerReport) -> bool:
    """Whether the worker has shown other bits than the job's."""
    return worker.bits_hash is not None and not is_shown(state, worker)


def describe(state: JobState, worker: WorkerReport) -> str:
    """Why a worker that `differs` is unfit, and what would help."""
    assert state.recipe is not None, "bits are compared under a recipe"
    return (
        f"its kernels give other bits ({worker.bits_hash}) than the job's ({state.recipe.bits_hash}): it has "
        "another kind of processor, or other libraries; training.instruction_set makes more machines alike"
    )


def may_fit(turn: Turn, vm: Vm) -> bool:
    """Whether a worker of the VM meets the recipe, or it is not known yet that none does."""
    state, pulse = turn.state, turn.vitals.pulses.get(vm.vm)
    if pulse is None or vm.status is VmStatus.REQUESTED or _takes_part(state, vm):
        return True
    workers = pulse.report.workers
    return not workers or any(worker.worker not in state.unfit for worker in workers)


def _takes_part(state: JobState, vm: Vm) -> bool:
    """Whether the VM has workers of the newest generation that formed, or the one that traced the model."""
    profiler = (state.profiler,) if state.profiler is not None else ()
    return any(
        vm_of(worker) == vm.vm and worker not in state.unfit for worker, _ in (*state.hosts, *profiler)
    )
