"""What follows when hosts of a section hold different state: memory, a processor or a link changed bits.

The members have dropped their state, and the next generation starts from the newest checkpoint. A VM whose
state differs from that of most hosts is replaced. Where there is no majority, each suspect has a strike, and
its trainer tests its kernels again (`fitness` judges what they show); the table of strikes says the rest.
"""

from __future__ import annotations

from ....protocol.messages import Corruption
from ..context import Context
from ..facts import EndReason, StateCorrupted
from ..state import vm_of
from . import breaks, generations


def record(context: Context) -> None:
    """Make a fact of it once for each generation, replace VMs that are known to be wrong, and close it."""
    told = [worker for _, worker in (*context.deaths(), *context.reports()) if worker.corruption is not None]
    for worker in sorted(
        told, key=lambda it: len(it.corruption.suspects) if it.corruption else 0, reverse=True
    ):
        found = worker.corruption
        if found is None or found.generation <= context.state.void_until:
            continue
        context.fact(StateCorrupted(at=context.now, corruption=found, worker=worker.worker))
        if found.has_majority:
            _replace(context, found)
        current = context.state.current
        if current is not None and current.number == found.generation:
            often = "" if found.has_majority else breaks.count(context, current)
            generations.close(context, f"{_described(found)}{often}", context.now)


def _replace(context: Context, found: Corruption) -> None:
    for vm in sorted({vm_of(worker) for worker in found.suspects}):
        known = context.state.vms.get(vm)
        if known is not None and known.live:
            context.end_vm(vm, EndReason.CORRUPT_STATE, _described(found))


def _described(found: Corruption) -> str:
    sections = ", ".join(map(str, found.sections))
    return f"hosts of section {sections} held different state at step {found.step}"
