"""Only trainers that speak one protocol meet in a generation.

What trainers say to each other, and how they form a generation, has a number of its own. A trainer that is
started anew comes from what its VM has on disk, so an upgrade in place brings two numbers together. That of
the generation that runs stays for as long as its workers are enough; else the one with the most VMs is
taken, and the newest of two that have as many, unless its last generation made no step. Where that would be
a newer one, the generation that runs saves and gives way. Older trainers outside are started anew, once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from ....protocol.messages import Phase, WorkerReport
from ..events import Tick
from ..facts import HoldChanged, WorkerFailed
from ..state import Seat, vm_of
from ..turn import Turn, has_ended, own_steps, seat_of
from ..vitals import Tries
from . import ending, generations

OUTDATED = "outdated"
"""The kind of failure of a trainer that is ended only because it is of an older version than its peers."""

Enough = Callable[[Iterable[Seat]], bool]
"""Whether these workers may train."""

_RETRY_S = 300.0  # before a protocol that made no step wins a tie again; doubles each time
_WAITS = (Phase.IDLE, Phase.BROKEN, Phase.LEFT, Phase.HELD)


def alike(turn: Turn, usable: Mapping[Seat, WorkerReport], enough: Enough) -> dict[Seat, WorkerReport]:
    """Those of `usable` that one generation can have."""
    found = _by_protocol(usable)
    if len(found) < 2:
        return dict(usable)
    running = _running(turn)
    if running in found and enough(found[running]):
        return found[running]
    return found[_best(turn, found, enough)]


def give_way(turn: Turn, usable: Mapping[Seat, WorkerReport], enough: Enough) -> bool:
    """Have the generation that runs save and close when newer trainers wait on as many VMs as it has.

    So it does when a notice leaves too few of its own. Whether it is about to: nothing else is planned until
    then. If they go before it has saved, whoever is there then goes on.
    """
    state, running = turn.state, _running(turn)
    if running is None or state.current is None or state.planned is not None or not state.active:
        return False
    found = _by_protocol(usable)
    newest = _best(turn, found, enough) if found else running
    if turn.noticed(state.current.seats):
        if enough(found.get(running, {})) or not enough(found.get(newest, {})):
            return False  # its own trainers answer the notice, or nobody does
        gives, reason = True, f"a notice leaves too few trainers of protocol {running} for another generation"
    else:
        gives = newest > running
        reason = f"trainers of protocol {newest} wait on as many VMs as those of {running}"
    if state.hold and ending.all_held(turn):
        generations.close(turn, "it held for newer trainers", turn.now)
        return True
    # One that is not heard for a moment is there all the same, and cannot be told to hold.
    if gives and not state.hold and not turn.unheard(state.current.seats):
        turn.fact(HoldChanged(at=turn.now, hold=True, reason=reason))
    return turn.state.hold or gives


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
            worker.worker in turn.state.outdated
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


def count_tries(turn: Turn) -> None:
    """Remember for each protocol how many of its generations in a row were opened and made no step, and when
    the last was seen: it loses a tie for a while, twice as long after each."""
    current, tries = turn.state.current, turn.vitals.tries
    if current is None:
        return
    reports = [r for seat in current.members if (r := turn.report_of(seat)) is not None]
    spoken = {report.trainer_protocol for report in reports}
    if len(spoken) != 1:
        return
    [protocol] = spoken
    if any(report.generation == current.number and own_steps(report) for report in reports):
        tries = {number: known for number, known in tries.items() if number != protocol}
    else:
        before = tries.get(protocol, Tries(0, 0, 0.0))
        count = before.count + (before.generation != current.number)
        tries = {**tries, protocol: Tries(current.number, count, turn.now)}
    if tries != turn.vitals.tries:
        turn.vitals = replace(turn.vitals, tries=MappingProxyType(tries))


def _failing(turn: Turn, protocol: int) -> bool:
    """Whether the last generation of the protocol made no step, a short while ago."""
    tries, current = turn.vitals.tries.get(protocol), turn.state.current
    if tries is None or (current is not None and tries.generation == current.number):
        return False  # it may make its first step yet
    return turn.now - tries.at < _RETRY_S * 2 ** min(tries.count - 1, 16)


def _running(turn: Turn) -> int | None:
    """What the members of the generation that has formed speak."""
    current = turn.state.current
    if current is None or current.formed is None:
        return None
    reports = (turn.report_of(seat) for seat in current.seats)
    return next((report.trainer_protocol for report in reports if report is not None), None)


def _num_vms(seats: Iterable[Seat]) -> int:
    return len({vm_of(worker) for worker, _ in seats})


def _by_protocol(usable: Mapping[Seat, WorkerReport]) -> dict[int, dict[Seat, WorkerReport]]:
    found: dict[int, dict[Seat, WorkerReport]] = {}
    for seat, worker in usable.items():
        found.setdefault(worker.trainer_protocol, {})[seat] = worker
    return found


def _best(turn: Turn, found: Mapping[int, Mapping[Seat, WorkerReport]], enough: Enough) -> int:
    """The protocol whose trainers would go on if nothing ran."""

    def worth(number: int) -> tuple[bool, int, bool, int]:
        return enough(found[number]), _num_vms(found[number]), not _failing(turn, number), number

    return max(found, key=worth)
