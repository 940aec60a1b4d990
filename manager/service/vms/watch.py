"""Compares providers' lists with the jobs: finds VMs that are gone, and releases unwanted ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...core.events import Batch, Event, VmEndingSeen, VmListed, VmTerminated
from ...core.state import JobState
from ...core.vms import Vm
from ...providers import (
    Bounded,
    Partial,
    Provider,
    ProviderError,
    Resource,
    ResourceStatus,
    Throttled,
    newest_attempts,
    run_times,
    statuses,
    taken_back,
)
from ...spec.resources import CLOUDS
from ...threads import CallKind, Threads, told_when_slow
from ..effects import Effects
from ..quarantine import Quarantined
from ..runtime import Job
from .closings import MOST_LOOKS, Closings
from .news import news_of

log = logging.getLogger("makara.manager")
_IDLE = 4.0  # a cloud without VMs of ours is listed so many times more rarely
_LONGEST_S = 300.0  # the longest interval while a cloud throttles
_MOST_FAILURES = 3  # queries by name that fail in a row: then the place does not answer, so stop asking
# One that was shut down from inside is still there, or listed as ended with its reason.
_FORGOTTEN = "its cloud no longer has it"
_PATIENCE = 2  # lists in a row without a VM before it counts as gone, because a cloud's lists lag


class PollInterval:
    """The interval between calls to a provider, which grows while it throttles."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.wait_s = every_s

    @property
    def is_slowed(self) -> bool:
        """Whether the provider has throttled recently."""
        return self.wait_s > self._every_s

    def answered(self, *, throttled: bool) -> None:
        if throttled:
            self.wait_s = max(self.wait_s, min(2 * self.wait_s, _LONGEST_S))
        else:
            self.wait_s = max(self._every_s, self.wait_s / 2)


@dataclass(frozen=True, slots=True)
class ListedVms:
    """A provider's answer. `unknown`: VMs about which it said nothing; `trouble`: why, or empty. `capacity`:
    how many VMs it can have at a time, if that is bounded."""

    resources: list[Resource]
    unknown: Collection[str]
    trouble: str
    capacity: int | None = None


