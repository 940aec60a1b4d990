"""What each VM should now be doing: a pure projection of a job's state, sent whenever it changes."""

from __future__ import annotations

from dataclasses import dataclass

from ..worker.messages import GenerationOrder, JobSettings, Member, Orders
from .spec import to_settings
from .state import Generation, JobState, vm_of


@dataclass(frozen=True, slots=True)
class Leases:
    """Bounds that agents keep, in seconds."""

    trainer_lease_s: float = 10.0
    orphan_timeout_s: float = 600.0


def orders(state: JobState, vm: str, leases: Leases = Leases()) -> Orders:
    """The orders of one VM. A VM that ended or was never asked for is told to shut down (fencing)."""
    known = state.vms.get(vm)
    if known is None or not known.live or state.ended is not None or state.spec is None:
        return Orders(version=state.num_facts, action="shutdown", abandoned=state.last_generation)
    generation = _generation_for(state, vm)
    profiler = state.profiler[0] if state.profiler is not None and state.recipe is None else None
    profiles = profiler is not None and vm_of(profiler) == vm
    return Orders(
        version=state.num_facts,
        action="profile" if profiles else "train" if generation is not None else "idle",
        job=settings(state),
        recipe=state.recipe,
        generation=generation,
        abandoned=state.abandoned,
        hold=state.hold or state.stop_ordered_at is not None,
        profile_worker=profiler if profiles else None,
        lease_s=leases.trainer_lease_s,
        orphan_timeout_s=leases.orphan_timeout_s,
    )


def settings(state: JobState) -> JobSettings:
    """The job's settings as trainers get them. The job must have been submitted."""
    assert state.spec is not None, "no job was submitted"
    return to_settings(state.spec, state.job, state.bundle_sha256)


def _generation_for(state: JobState, vm: str) -> GenerationOrder | None:
    """The newest generation that concerns the VM: the planned one to prepare, else the open one."""
    for generation in (state.planned, state.current):
        if generation is not None and any(vm_of(worker) == vm for worker, _ in generation.members):
            return _order(state, generation)
    return None


def _order(state: JobState, generation: Generation) -> GenerationOrder:
    return GenerationOrder(
        number=generation.number,
        phase="prepare" if generation.opened_at is None else "go",
        plan=dict(generation.plan),
        members=[
            Member(worker=worker, address=state.vms[vm_of(worker)].address)
            for worker, _ in generation.members
        ],
        checkpoints=list(generation.checkpoints),
        endpoint=generation.endpoint if generation.opened_at is not None else None,
    )
