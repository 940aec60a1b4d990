"""Only trainers that speak one protocol meet in a generation.

What trainers say to each other, and how they form a generation, has a number of its own. A trainer that is
started anew comes from what its VM has on disk, so an upgrade in place brings two numbers together. That of
the generation that runs stays for as long as its workers are enough; else the one with the most VMs is
taken, and the newest of two that have as many. Older trainers outside are started anew, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...worker.messages import Phase, WorkerReport
from ..events import Tick
from ..facts import WorkerFailed
from ..state import Seat, vm_of
from .turn import Turn, has_ended, seat_of

OUTDATED = "outdated"
"""The kind of failure of a trainer that is ended only because it is of an older version than its peers."""

_WAITS = (Phase.IDLE, Phase.BROKEN, Phase.LEFT)


def alike(
    turn: Turn, usable: Mapping[Seat, WorkerReport], enough: Callable[[Iterable[Seat]], bool]
) -> dict[Seat, WorkerReport]:
    """Those of `usable` that one generation can have."""
    found: dict[int, dict[Seat, WorkerReport]] = {}
    for seat, worker in usable.items():
        found.setdefault(worker.trainer_protocol, {})[seat] = worker
    if len(found) < 2:
        return dict(usable)
    running = _running(turn)
    if running in found and enough(found[running]):
        return found[running]
    return max(found.items(), key=lambda item: (enough(item[1]), _num_vms(item[1]), item[0]))[1]


def restart_older(turn: Turn) -> None:
    """Have trainers that wait, and are older than the generation that runs, ended: the next of their name is
    of the version on disk. One that is as old as before waits."""
    running = _running(turn)
    if not isinstance(turn.event, Tick) or turn.isolated or running is None or not turn.state.active:
        return
    taken = {seat for g in (turn.state.current, turn.state.planned) if g is not None for seat in g.members}
    for vm, worker in turn.reports():
        waits = worker.phase in _WAITS and seat_of(worker) not in taken and not has_ended(worker)
        if not waits or worker.trainer_protocol >= running or vm.vm in turn.vitals.unheard:
            continue
        if (
            worker.worker in turn.state.stuck
            or turn.state.failed.get(worker.worker, -1) >= worker.incarnation
        ):
            continue
        message = f"it speaks trainer protocol {worker.trainer_protocol}, the generation {running}"
        turn.fact(
            WorkerFailed(
                at=turn.now,
                worker=worker.worker,
                incarnation=worker.incarnation,
                kind=OUTDATED,
                message=message,
                step=worker.step,
            )
        )


def _running(turn: Turn) -> int | None:
    """What the members of the generation that has formed speak."""
    current = turn.state.current
    if current is None or current.formed is None:
        return None
    reports = (turn.report_of(seat) for seat in current.seats)
    return next((report.trainer_protocol for report in reports if report is not None), None)


def _num_vms(seats: Iterable[Seat]) -> int:
    return len({vm_of(worker) for worker, _ in seats})