@dataclass(kw_only=True, eq=False)
class ProviderWatch:
    """Repeatedly compares one provider's list with the jobs. Runs on the event loop.

    A provider that fails or hangs is shown as trouble of its jobs, and delays no other provider.
    """

    name: str
    provider: Provider
    jobs: Mapping[str, Job]
    effects: Effects
    threads: Threads
    handle: Callable[[str, Event], Awaitable[None]]
    clock: Callable[[], float]
    every_s: float
    slow_call_s: float

    def __post_init__(self) -> None:
        self.closings = Closings()
        self.capacity: int | None = None
        self._pace = PollInterval(self.every_s)
        self._missing: dict[str, int] = {}  # lists in a row without the VM
        self._expected: dict[str, int] = {}  # VMs that should be listed, unless they are gone; their attempts
        self._away: dict[str, int] = {}  # VMs without a connection that had joined; their attempts
        self._asked: dict[str, int] = {}  # how often each of those was asked for by name since
        self._is_used = True  # whether the last list had anything
        self._releasing: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Get the list and act on it, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._pace.wait_s * (_IDLE if self._is_idle() else 1.0))
                self._pace.answered(throttled=await self.look())
        finally:
            for task in self._releasing.values():
                task.cancel()

    def _is_idle(self) -> bool:
        """Whether this is a cloud whose list was empty and from which no job has a VM."""
        return self.name in CLOUDS and not self._is_used and not any(self._counted())

    def _counted(self) -> Iterator[Vm]:
        for job in self.jobs.values():
            yield from (vm for vm in job.state.counted_vms if provider_of(job.state, vm) == self.name)

    async def look(self) -> bool:
        """Get the list once and act on it; returns whether the provider throttled."""
        releasing = set(self._releasing)
        self._expected = {
            vm.vm: vm.num_attempts
            for job in self.jobs.values()
            for vm in self._live_vms(job)
            if not self.effects.renting.may_appear(job.state, vm)
        }
        self._away = {vm.vm: vm.num_attempts for job in self.jobs.values() for vm in self._away_vms(job)}
        listing = self.threads.run(CallKind.LIST_VMS, self._list, owner=self.name)
        try:
            slow = f"no answer for {self.slow_call_s:g} s"
            seen = await told_when_slow(listing, self.slow_call_s, lambda: self._tell_trouble(slow))
        except ProviderError as error:
            log.warning("cannot list VMs: %s", error)
            self._tell_trouble(str(error))
            return isinstance(error, Throttled)
        self._clear_trouble()
        self.capacity = seen.capacity
        if seen.trouble:
            log.warning("cannot list all VMs: %s", seen.trouble)
            self._tell_trouble(seen.trouble)
        self._is_used = bool(seen.resources) or bool(seen.trouble)
        await self.compare(seen.resources, seen.unknown, releasing)
        return False

    async def follow_closings(self) -> None:
        """Ask about VMs whose connections closed, until cancelled, since the next list may be far off."""
        await self.closings.follow(self._look_at)

    async def _look_at(self, closed: Mapping[str, str]) -> None:
        """Ask for the status of VMs whose connections closed; `closed` is {VM: job}.

        VMs that reconnected are left out. While the provider throttles, nothing is asked before its list.
        """
        away: dict[str, int] = {}
        for name, job in closed.items():
            runtime = self.jobs.get(job)
            if runtime is None or name in runtime.connections or name not in runtime.state.vms.live:
                continue
            away[name] = runtime.state.vms.live[name].num_attempts
        if not away or self._pace.is_slowed:
            return
        if len(away) > MOST_LOOKS:
            self._pace.answered(throttled=await self.look())
            return
        try:
            found = await self.threads.run(CallKind.LIST_VMS, self._looks, away, owner=self.name)
        except ProviderError as error:
            log.warning("cannot look at VMs whose connections closed: %s", error)
            if isinstance(error, Throttled):
                self._pace.answered(throttled=True)
            return
        await self._tell_ended(found, away)

    def _looks(self, vms: Mapping[str, int]) -> list[Resource]:
        return [found for vm, attempts in vms.items() for found in self.provider.look(vm, attempts)]

    def _list(self) -> ListedVms:
        """Get the list. VMs that it lacks are asked for by name, since clouds' lists lag; so are some VMs
        without a connection, if the list does not tell whether they have shut themselves down."""
        trouble = ""
        try:
            listed = list(self.provider.list())
        except Partial as error:
            listed, trouble = list(error.found), str(error)
        unknown = set[str]()
        lacking = self._expected.keys() - {resource.vm for resource in listed}
        for vm in lacking if self.name in CLOUDS else ():
            if len(unknown) >= _MOST_FAILURES:
                unknown.add(vm)
                continue
            try:
                listed += self.provider.look(vm, self._expected[vm])
            except ProviderError:
                if not trouble:
                    raise
                unknown.add(vm)  # it may be where the provider could not ask
        for vm in self._next_away({one.vm for one in listed if not one.shows_power}):
            found = self.provider.look(vm, self._away[vm])
            listed = [one for one in listed if one.vm != vm] + list(found)
        capacity = self.provider.capacity() if isinstance(self.provider, Bounded) else None
        return ListedVms(listed, unknown, trouble, capacity)

    def _next_away(self, running: Collection[str]) -> list[str]:
        """A few of the VMs without a connection, those least often asked for first."""
        self._asked = {vm: self._asked.get(vm, 0) for vm in self._away if vm in running}
        turn = sorted(self._asked, key=lambda vm: self._asked[vm])[:MOST_LOOKS]
        self._asked |= {vm: self._asked[vm] + 1 for vm in turn}
        return turn

    async def compare(
        self,
        resources: Sequence[Resource],
        unknown: Collection[str] = (),
        releasing: Collection[str] = (),
    ) -> None:
        """Tell jobs which of their VMs are gone; release unwanted resources.

        `unknown`: VMs of unknown status; `releasing`: VMs that were being released when the list was asked
        for, which it may have although they are gone by now.
        """
        present, attempts = statuses(resources), newest_attempts(resources)
        live = {vm.vm for job in self.jobs.values() for vm in job.state.live_vms}
        await self._tell_ended(resources, live.difference(unknown) if unknown else None)
        for vm in self._unwanted(present):
            if vm not in self._releasing and vm not in releasing:
                log.warning("VM %s belongs to no running job: releasing it", vm)
                task = asyncio.create_task(self._release(vm, attempts[vm]))
                self._releasing[vm] = task
                task.add_done_callback(lambda _, vm=vm: self._releasing.pop(vm))

    async def _tell_ended(self, resources: Sequence[Resource], among: Collection[str] | None) -> None:
        """Tell jobs which of their VMs are gone or going; `among` these, or all."""
        now, present, why = self.clock(), statuses(resources), taken_back(resources)
        events: defaultdict[str, list[VmTerminated | VmEndingSeen | VmListed]] = defaultdict(list)
        for job, runtime in self.jobs.items():
            events[job] += news_of(runtime.state, resources, now)
        ran_s = run_times(resources)
        for job, vm in self._vanished(present, among):
            known = self.jobs[job].state.vms[vm]
            forgotten = _FORGOTTEN if known.joined and vm not in present and self.name in CLOUDS else ""
            taken, ran = why.get(vm, forgotten), ran_s.get((vm, known.num_attempts))
            events[job].append(VmTerminated(now=now, vm=vm, taken_back=taken, ran_s=ran))
        for job, vm in self._ending(present):
            events[job].append(VmEndingSeen(now=now, vm=vm, taken_back=why.get(vm, "")))
        for job, told in events.items():
            if not told:
                continue
            with contextlib.suppress(Quarantined):  # the next list repeats it
                await self.handle(job, Batch(now=now, events=tuple(told)))

    def _vanished(
        self, present: Mapping[str, ResourceStatus], among: Collection[str] | None
    ) -> Iterator[tuple[str, str]]:
        """(job, VM) of live VMs that the provider no longer has, restricted to `among` if given."""
        live = {vm.vm for job in self.jobs.values() for vm in job.state.live_vms}
        self._missing = {vm: absences for vm, absences in self._missing.items() if vm in live}
        for name, job in self.jobs.items():
            for vm in self._live_vms(job):
                if self.effects.renting.requesting(vm.vm) or (among is not None and vm.vm not in among):
                    continue
                status = present.get(vm.vm)
                absent = status is None and not self.effects.renting.may_appear(job.state, vm)
                self._missing[vm.vm] = self._missing.get(vm.vm, 0) + 1 if absent else 0
                if status is ResourceStatus.GONE or self._missing[vm.vm] >= _PATIENCE:
                    yield name, vm.vm

    def _ending(self, present: Mapping[str, ResourceStatus]) -> Iterator[tuple[str, str]]:
        """(job, VM) of VMs that had joined, lost their connection, and are being ended by their cloud."""
        for name, job in self.jobs.items() if self.name in CLOUDS else ():
            for vm in self._away_vms(job):
                if present.get(vm.vm) is ResourceStatus.ENDING:
                    yield name, vm.vm

    def _unwanted(self, present: Mapping[str, ResourceStatus]) -> list[str]:
        """VMs, and parts of VMs, that belong to no job and are not being released: leftovers of failures."""
        jobs = [job for job in self.jobs.values() if job.state.ended is None]
        wanted = {vm.vm for job in jobs for vm in job.state.live_vms}
        there = [vm for vm, status in present.items() if status is not ResourceStatus.GONE]
        strays = [vm for vm in there if vm not in wanted and not self.effects.releasing(vm)]
        return [vm for vm in strays if not any(job.may_own(vm) for job in jobs)]

    def _live_vms(self, job: Job) -> list[Vm]:
        """The job's live VMs of this provider."""
        return [vm for vm in job.state.live_vms if provider_of(job.state, vm) == self.name]

    def _away_vms(self, job: Job) -> list[Vm]:
        """Those that had joined and have no connection."""
        return [vm for vm in self._live_vms(job) if vm.joined and vm.vm not in job.connections]

    async def _release(self, vm: str, attempts: int) -> None:
        try:
            await self.threads.run(CallKind.RELEASE_VM, self.provider.release, vm, attempts, owner=self.name)
        except Exception as error:  # whatever it is: the next list has the VM again
            log.warning("cannot release VM %s: %r; trying again", vm, error)

    def _concerned(self) -> Iterable[str]:
        for job, runtime in self.jobs.items():
            spec = runtime.state.spec
            if runtime.active and spec is not None and self.name in spec.resources.providers:
                yield job

    def _tell_trouble(self, what: str) -> None:
        for job in self._concerned():
            self.effects.trouble.setdefault(job, {})[f"list/{self.name}"] = f"list_vms: {what}"

    def _clear_trouble(self) -> None:
        for trouble in self.effects.trouble.values():
            trouble.pop(f"list/{self.name}", None)


def provider_of(state: JobState, vm: Vm) -> str | None:
    """The provider from which the VM was requested; None if unknown."""
    if vm.attempt is not None:
        return vm.attempt.placement.provider
    return state.spec.resources.providers[0] if state.spec is not None else None
