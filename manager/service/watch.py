"""What a provider says of its VMs: which of ours are gone, and which are there that nobody wants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from ..core.events import Event, Together, VmTerminated
from ..core.state import JobState
from ..providers import Provider, ProviderError, ResourceStatus, statuses
from ..threads import Kind, Threads, told_when_slow
from .effects import Effects
from .quarantine import Quarantined
from .runtime import Job

log = logging.getLogger("makara.manager")
_PATIENCE = 2  # lists in a row without a VM before it counts as gone: a cloud's lists lag behind


class ProviderWatch:
    """One provider's list, compared with the jobs again and again. Runs on the event loop.

    A provider that fails or hangs is shown as trouble of its jobs, and holds up no other provider.
    """

    def __init__(
        self,
        name: str,
        provider: Provider,
        *,
        jobs: Mapping[str, Job],
        effects: Effects,
        threads: Threads,
        handle: Callable[[str, Event], Awaitable[None]],
        clock: Callable[[], float],
        slow_call_s: float,
    ) -> None:
        self._name = name
        self._provider = provider
        self._jobs = jobs
        self._effects = effects
        self._threads = threads
        self._handle = handle
        self._clock = clock
        self._slow_call_s = slow_call_s
        self._missing: dict[str, int] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}

    async def run(self, every_s: float) -> None:
        """Ask for the list, and act on it, for ever."""
        try:
            while True:
                await asyncio.sleep(every_s)
                await self.look()
        finally:
            for task in self._releasing.values():
                task.cancel()

    async def look(self) -> None:
        """Once."""
        listing = self._threads.run(Kind.LIST_VMS, self._provider.list, owner=self._name)
        try:
            slow = f"no answer for {self._slow_call_s:g} s"
            present = await told_when_slow(listing, self._slow_call_s, lambda: self._tell_trouble(slow))
        except ProviderError as error:
            log.warning("cannot list VMs: %s", error)
            self._tell_trouble(str(error))
            return
        self._clear_trouble()
        await self.compare(statuses(present))

    async def compare(self, present: Mapping[str, ResourceStatus]) -> None:
        """Tell jobs which of their VMs are gone; release those that nobody wants."""
        states = [runtime.state for runtime in self._jobs.values()]
        for job, vms in vanished(states, self._effects, self._name, present, self._missing).items():
            now = self._clock()
            gone = tuple(VmTerminated(now=now, vm=vm) for vm in vms)
            with contextlib.suppress(Quarantined):  # the next list says it again
                await self._handle(job, Together(now=now, events=gone))
        for vm in unwanted(self._jobs.values(), self._effects, present):
            if vm not in self._releasing:
                log.warning("VM %s belongs to no running job: releasing it", vm)
                task = asyncio.create_task(self._release(vm))
                self._releasing[vm] = task
                task.add_done_callback(lambda _, vm=vm: self._releasing.pop(vm))

    async def _release(self, vm: str) -> None:
        try:
            await self._threads.run(Kind.RELEASE_VM, self._provider.release, vm, owner=self._name)
        except ProviderError as error:
            log.warning("cannot release VM %s: %s; trying again", vm, error)

    def _concerned(self) -> Iterable[str]:
        for job, runtime in self._jobs.items():
            spec = runtime.state.spec
            if runtime.active and spec is not None and self._name in spec.resources.providers:
                yield job

    def _tell_trouble(self, what: str) -> None:
        for job in self._concerned():
            self._effects.trouble.setdefault(job, {})[f"list/{self._name}"] = f"list_vms: {what}"

    def _clear_trouble(self) -> None:
        for trouble in self._effects.trouble.values():
            trouble.pop(f"list/{self._name}", None)


def vanished(
    states: Iterable[JobState],
    effects: Effects,
    provider: str,
    present: Mapping[str, ResourceStatus],
    missing: dict[str, int],
) -> dict[str, list[str]]:
    """By job, live VMs that `provider` no longer has. `missing` counts absences from call to call."""
    found: dict[str, list[str]] = {}
    states = list(states)
    live = {vm.vm for state in states for vm in state.live_vms}
    for vm in [vm for vm in missing if vm not in live]:
        del missing[vm]
    for state in states:
        if state.spec is None or provider not in state.spec.resources.providers:
            continue
        for vm in state.live_vms:
            if effects.requesting(vm.vm):
                continue
            status = present.get(vm.vm)
            missing[vm.vm] = missing.get(vm.vm, 0) + 1 if status is None else 0
            if status is ResourceStatus.GONE or missing[vm.vm] >= _PATIENCE:
                found.setdefault(state.job, []).append(vm.vm)
    return found


def unwanted(jobs: Iterable[Job], effects: Effects, present: Mapping[str, ResourceStatus]) -> list[str]:
    """Running VMs that no job has, and whose release is not under way: left over from the unforeseen."""
    jobs = [job for job in jobs if job.state.ended is None]
    wanted = {vm.vm for job in jobs for vm in job.state.live_vms}
    running = [vm for vm, status in present.items() if status is ResourceStatus.RUNNING and vm not in wanted]
    return [vm for vm in running if not effects.releasing(vm) and not any(job.may_own(vm) for job in jobs)]
