"""Carries out `RequestVm` and `ReleaseVm`: calls the provider until the outcome is known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ....protocol.messages import BootConfig
from ...core.commands import ReleaseVm, RequestVm
from ...core.events import (
    AttemptFailed,
    AttemptSucceeded,
    ConsoleRead,
    Event,
    ReleaseRefused,
    RequestTroubled,
    VmTerminated,
)
from ...core.facts import RefusalKind
from ...core.state import JobState
from ...core.strikes.table import Kind
from ...core.vms import Vm
from ...providers import (
    Ended,
    NoCapacity,
    NotAllowed,
    NotSold,
    Provider,
    ProviderError,
    QuotaExceeded,
    ResourceStatus,
    Throttled,
    Unauthenticated,
    run_times,
)
from ...providers.consoles import last_lines
from ...providers.settings import FILE
from ...spec.placement import Attempt, Placement
from ...spec.resources import CLOUDS
from ...threads import CallKind, Threads
from ..quarantine import Quarantined
from ..retrying import LONGEST_DELAY_S, CommandAbandoned, Persist, pauses
from ..tokens import TokenStore
from .news import is_unsure, news_of

log = logging.getLogger("makara.manager")
T = TypeVar("T")
JOIN_TTL_S = 1800.0
ABSENCE_S = 180.0  # for so long after a request, absence from a cloud's list means nothing
_IN_FLIGHT_S = 60.0  # for so long a call whose answer was lost, or whose caller died, may take effect
SLOW_RELEASE_S = 120.0  # a VM that is not gone by then is shown, with its cost
CONSOLE_S = 10.0  # how long to wait for a VM's console output
_KINDS: Mapping[type[ProviderError], RefusalKind] = {
    NotSold: RefusalKind.NOT_SOLD,  # before its base class
    NoCapacity: RefusalKind.NO_CAPACITY,
    QuotaExceeded: RefusalKind.QUOTA,
    NotAllowed: RefusalKind.NOT_ALLOWED,
    Unauthenticated: RefusalKind.CREDENTIALS,
    Ended: RefusalKind.ENDED,
}


@dataclass(kw_only=True, eq=False)
class Renting:
    """Runs `RequestVm` and `ReleaseVm`. Belongs to the event loop."""

    providers: Mapping[str, Provider]
    tokens: TokenStore
    threads: Threads
    manager_url: Callable[[], str]
    manager_ca: Callable[[], str | None]
    join_secret: bytes = field(repr=False)
    vm_directory: Callable[[str], Path]
    state_of: Callable[[str], JobState]
    persist: Persist
    emit: Callable[[str, Event], Awaitable[None]]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._requesting: Counter[str] = Counter()
        # The previous manager may have requested any VM until this one began.
        self._began_at = self.clock()
        self._asked_at: dict[str, float] = {}  # by VM of a cloud, when a call for it last began or ended
        self._troubles: dict[str, str] = {}  # by VM that is being requested: how the last call failed
        self._lost_at: dict[str, float] = {}  # by attempt, when a call last ended with unknown outcome

    def requesting(self, vm: str) -> bool:
        """Whether a request for this VM is in progress."""
        return self._requesting[vm] > 0

    def inherit(self, command: RequestVm) -> None:
        """Note a request that the previous manager may have begun without hearing the answer."""
        if command.attempt is not None:
            self._lost_at[command.attempt.name] = self._began_at

    def may_appear(self, state: JobState, vm: Vm) -> bool:
        """Whether the VM was requested so recently that it may exist though it is not listed."""
        if vm.attempt is None or vm.attempted_at is None or vm.attempt.placement.provider not in CLOUDS:
            return False
        if not vm.live and vm.vm not in state.leaving:
            return False  # the provider has said already that it is gone
        now, asked_at = self.clock(), self._asked_at.get(vm.vm, self._began_at)
        if vm.attempted_at <= now:  # else by the clock of an earlier manager
            asked_at = max(asked_at, vm.attempted_at)
        return now - asked_at <= ABSENCE_S

    def thread_of(self, job: str, command: RequestVm | ReleaseVm) -> tuple[CallKind, str]:
        """The threads in which the provider is called."""
        names = self._providers_of(job, command.vm)
        kind = CallKind.REQUEST_VM if isinstance(command, RequestVm) else CallKind.RELEASE_VM
        return kind, names[0] if names else ""

    # ---- to have a VM --------------------------------------------------------------------------------------

    async def request(self, job: str, command: RequestVm) -> Event | None:
        """Call the provider for the attempt until its outcome is known."""
        self._requesting[command.vm] += 1
        try:
            return await self._request(job, command)
        finally:
            self._requesting[command.vm] -= 1
            if not self._requesting[command.vm]:
                del self._requesting[command.vm]
                self._troubles.pop(command.vm, None)
            if command.attempt is not None:
                self._lost_at.pop(command.attempt.name, None)

    async def _request(self, job: str, command: RequestVm) -> Event | None:
        attempt = self._attempt(job, command)
        if not self._wants(job, attempt):
            return None  # it was given up before this manager began
        wanted = partial(self._wants, job, attempt)
        call = partial(_repeatable, partial(self._boot, job, attempt))
        boot = await self.persist(job, command, call, ProviderError, wanted=wanted)
        answer = await self._answer(job, command, attempt, boot)
        while not isinstance(answer, str | Ended) and (wait_s := self._in_doubt_s(attempt)) > 0.0:
            await asyncio.sleep(wait_s)
            if not self._wants(job, attempt):
                return None
            answer = await self._answer(job, command, attempt, boot)
        if isinstance(answer, NotAllowed) and self._is_lost(attempt):
            answer = await self._outcome(job, command, attempt, answer)
        if answer is None:
            return None
        now, vm, number = self.clock(), attempt.vm, attempt.number
        if isinstance(answer, str):
            return AttemptSucceeded(now=now, vm=vm, number=number, id=answer)
        kind = next(kind for error, kind in _KINDS.items() if isinstance(answer, error))
        return AttemptFailed(now=now, vm=vm, number=number, kind=kind, error=str(answer))

    async def _answer(
        self, job: str, command: RequestVm, attempt: Attempt, boot: BootConfig
    ) -> str | ProviderError:
        is_cloud = attempt.placement.provider in CLOUDS
        return await self.persist(
            job,
            command,
            partial(self._create, job, attempt, boot),
            ProviderError,
            wanted=lambda: self._wants(job, attempt),
            kind=Kind.COMMAND if is_cloud else Kind.LOCAL_REQUEST,
        )

    def _create(self, job: str, attempt: Attempt, boot: BootConfig) -> str | ProviderError:
        """The VM's id, or why there is none; raises `ProviderError` if the call is to be repeated.

        Blocking. If VMs can come from only one place, lack of capacity there is retried. The call may have
        waited long for its thread: raises `CommandAbandoned` if the VM is no longer wanted.
        """
        if not self._wants(job, attempt):
            raise CommandAbandoned
        _repeatable(partial(self._issue_join, job, attempt))
        self._note_asked(attempt)
        try:
            provider = self._provider(attempt.placement.provider)
            return _repeatable(partial(provider.create, attempt, boot))
        except NoCapacity as error:
            if attempt.placement.provider not in CLOUDS:
                raise
            return error
        except (QuotaExceeded, NotAllowed, Ended) as error:
            return error
        except Unauthenticated as error:
            if attempt.name in self._lost_at:
                raise  # whether an earlier call took effect is unknown until the provider can be asked
            return error
        except Throttled:
            raise
        except ProviderError:
            self._lost_at[attempt.name] = self.clock()
            raise
        finally:
            self._note_asked(attempt)

    async def troubled(self, job: str, command: RequestVm, error: str) -> None:
        """Tell the job how a call failed whose outcome is not known."""
        if self._troubles.get(command.vm) != error:
            self._troubles[command.vm] = error
            with contextlib.suppress(Quarantined):  # the next call tells it
                await self.emit(job, RequestTroubled(now=self.clock(), vm=command.vm, error=error))

    def _note_asked(self, attempt: Attempt) -> None:
        """Note the call until the VM is released; only clouds have lists that lag."""
        if attempt.placement.provider in CLOUDS:
            self._asked_at[attempt.vm] = self.clock()

    def _is_lost(self, attempt: Attempt) -> bool:
        """Whether the outcome of an earlier call of this attempt is unknown."""
        return attempt.name in self._lost_at and attempt.placement.provider in CLOUDS

    def _in_doubt_s(self, attempt: Attempt) -> float:
        """Seconds for which an earlier call of this attempt may still create the VM, though a later call was
        refused."""
        return self._lost_at[attempt.name] + _IN_FLIGHT_S - self.clock() if self._is_lost(attempt) else 0.0

    async def _outcome(
        self, job: str, command: RequestVm, attempt: Attempt, refusal: NotAllowed
    ) -> str | ProviderError | None:
        """The outcome of an earlier call, after a later one was refused for lack of a right, which says
        nothing about the earlier one. `refusal` once the provider says that nothing exists; None if the VM is
        no longer wanted."""
        provider, wanted = self._provider(attempt.placement.provider), partial(self._wants, job, attempt)
        vm, number = attempt.vm, attempt.number
        while wanted():
            call = partial(provider.look, vm, number)
            found = await self.persist(job, command, call, ProviderError, wanted=wanted)
            for made in found:
                if (made.kind, made.attempt) == ("vm", number):
                    ended = made.status in (ResourceStatus.ENDING, ResourceStatus.GONE)
                    return Ended(f"{made.id} has ended") if ended else made.id
            if self.clock() - self._lost_at[attempt.name] > ABSENCE_S:
                call = partial(provider.release, vm, number)
                if await self.persist(job, command, call, ProviderError, wanted=wanted):
                    return refusal
            await asyncio.sleep(LONGEST_DELAY_S)
        return None

    def _attempt(self, job: str, command: RequestVm) -> Attempt:
        if command.attempt is not None:
            return command.attempt
        spec = self.state_of(job).spec
        assert spec is not None, "a VM is requested for a submitted job only"
        return Attempt(vm=command.vm, placement=Placement(provider=spec.resources.providers[0]))

    def _wants(self, job: str, attempt: Attempt) -> bool:
        """Whether the VM lives, and this is its newest attempt and still open."""
        vm = self.state_of(job).vms.get(attempt.vm)
        return vm is not None and vm.live and vm.attempt in (None, attempt) and not vm.id

    def _boot(self, job: str, attempt: Attempt) -> BootConfig:
        """What the VM is told at its start. Blocking."""
        spec = self.state_of(job).spec
        assert spec is not None, "a VM is requested for a submitted job only"
        return BootConfig(
            vm=attempt.vm,
            job=job,
            manager_url=self.manager_url(),
            ca=self.manager_ca(),
            join_token=self._issue_join(job, attempt),
            directory=str(self.vm_directory(attempt.vm)),
            num_devices=spec.resources.workers_per_node,
            device_kind="cuda" if attempt.num_gpus else "auto",
            device_memory_bytes=spec.resources.device_memory,
        )

    def _issue_join(self, job: str, attempt: Attempt) -> str:
        """The attempt's join token, always the same, good for `JOIN_TTL_S` from now."""
        return self.tokens.issue_join(
            self.join_secret, job=job, vm=attempt.vm, attempt=attempt.name, ttl_s=JOIN_TTL_S
        )

    # ---- to have one be gone -------------------------------------------------------------------------------

    async def release(self, job: str, command: ReleaseVm) -> Event:
        """Retry the release without limit, because the VM is billed until it is released."""
        if command.console:
            text = await self._console(job, command.vm)
            with contextlib.suppress(Quarantined):  # then the question to the person lacks the console
                await self.emit(job, ConsoleRead(now=self.clock(), vm=command.vm, text=text))
        ran_s = None
        for name in self._providers_of(job, command.vm):
            ran_s = await self._release_at(job, command, self._provider(name))
        await self.threads.run(CallKind.TOKENS, self.tokens.revoke_vm, job, command.vm)
        self._asked_at.pop(command.vm, None)
        return VmTerminated(now=self.clock(), vm=command.vm, ran_s=ran_s)

    async def _console(self, job: str, vm: str) -> str:
        """The end of the VM's console output; empty if its cloud does not give it in time."""
        try:
            name = self._providers_of(job, vm)[0]
            call = partial(self._provider(name).console, vm, self._num_attempts(job, vm))
            async with asyncio.timeout(CONSOLE_S):
                return last_lines(await self.threads.run(CallKind.CONSOLE, call, owner=name))
        except Exception as error:  # any error: the release must go on
            log.warning("VM %s: what it wrote cannot be read: %r", vm, error)
            return ""

    async def _release_at(self, job: str, command: ReleaseVm, provider: Provider) -> float | None:
        """Release until nothing is left, and no open request can create anything. Returns for how long the VM
        existed, if the provider was asked and tells."""
        waits, settled_at = pauses(), None
        while True:
            settled = self._is_settled(job, command.vm)
            settled_at = (settled_at or self.clock()) if settled else None
            call = partial(provider.release, command.vm, self._num_attempts(job, command.vm))
            gone = await self.persist(job, command, call, ProviderError, wanted=lambda: True)
            ran_s = await self._told(job, command, provider, gone=gone)
            if gone and settled:
                return ran_s
            if settled_at is not None and self.clock() - settled_at > SLOW_RELEASE_S:
                await self.not_released(
                    job, command.vm, f"not gone {SLOW_RELEASE_S:g} s after it was released"
                )
            await asyncio.sleep(next(waits))

    async def _told(self, job: str, command: ReleaseVm, provider: Provider, *, gone: bool) -> float | None:
        """Tell the job what the provider shows of a released VM whose cost depends on that. Returns for how
        long it existed, of one that is gone."""
        vm, attempts = self.state_of(job).leaving.get(command.vm), self._num_attempts(job, command.vm)
        is_billed = vm is not None and vm.attempt is not None and vm.attempt.placement.provider in CLOUDS
        if vm is None or not is_billed or not (gone or is_unsure(vm)):
            return None
        call = partial(provider.look, command.vm, attempts)
        found = await self.persist(job, command, call, ProviderError, wanted=lambda: True)
        for event in news_of(self.state_of(job), found, self.clock()):
            await self.emit(job, event)
        return run_times(found).get((command.vm, attempts))

    async def not_released(self, job: str, name: str, why: str) -> None:
        """Tell the job, once, that an ended VM is still billed."""
        vm = self.state_of(job).leaving.get(name)
        if vm is not None and not vm.not_released:
            with contextlib.suppress(Quarantined):  # it is told when the job is resumed
                await self.emit(job, ReleaseRefused(now=self.clock(), vm=name, error=why))

    def _is_settled(self, job: str, name: str) -> bool:
        """Whether no attempt is open, and no VM may exist that the cloud does not list yet.

        For a VM whose id is known, the provider's word that it is gone is enough.
        """
        state = self.state_of(job)
        vm = state.vms.get(name)
        if self.requesting(name):
            return False
        return vm is None or bool(vm.id) or not self.may_appear(state, vm)

    def _num_attempts(self, job: str, name: str) -> int:
        vm = self.state_of(job).vms.get(name)
        return vm.num_attempts if vm is not None else 1

    def _provider(self, name: str) -> Provider:
        """The provider. Raises `ProviderError` (to be retried) if this manager does not have it."""
        if name not in self.providers:
            raise ProviderError(f"{FILE} has no section {name}")
        return self.providers[name]

    def _providers_of(self, job: str, name: str) -> tuple[str, ...]:
        state = self.state_of(job)
        vm = state.vms.get(name)
        if vm is not None and vm.attempt is not None:
            return (vm.attempt.placement.provider,)
        return state.spec.resources.providers if state.spec is not None else tuple(self.providers)


def _repeatable(call: Callable[[], T]) -> T:
    """Call. What nobody foresaw is raised as a `ProviderError`: the request is repeated until the VM is given
    up for not joining, and its job goes on meanwhile."""
    try:
        return call()
    except ProviderError:
        raise
    except Exception as error:
        log.exception("a VM cannot be requested")
        raise ProviderError(f"{type(error).__name__}: {error}") from error
