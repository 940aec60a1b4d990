"""Effects: carry out the core's commands and turn their results into events.

Every command is idempotent and has a key. It is marked done only after its result was decided on and
journalled; a crash before that runs it again, which is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from ...checkpoint import CheckpointError, Export, Store
from ..core.commands import (
    Command,
    ComputeGrowth,
    ComputePlan,
    CopyCheckpoint,
    OpenHead,
    ReleaseVm,
    RequestVm,
)
from ..core.events import CommandStuck, Event, JobCommandFailed
from ..core.state import JobState
from ..core.strikes.table import Kind
from ..providers import Provider, ProviderError, Throttled
from ..spec.start_source import StartSource
from ..threads import CallKind, Threads, told_when_slow
from .planner import Planner
from .planning import Choose, compute_plan
from .quarantine import Quarantined
from .retrying import CommandAbandoned, pauses
from .store_commands import HOUSEKEEPING, StoreCommands
from .tokens import TokenStore
from .vms.renting import Renting

log = logging.getLogger("makara.manager")
T = TypeVar("T")

_FAILED = (CommandStuck, JobCommandFailed)


class _Running(NamedTuple):
    job: str
    command: Command
    task: asyncio.Task[None]


@dataclass(kw_only=True, eq=False)
class Effects:
    """Runs commands as tasks of the event loop, with blocking calls in threads.

    `emit` passes an event to the core and returns when it is journalled; `mark_done` settles a command by
    its key; `state_of` gives the job's current state. `trouble` holds, for each job, what is being retried.
    """

    providers: Mapping[str, Provider]
    tokens: TokenStore
    scratch: Path
    manager_url: Callable[[], str]
    manager_ca: Callable[[], str | None] = lambda: None
    join_secret: bytes = field(repr=False)
    vm_directory: Callable[[str], Path]
    state_of: Callable[[str], JobState]
    open_store: Callable[[str], Store]
    open_source: Callable[[str, StartSource], Store]
    emit: Callable[[str, Event], Awaitable[None]]
    mark_done: Callable[[str], Awaitable[None]]
    fatal: Callable[[BaseException], None]
    threads: Threads
    slow_call_s: float
    clock: Callable[[], float] = time.time
    store_patience_s: float = 600.0
    choose_plan: Choose = compute_plan

    def __post_init__(self) -> None:
        self.trouble: dict[str, dict[str, str]] = {}
        self._tasks: dict[str, _Running] = {}  # by key
        self._held: dict[str, list[Command]] = {}  # of jobs that are set aside; run again when resumed
        self.planner = Planner(self.threads, self.state_of, self.clock, self.choose_plan)
        self.renting = Renting(
            providers=self.providers,
            tokens=self.tokens,
            threads=self.threads,
            manager_url=self.manager_url,
            manager_ca=self.manager_ca,
            join_secret=self.join_secret,
            vm_directory=self.vm_directory,
            state_of=self.state_of,
            persist=self._persist,
            emit=self.emit,
            clock=self.clock,
        )
        self._store = StoreCommands(
            scratch=self.scratch,
            open_store=self.open_store,
            open_source=self.open_source,
            state_of=self.state_of,
            persist=self._persist,
            clock=self.clock,
            patience_s=self.store_patience_s,
        )

    def start(self, job: str, command: Command) -> None:
        """Begin `command`; does nothing if it is already running."""
        if command.key not in self._tasks:
            task = asyncio.create_task(self._settle(job, command), name=command.key)
            self._tasks[command.key] = _Running(job, command, task)

    async def export(self, job: str, call: Callable[[], Export]) -> Export:
        """Run a requested export; only one at a time for each job."""
        async with self._store.exports[job]:
            return await self.threads.run(CallKind.STORE, call, owner=f"{job} export")

    def needs_store(self, job: str) -> bool:
        """Whether a running command of the job may read or write its store."""
        return any(
            running.job == job and not isinstance(running.command, RequestVm | ReleaseVm)
            for running in self._tasks.values()
        )

    def hold(self, job: str, command: Command) -> None:
        """Keep a command of a job that is set aside, until `resume`."""
        self._held.setdefault(job, []).append(command)

    def resume(self, job: str) -> None:
        """Run the held commands of a job that is no longer set aside."""
        for command in self._held.pop(job, []):
            self.start(job, command)

    def releasing(self, vm: str) -> bool:
        return f"{vm}/release" in self._tasks

    async def close(self) -> None:
        """Stop; unfinished commands stay pending in the journal for the next manager."""
        tasks = [running.task for running in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one command ---------------------------------------------------------------------------------------

    async def _settle(self, job: str, command: Command) -> None:
        try:
            event = await self._result(job, command)
            if event is not None and not (isinstance(event, _FAILED) and self._is_past(job, command)):
                await self.emit(job, event)
            await self.mark_done(command.key)
        except asyncio.CancelledError:
            raise
        except Quarantined:
            self.hold(job, command)
        except BaseException as error:  # the journal is unusable: the manager must stop
            self.fatal(error)
        finally:
            self._tasks.pop(command.key, None)
            self._clear_trouble(job, command)

    async def _result(self, job: str, command: Command) -> Event | None:
        try:
            return await self._carry_out(job, command)
        except CommandAbandoned:
            return None
        except Exception as error:
            log.exception("job %s: %s failed", job, command.command)
            if isinstance(command, HOUSEKEEPING):
                return None  # left to the next sweep
            message = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            return JobCommandFailed(now=self.clock(), command=command.command, error=message, key=command.key)

    async def _released(self, job: str, command: ReleaseVm) -> Event:
        """Release a VM, retrying after any error, because the VM is billed until it is gone."""
        waits, is_first = pauses(), True
        while True:
            try:
                return await self.renting.release(job, command)
            except Exception as error:
                told = str(error) if isinstance(error, ProviderError) else f"{type(error).__name__}: {error}"
                log.warning(
                    "job %s: release of %s: %s; trying again", job, command.vm, told, exc_info=is_first
                )
                self._tell_trouble(job, command, told)
                await self.renting.not_released(job, command.vm, told)
                is_first = False
            await asyncio.sleep(next(waits))

    def _is_past(self, job: str, command: Command) -> bool:
        """Whether the command is obsolete: its job ended and went on, or no longer wants its result."""
        state = self.state_of(job)
        if command.ordered_after < state.continued_after:
            return True
        match command:
            case RequestVm():
                vm = state.vms.get(command.vm)
                return vm is None or not vm.live
            case OpenHead():
                return state.planned is None or state.planned.number != command.generation
            case CopyCheckpoint():
                return not state.copying
            case _:
                return False

    async def _carry_out(self, job: str, command: Command) -> Event | None:
        match command:
            case RequestVm():
                return await self.renting.request(job, command)
            case ReleaseVm():
                return await self._released(job, command)
            case ComputePlan():
                return await self.planner.answer(job, command)
            case ComputeGrowth():
                return await self.planner.answer_growth(job, command)
            case _:
                return await self._store.carry_out(job, command)

    # ---- trying again --------------------------------------------------------------------------------------

    async def _persist(
        self,
        job: str,
        command: Command,
        call: Callable[[], T],
        *temporary: type[Exception],
        wanted: Callable[[], bool] | None = None,
        kind: Kind = Kind.COMMAND,
        alone: asyncio.Lock | None = None,
    ) -> T:
        """As `Persist`."""
        waits = pauses(kind)
        while True:
            try:
                calls, owner = self._thread_of(job, command)
                async with alone or contextlib.nullcontext():
                    result = await told_when_slow(
                        self.threads.run(calls, call, owner=owner),
                        self.slow_call_s,
                        lambda: self._tell_trouble(job, command, f"not done after {self.slow_call_s:g} s"),
                    )
                self._clear_trouble(job, command)
                return result
            except temporary as error:
                log.warning("job %s: %s: %s; trying again", job, command.command, error)
                self._tell_trouble(job, command, str(error))
                if isinstance(command, RequestVm) and not isinstance(error, Throttled):
                    await self.renting.troubled(job, command, str(error))
                if isinstance(command, ReleaseVm) and not isinstance(error, Throttled):
                    await self.renting.not_released(job, command.vm, str(error))
            if not (wanted() if wanted is not None else self.state_of(job).ended is None):
                raise CommandAbandoned
            await asyncio.sleep(next(waits))

    def _thread_of(self, job: str, command: Command) -> tuple[CallKind, str]:
        """The threads for `command`: those of its provider, or of the job's store for this command."""
        if isinstance(command, RequestVm | ReleaseVm):
            return self.renting.thread_of(job, command)
        return CallKind.STORE, f"{job} {command.command}"

    def _tell_trouble(self, job: str, command: Command, what: str) -> None:
        self.trouble.setdefault(job, {})[command.key] = f"{command.command}: {what}"

    def _clear_trouble(self, job: str, command: Command) -> None:
        self.trouble.get(job, {}).pop(command.key, None)
