"""Only trainers that speak one protocol meet in a generation.

What trainers say to each other, and how they form a generation, has a number of its own. A trainer that is
started anew comes from what its VM has on disk, so an upgrade in place brings two numbers together. That of
the generation that runs stays for as long as its workers are enough; else the one with the most VMs is
taken, and the newest of two that have as many, unless its last generation made no step. Where that would be
a newer one, the generation that runs saves and gives way. Older trainers outside are started anew, once each;
so they are while others measure the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ....protocol.messages import Phase, WorkerReport
from .. import candidates
from ..context import Context, has_ended, incarnation_of, own_steps
from ..events import Tick
from ..facts import HoldChanged, WorkerFailed
from ..state import Incarnation, vm_of
from ..strikes.table import Kind, Progress
from . import ending, generations

OUTDATED = "outdated"
"""The kind of failure of a trainer that is ended only because it is of an older version than its peers."""

_WAITS = (Phase.IDLE, Phase.BROKEN, Phase.LEFT, Phase.HELD)


def alike(context: Context, usable: Mapping[Incarnation, WorkerReport]) -> dict[Incarnation, WorkerReport]:
    """Those of `usable` that one generation can have."""
    found = _by_protocol(usable)
    if len(found) < 2:
        return dict(usable)
    running = _running(context)
    if running in found and candidates.enough(context, found[running]):
        return found[running]
    return found[_best(context, found)]


def give_way(context: Context, usable: Mapping[Incarnation, WorkerReport]) -> bool:
    """Have the generation that runs save and close when newer trainers wait on as many VMs as it has.

    So it does when a notice leaves too few of its own. Whether it is about to: nothing else is planned until
    then. If they go before it has saved, whoever is there then goes on.
    """
    state, running = context.state, _running(context)
    if running is None or state.current is None or state.planned is not None or not state.active:
        return False
    found = _by_protocol(usable)
    newest = _best(context, found) if found else running
    if context.noticed(state.current.incarnations):
        answered = candidates.enough(context, found.get(running, {}))
        if answered or not candidates.enough(context, found.get(newest, {})):
            return False  # its own trainers answer the notice, or nobody does
        gives, reason = True, f"a notice leaves too few trainers of protocol {running} for another generation"
    else:
        gives = newest > running
        reason = f"trainers of protocol {newest} wait on as many VMs as those of {running}"
    if state.hold and ending.all_held(context):
        generations.close(context, "it held for newer trainers", context.now)
        return True
    # One that is not heard for a moment is there all the same, and cannot be told to hold.
    if gives and not state.hold and not context.unheard(state.current.incarnations):
        context.fact(HoldChanged(at=context.now, hold=True, reason=reason))
    return context.state.hold or gives


def restart_older(context: Context) -> None:
    """Have trainers that wait, and are older than the generation that runs or measures, ended: the next of
    their name is of the version on disk. One that is as old as before waits."""
    running = _running(context)
    if not isinstance(context.event, Tick) or context.isolated or running is None or not context.state.active:
        return
    taken = {
        incarnation
        for g in (context.state.current, context.state.planned)
        if g is not None
        for incarnation in g.members
    }
    for vm, worker in context.reports():
        waits = worker.phase in _WAITS and incarnation_of(worker) not in taken and not has_ended(worker)
        if not waits or worker.trainer_protocol >= running or vm.vm in context.observations.unheard:
            continue
        if context.is_reached(Kind.OUTDATED, worker.worker) or context.state.has_failed(
            incarnation_of(worker)
        ):
            continue
        restart(
            context, worker, f"it speaks trainer protocol {worker.trainer_protocol}, the generation {running}"
        )


def restart(context: Context, worker: WorkerReport, why: str) -> None:
    """Have the trainer ended, so that the next of its name is of the version on disk."""
    context.fact(
        WorkerFailed(
            at=context.now,
            worker=worker.worker,
            incarnation=worker.incarnation,
            kind=OUTDATED,
            message=why,
            step=worker.step,
        )
    )


def count_tries(context: Context) -> None:
    """A generation that is open and has made no step is a strike of its trainers' protocol: that loses a tie
    for a while, from when the generation was last seen."""
    current = context.state.current
    if current is None:
        return
    reports = context.reports_of(current.members)
    spoken = {report.trainer_protocol for report in reports}
    if len(spoken) != 1:
        return
    [protocol] = map(str, spoken)
    if any(report.generation == current.number and own_steps(report) for report in reports):
        context.forgive(Progress.OWN_STEP, {protocol})
    else:
        context.strike(Kind.PROTOCOL, protocol, by=[current.number])


def _failing(context: Context, protocol: int) -> bool:
    """Whether the last generation of the protocol made no step, a short while ago."""
    current = context.state.current
    if current is not None and current.number in context.strikes(Kind.PROTOCOL, str(protocol)).by:
        return False  # it may make its first step yet
    return context.is_paused(Kind.PROTOCOL, str(protocol))


def _running(context: Context) -> int | None:
    """What the members of the generation that has formed, or that measures the model, speak."""
    generation = context.state.current if context.state.running else context.state.profile
    if generation is None or generation.opened_at is None:
        return None
    reports = context.reports_of(generation.incarnations)
    return reports[0].trainer_protocol if reports else None


def _num_vms(incarnations: Iterable[Incarnation]) -> int:
    return len({vm_of(worker) for worker, _ in incarnations})


def _by_protocol(usable: Mapping[Incarnation, WorkerReport]) -> dict[int, dict[Incarnation, WorkerReport]]:
    found: dict[int, dict[Incarnation, WorkerReport]] = {}
    for incarnation, worker in usable.items():
        found.setdefault(worker.trainer_protocol, {})[incarnation] = worker
    return found


def _best(context: Context, found: Mapping[int, Mapping[Incarnation, WorkerReport]]) -> int:
    """The protocol whose trainers would go on if nothing ran."""

    def worth(number: int) -> tuple[bool, int, bool, int]:
        trainers = found[number]
        return candidates.enough(context, trainers), _num_vms(trainers), not _failing(context, number), number

    return max(found, key=worth)
