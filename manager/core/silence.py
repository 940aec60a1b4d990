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

from dataclasses import replace

from ...protocol.messages import Phase, WorkerReport
from .observations import Observations
from .state import Generation, Incarnation, JobState, vm_of
from .timing import Timing
from .vms import Vm


def judge(state: JobState, observations: Observations, now: float, timing: Timing) -> Observations:
    """The observations with who is unheard and silent at `now`. Called at each tick."""
    lease_s = timing.vm_lease_s
    joined = [vm for vm in state.live_vms if vm.joined]
    heard = {vm.vm: heard_at(observations, vm, now) for vm in joined}
    late = frozenset(vm for vm, at in heard.items() if now - at > lease_s)
    lost = _lost(state, observations, set(heard), late, now, timing)
    unheard = late | lost
    stepping = stepping_generation(state)
    alive_at, bounds = dict(heard), dict.fromkeys(heard, lease_s)
    if stepping is not None and unheard:
        for worker, _ in stepping.incarnations:
            vm = vm_of(worker)
            if vm in alive_at:
                alive_at[vm] = max(alive_at[vm], observations.stepped_at)
                # Closing a generation costs at least the step under way: that is given time to be committed.
                bounds[vm] = lease_s + (stepping.predicted_s or 0.0)
    silent = frozenset(vm for vm in unheard if now - alive_at[vm] > bounds[vm])
    explained = (observations.explained & unheard) | _explained(
        state, observations, set(heard) - unheard, unheard
    )
    others = {vm: at for vm, at in heard.items() if vm not in explained}
    unexplained = unheard - explained
    isolated = bool(unexplained) and _most_at_once(others, unexplained, now, lease_s)
    since = (observations.isolated_since or now) if isolated else None
    known = observations.unheard, observations.lost, observations.silent, observations.explained
    if (unheard, lost, silent, explained) == known and since == observations.isolated_since:
        return observations
    return replace(
        observations, unheard=unheard, lost=lost, silent=silent, explained=explained, isolated_since=since
    )


def heard_at(observations: Observations, vm: Vm, now: float) -> float:
    """When the VM was last heard of, or this manager began to listen."""
    last_report = observations.last_reports.get(vm.vm)
    last = last_report.at if last_report is not None else vm.joined_at or vm.requested_at
    return observations.since(last, now)


def heard_again(observations: Observations, vms: set[str], now: float) -> Observations:
    """The observations when these VMs report. If the manager was isolated, all leases begin anew."""
    if not vms & observations.unheard:
        return observations
    if observations.isolated_since is not None:
        vms = set(observations.unheard)
        observations = replace(observations, isolated_since=None, started_at=now)
    return replace(
        observations,
        unheard=observations.unheard - vms,
        lost=observations.lost - vms,
        silent=observations.silent - vms,
        explained=observations.explained - vms,
    )


def stepping_generation(state: JobState) -> Generation | None:
    """Whose steps tell that its members live: the generation before, until the open one has formed."""
    if state.current is None or state.current.formed is not None:
        return state.current
    before = state.history[-1] if state.history else None
    return before if before is not None and before.number > state.abandoned and before.formed else None


def losses(state: JobState, observations: Observations, worker: WorkerReport) -> list[str]:
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
        incarnation.worker
        for incarnation in newest.members
        if incarnation.worker in worker.lost and not _has_died(state, observations, incarnation)
    ]


def _lost(
    state: JobState,
    observations: Observations,
    joined: set[str],
    late: frozenset[str],
    now: float,
    timing: Timing,
) -> frozenset[str]:
    """The VMs that peers who are heard have lost, and that did not reconnect in time.

    They stay so until they are heard, though the peers have gone on without them.
    """
    closed = {vm: at for vm in joined if (at := _closed_at(observations, vm)) is not None}
    if not closed:
        return frozenset()
    heard = joined - late - observations.lost
    accused = {
        vm_of(name)
        for vm in heard
        for worker in observations.workers_on(vm)
        for name in losses(state, observations, worker)
    }
    grace_s = observations.reconnection_s(now, timing)
    return frozenset(
        vm for vm, at in closed.items() if vm in observations.lost or (vm in accused and now - at >= grace_s)
    )


def _has_died(state: JobState, observations: Observations, incarnation: Incarnation) -> bool:
    """Whether just this trainer is known to be gone, so that nothing follows for its VM."""
    name, number = incarnation
    reports = observations.workers_on(vm_of(name))
    newest = max((other.incarnation for other in reports if other.worker == name), default=0)
    return newest > number or state.has_failed(incarnation)


def _newest_opened(state: JobState) -> Generation | None:
    return state.current or next((g for g in reversed(state.history) if g.opened_at is not None), None)


def _explained(
    state: JobState, observations: Observations, heard: set[str], unheard: frozenset[str]
) -> frozenset[str]:
    """The VMs whose silence a loss explains that a member of the newest generation reports.

    One that names who is lost explains all that fell silent. One whose generation broke, and who cannot say
    by whom, explains the silence of members whose connection to this manager closed as well.
    """
    newest = _newest_opened(state)
    if newest is None or not unheard:
        return frozenset()
    workers = [worker for vm in heard for worker in observations.workers_on(vm)]
    if any(losses(state, observations, worker) for worker in workers):
        return unheard
    names = {name for name, _ in newest.members}
    if not any(
        w.phase is Phase.BROKEN and w.generation == newest.number and w.worker in names for w in workers
    ):
        return frozenset()
    members = {vm_of(name) for name in names}
    return frozenset(vm for vm in unheard & members if _closed_at(observations, vm) is not None)


def _closed_at(observations: Observations, vm: str) -> float | None:
    last_report = observations.last_reports.get(vm)
    return last_report.closed_at if last_report is not None else None


def _most_at_once(heard: dict[str, float], unheard: frozenset[str], now: float, lease_s: float) -> bool:
    """Whether of the VMs that were heard a while ago most have been unheard since.

    Heartbeats come at different moments, so those whose lease is half over count as well.
    """
    begins = max(heard[vm] for vm in unheard) - lease_s
    before = sum(heard[vm] < begins for vm in unheard)
    together = sum(at >= begins and now - at > lease_s / 2 for at in heard.values())
    return 2 * together > len(heard) - before
