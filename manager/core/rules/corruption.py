"""What follows when hosts of a section hold different state: memory, a processor or a link changed bits.

The members have dropped their state, and the next generation starts from the newest checkpoint. A VM whose
state differs from that of most hosts is replaced. Where there is no majority, each suspect has a strike, and
its trainer tests its kernels again (`fitness` judges what they show); the table of strikes says the rest. If
hosts differ again and again before a newer checkpoint is published, no VM is to blame: a person is asked.
"""

from __future__ import annotations

from ....protocol.messages import Corruption
from ..context import Context
from ..facts import EndReason, Resumption, StateCorrupted
from ..state import vm_of
from ..strikes.table import Kind
from . import breaks, generations, waiting


def record(context: Context) -> None:
    """Make a fact of it once for each generation, and once more for suspects that only a later report names;
    replace VMs that are known to be wrong, and close the generation whose members may hold such state."""
    for worker, found in _told(context):
        is_new = found.generation > context.state.void_until
        if not is_new and not _names_more(context, found):
            continue
        context.fact(StateCorrupted(at=context.now, corruption=found, worker=worker))
        if found.has_majority:
            for vm in _live_suspects(context, found):
                context.end_vm(vm, EndReason.CORRUPT_STATE, _described(found))
        if is_new:
            _close(context, found)
            _ask_a_person(context)


def _told(context: Context) -> list[tuple[str, Corruption]]:
    """(the worker that reports it, what it found), those first that say most about whose state is wrong."""
    workers = [worker for _, worker in (*context.deaths(), *context.reports())]
    told = [(worker.worker, worker.corruption) for worker in workers if worker.corruption is not None]
    return sorted(told, key=lambda it: (it[1].has_majority, len(it[1].suspects)), reverse=True)


def _names_more(context: Context, found: Corruption) -> bool:
    """Whether a later report on the newest such generation names suspects that those before did not."""
    if found.generation not in context.strikes(Kind.DIFFERENCE).by:
        return False
    suspects = _live_suspects(context, found)
    if found.has_majority:
        return bool(suspects)
    return any(found.generation not in context.strikes(Kind.CORRUPT_STATE, vm).by for vm in suspects)


def _live_suspects(context: Context, found: Corruption) -> list[str]:
    return sorted({vm_of(worker) for worker in found.suspects} & context.state.vms.live.keys())


def _close(context: Context, found: Corruption) -> None:
    """Close the open generation if its members may hold such state: that in which it was found, or one that
    goes on from the state of a member that had left before."""
    current = context.state.current
    if current is not None and current.number <= context.state.void_until:
        often = "" if found.has_majority else breaks.count(context, current)
        generations.close(context, f"{_described(found)}{often}", context.now)


def _ask_a_person(context: Context) -> None:
    if not context.state.active or not context.is_reached(Kind.DIFFERENCE):
        return
    strikes = context.strikes(Kind.DIFFERENCE)
    reason = (
        f"hosts of a section hold different state again and again, {strikes.count} times since the newest "
        f"checkpoint, the last {strikes.why}: is the optimizer or a kernel of the model not deterministic? "
        "If so, mend it and submit the job again, with checkpoint.start_from"
    )
    waiting.wait(context, reason, (Resumption.AGAIN,))


def _described(found: Corruption) -> str:
    sections = ", ".join(map(str, found.sections))
    return f"hosts of section {sections} held different state at step {found.step}"
