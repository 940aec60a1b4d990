"""The commands that have VMs exist, and be gone: what the provider answers, and what is made of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from ...protocol.messages import BootConfig
from ..core.commands import Command, ReleaseVm, RequestVm
from ..core.events import AttemptFailed, AttemptSucceeded, Event, VmTerminated
from ..core.facts import RefusalKind
from ..core.state import JobState, Vm
from ..providers import Ended, NoCapacity, NotAllowed, Provider, ProviderError, QuotaExceeded
from ..spec.placement import Attempt, Placement
from ..spec.resources import CLOUDS
from ..threads import Kind, Threads
from .tokens import TokenStore

T = TypeVar("T")

JOIN_TTL_S = 1800.0
ABSENCE_S = 180.0  # after a cloud was asked for a VM, its not being listed means nothing for so long
_FIRST_DELAY_S = 0.2
_LONGEST_DELAY_S = 10.0
_KINDS: Mapping[type[ProviderError], RefusalKind] = {
    NoCapacity: RefusalKind.NO_CAPACITY,
    QuotaExceeded: RefusalKind.QUOTA,
    NotAllowed: RefusalKind.NOT_ALLOWED,
    Ended: RefusalKind.ENDED,
}


class Abandoned(Exception):
    """Nobody waits any more for the result of a command that was being tried again."""


class Persist(Protocol):
    """`call` in a thread, again while it raises `temporary` and is `wanted`; else `Abandoned` is raised."""

    def __call__(
        self,
        job: str,
        command: Command,
        call: Callable[[], T],
        *temporary: type[Exception],
        wanted: Callable[[], bool] | None = None,
        longest_delay_s: float = ...,
        alone: asyncio.Lock | None = None,
    ) -> Awaitable[T]: ...


class Renting:
    """Runs `RequestVm` and `ReleaseVm`. Belongs to the event loop."""

    def __init__(
        self,
        *,
        providers: Mapping[str, Provider],
        tokens: TokenStore,
        threads: Threads,
        manager_url: Callable[[], str],
        manager_ca: Callable[[], str | None],
        join_secret: bytes,
        vm_directory: Callable[[str], Path],
        state_of: Callable[[str], JobState],
        persist: Persist,
        clock: Callable[[], float],
    ) -> None:
        self._providers = providers
        self._tokens = tokens
        self._threads = threads
        self._manager_url = manager_url
        self._manager_ca = manager_ca
        self._join_secret = join_secret
        self._vm_directory = vm_directory
        self._state_of = state_of
        self._persist = persist
        self._clock = clock
        self._requesting: Counter[str] = Counter()

    def requesting(self, vm: str) -> bool:
        """Whether a request for this VM is under way."""
        return self._requesting[vm] > 0

    def thread_of(self, job: str, command: RequestVm | ReleaseVm) -> tuple[Kind, str]:
        """Which threads call the provider."""
        names = self._providers_of(job, command.vm)
        kind = Kind.REQUEST_VM if isinstance(command, RequestVm) else Kind.RELEASE_VM
        return kind, names[0] if names else ""

    # ---- to have a VM --------------------------------------------------------------------------------------

    async def request(self, job: str, command: RequestVm) -> Event | None:
        """Make the attempt until its outcome is known."""
        self._requesting[command.vm] += 1
        try:
            return await self._request(job, command)
        finally:
            self._requesting[command.vm] -= 1
            if not self._requesting[command.vm]:
                del self._requesting[command.vm]

    async def _request(self, job: str, command: RequestVm) -> Event | None:
        attempt = self._attempt(job, command)
        if not self._wants(job, attempt):
            return None  # it was given up before this manager came to it
        boot = await self._boot(job, attempt)
        provider = self._providers[attempt.placement.provider]
        answer = await self._persist(
            job,
            command,
            partial(_create, provider, attempt, boot),
            ProviderError,
            wanted=lambda: self._wants(job, attempt),
            longest_delay_s=1.0 if attempt.placement.provider not in CLOUDS else _LONGEST_DELAY_S,
        )
        now, vm, number = self._clock(), attempt.vm, attempt.number
        if isinstance(answer, str):
            return AttemptSucceeded(now=now, vm=vm, number=number, id=answer)
        kind = next(kind for error, kind in _KINDS.items() if isinstance(answer, error))
        return AttemptFailed(now=now, vm=vm, number=number, kind=kind, error=str(answer))

    def _attempt(self, job: str, command: RequestVm) -> Attempt:
        if command.attempt is not None:
            return command.attempt
        spec = self._state_of(job).spec
        assert spec is not None, "a VM is requested for a submitted job only"
        return Attempt(vm=command.vm, placement=Placement(provider=spec.resources.providers[0]))

    def _wants(self, job: str, attempt: Attempt) -> bool:
        """Whether the VM lives, and this is its newest attempt."""
        vm = self._state_of(job).vms.get(attempt.vm)
        return vm is not None and vm.live and vm.attempt in (None, attempt)

    async def _boot(self, job: str, attempt: Attempt) -> BootConfig:
        spec = self._state_of(job).spec
        assert spec is not None, "a VM is requested for a submitted job only"
        issue = partial(
            self._tokens.issue_join,
            self._join_secret,
            job=job,
            vm=attempt.vm,
            attempt=attempt.name,
            ttl_s=JOIN_TTL_S,
        )
        return BootConfig(
            vm=attempt.vm,
            job=job,
            manager_url=self._manager_url(),
            ca=self._manager_ca(),
            join_token=await self._threads.run(Kind.TOKENS, issue),
            directory=str(self._vm_directory(attempt.vm)),
            num_devices=spec.resources.workers_per_node,
            device_memory_bytes=spec.resources.device_memory,
        )

    # ---- to have one be gone -------------------------------------------------------------------------------

    async def release(self, job: str, command: ReleaseVm) -> Event:
        """For ever: a VM that is not released bills for ever."""
        for name in self._providers_of(job, command.vm):
            await self._release_at(job, command, self._providers[name])
        await self._threads.run(Kind.TOKENS, self._tokens.revoke_vm, job, command.vm)
        return VmTerminated(now=self._clock(), vm=command.vm)

    async def _release_at(self, job: str, command: ReleaseVm, provider: Provider) -> None:
        """Until nothing is left, and nothing more can come of what was asked for."""
        delay_s = _FIRST_DELAY_S
        while True:
            settled = self._is_settled(job, command.vm)
            call = partial(provider.release, command.vm)
            gone = await self._persist(job, command, call, ProviderError, wanted=lambda: True)
            if gone and settled:
                return
            await asyncio.sleep(random.uniform(delay_s / 2, delay_s))
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _is_settled(self, job: str, name: str) -> bool:
        """Whether no attempt is under way, nor one whose VM a cloud may not show yet."""
        state = self._state_of(job)
        vm = state.vms.get(name)
        return not self.requesting(name) and (vm is None or not may_appear(state, vm, self._clock()))

    def _providers_of(self, job: str, name: str) -> tuple[str, ...]:
        state = self._state_of(job)
        vm = state.vms.get(name)
        if vm is not None and vm.attempt is not None:
            return (vm.attempt.placement.provider,)
        return state.spec.resources.providers if state.spec is not None else tuple(self._providers)


def may_appear(state: JobState, vm: Vm, now: float) -> bool:
    """Whether a cloud was asked for the VM so lately that it may be there though it is not listed."""
    if vm.attempt is None or vm.attempted_at is None or vm.attempt.placement.provider not in CLOUDS:
        return False
    if not vm.live and vm.vm not in state.leaving:
        return False  # the provider has said already that it is gone
    return 0.0 <= now - vm.attempted_at <= ABSENCE_S


def _create(provider: Provider, attempt: Attempt, boot: BootConfig) -> str | ProviderError:
    """The VM's id, or why there is none; raises `ProviderError` if the same is to be asked again.

    Where there is one place alone to have VMs from, one is waited for there.
    """
    try:
        return provider.create(attempt, boot)
    except NoCapacity as error:
        if attempt.placement.provider not in CLOUDS:
            raise
        return error
    except (QuotaExceeded, NotAllowed, Ended) as error:
        return error
