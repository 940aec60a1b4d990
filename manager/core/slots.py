"""Workers as the planner is told of them."""

from __future__ import annotations

from .commands import WorkerSlot
from .state import JobState, vm_of
from .vms import Vm


def slot_of(state: JobState, worker: str) -> WorkerSlot:
    """A worker as the planner is told of it."""
    vm, slow = state.vms[vm_of(worker)], state.slow.get(worker)
    return WorkerSlot(
        worker=worker,
        vm=vm.vm,
        memory_bytes=memory_bytes(state, vm, int(worker.rpartition(".")[2])),
        slowdown=slow.slowdown if slow is not None else 1.0,
    )


def memory_bytes(state: JobState, vm: Vm, index: int) -> int:
    """What the worker of this index on a VM that has joined may use."""
    assert state.spec is not None, "plans are made for submitted jobs"
    has = int(vm.devices[min(index, len(vm.devices) - 1)]["memory_bytes"])
    return min(has, state.spec.resources.device_memory or has)
