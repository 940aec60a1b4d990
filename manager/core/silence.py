"""Which VMs are silent, and whether it is rather this manager that is cut off.

A VM that sends no report for its lease is *unheard*: no plan counts on it, for it cannot be told to switch.
So is one that peers have lost, by the one connection that each saw fail, once its own connection has been
closed for the grace. It is *silent* after a lease if nothing else shows that it lives either. A step that its
peers committed does: every member of a generation takes part in each commit. So a generation goes on while it
steps, whoever is unheard.

Silence is no death. A silent VM is planned around, and is a worker like any other when it is heard again; it
is ended when its agent must have ended itself (`Timing.given_up_after_s`), or when the provider says so.
While most VMs are unheard since about the same time, and nobody who is heard reports a loss, this manager
takes itself for *isolated*: it closes, plans and opens nothing. A loss that was reported explains the silence
of those VMs until they are heard again, also when the one who reported it has gone on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...protocol.messages import Phase, WorkerReport
from .state import Generation, JobState, Seat, vm_of
from .timing import Timing
from .vitals import Vitals
from .vms import Vm


def judge(state: JobState, vitals: Vitals, now: float, timing: Timing) -> Vitals:
    """The vitals with who is unheard and silent at `now`. Called at each tick."""
    lease_s = timing.vm_lease_s
    joined = [vm for vm in state.live_vms if vm.joined]
    heard = {vm.vm: heard_at(vitals, vm, now) for vm in joined}
    late = frozenset(vm for vm, at in heard.items() if now - at > lease_s)
    lost = _lost(state, vitals, set(heard), late, now, timing)
    unheard = late | lost
    stepping = stepping_generation(state)
    alive_at, bounds = dict(heard), dict.fromkeys(heard, lease_s)
    if stepping is not None and unheard:
        for worker, _ in stepping.seats:
            vm = vm_of(worker)
            if vm in alive_at:
                alive_at[vm] = max(alive_at[vm], vitals.stepped_at)
                # Closing a generation costs at least the step under way: that is given time to be committed.
                bounds[vm] = lease_s + (stepping.predicted_s or 0.0)
    silent = frozenset(vm for vm in unheard if now - alive_at[vm] > bounds[vm])
    explained = (vitals.explained & unheard) | _explained(state, vitals, set(heard) - unheard, unheard)
    others = {vm: at for vm, at in heard.items() if vm not in explained}
    unexplained = unheard - explained
    isolated = bool(unexplained) and _most_at_once(others, unexplained, now, lease_s)
    since = (vitals.isolated_since or now) if isolated else None
    known = vitals.unheard, vitals.lost, vitals.silent, vitals.explained, vitals.isolated_since
    if (unheard, lost, silent, explained, since) == known:
        return vitals
    vitals = replace(vitals, unheard=unheard, lost=lost, silent=silent)
    return replace(vitals, explained=explained, isolated_since=since)


def heard_at(vitals: Vitals, vm: Vm, now: float) -> float:
    """When the VM was last heard of, or this manager began to listen."""
    pulse = vitals.pulses.get(vm.vm)
    last = pulse.at if pulse is not None else vm.joined_at or vm.requested_at
    return vitals.since(last, now)


def heard_again(vitals: Vitals, vms: set[str], now: float) -> Vitals:
    """The vitals when these VMs report. If the manager was isolated, all leases begin anew."""
    if not vms & vitals.unheard:
        return vitals
    if vitals.isolated_since is not None:
        nobody = frozenset[str]()
        return replace(
            vitals,
            unheard=nobody,
            lost=nobody,
            silent=nobody,
            explained=nobody,
            isolated_since=None,
            started_at=now,
        )
    groups = vitals.unheard, vitals.lost, vitals.silent, vitals.explained
    unheard, lost, silent, explained = (names - vms for names in groups)
    return replace(vitals, unheard=unheard, lost=lost, silent=silent, explained=explained)


def stepping_generation(state: JobState) -> Generation | None:
    """Whose steps tell that its members live: the generation before, until the open one has formed."""
    if state.current is None or state.current.formed is not None:
        return state.current
    before = state.history[-1] if state.history else None
    return before if before is not None and before.number > state.abandoned and before.formed else None


def losses(state: JobState, vitals: Vitals, worker: WorkerReport) -> list[str]:
    """Members of the newest generation that `worker` knows to be lost, for no reason that is known.

    One that names all others of several has only seen the generation break: that accuses nobody.
    """
    newest = _newest_opened(state)
    if newest is None or worker.generation != newest.number or not worker.lost:
        return []
    others = {name for name, _ in newest.members if name != worker.worker}
    if len(others) > 1 and others <= set(worker.lost):
        return []
    return [
        seat[0] for seat in newest.members if seat[0] in worker.lost and not _has_died(state, vitals, seat)
    ]


def _lost(
    state: JobState, vitals: Vitals, joined: set[str], late: frozenset[str], now: float, timing: Timing
) -> frozenset[str]:
    """The VMs that peers who are heard have lost, and that did not reconnect in time.

    They stay so until they are heard, though the peers have gone on without them.
    """
    closed = {vm: at for vm in joined if (at := _closed_at(vitals, vm)) is not None}
    if not closed:
        return frozenset()
    heard = joined - late - vitals.lost
    accused = {
        vm_of(name)
        for vm in heard
        for worker in _workers_on(vitals, vm)
        for name in losses(state, vitals, worker)
    }
    grace_s = vitals.reconnection_s(now, timing)
    return frozenset(
        vm for vm, at in closed.items() if vm in vitals.lost or (vm in accused and now - at >= grace_s)
    )


def _has_died(state: JobState, vitals: Vitals, seat: Seat) -> bool:
    """Whether just this trainer is known to be gone, so that nothing follows for its VM."""
    name, incarnation = seat
    pulse = vitals.pulses.get(vm_of(name))
    reports = pulse.report.workers if pulse is not None else []
    newest = max((other.incarnation for other in reports if other.worker == name), default=0)
    return newest > incarnation or state.failed.get(name, -1) >= incarnation


def _newest_opened(state: JobState) -> Generation | None:
    return state.current or next((g for g in reversed(state.history) if g.opened_at is not None), None)


def _explained(state: JobState, vitals: Vitals, heard: set[str], unheard: frozenset[str]) -> frozenset[str]:
    """The VMs whose silence a loss explains that a member of the newest generation reports.

    One that names who is lost explains all that fell silent. One whose generation broke, and who cannot say
    by whom, explains the silence of members whose connection to this manager closed as well.
    """
    newest = _newest_opened(state)
    if newest is None or not unheard:
        return frozenset()
    workers = [worker for vm in heard for worker in _workers_on(vitals, vm)]
    if any(losses(state, vitals, worker) for worker in workers):
        return unheard
    names = {name for name, _ in newest.members}
    if not any(
        w.phase is Phase.BROKEN and w.generation == newest.number and w.worker in names for w in workers
    ):
        return frozenset()
    members = {vm_of(name) for name in names}
    return frozenset(vm for vm in unheard & members if _closed_at(vitals, vm) is not None)


def _workers_on(vitals: Vitals, vm: str) -> Sequence[WorkerReport]:
    pulse = vitals.pulses.get(vm)
    return pulse.report.workers if pulse is not None else ()


def _closed_at(vitals: Vitals, vm: str) -> float | None:
    pulse = vitals.pulses.get(vm)
    return pulse.closed_at if pulse is not None else None


def _most_at_once(heard: dict[str, float], unheard: frozenset[str], now: float, lease_s: float) -> bool:
    """Whether of the VMs that were heard a while ago most have been unheard since.

    Heartbeats come at different moments, so those whose lease is half over count as well.
    """
    begins = max(heard[vm] for vm in unheard) - lease_s
    before = sum(heard[vm] < begins for vm in unheard)
    together = sum(at >= begins and now - at > lease_s / 2 for at in heard.values())
    return 2 * together > len(heard) - before
