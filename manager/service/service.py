"""The running manager: one event loop that feeds the core, journals its decisions, and carries them out.

For each event of a job, one at a time: `decide`, then facts and commands into the journal in one transaction,
then the new state, the effects, orders to the agents whose orders changed, and updates for watchers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...checkpoint import Store
from ..clock import SteadyClock
from ..config import ServerConfig
from ..core import Timing
from ..core.commands import RequestVm
from ..core.events import (
    Event,
    ManagerStarted,
    ResumeRequested,
    StopRequested,
)
from ..core.facts import Fact, Resumption
from ..home import ConfigError
from ..places import check_places
from ..providers import Provider
from ..providers.guarded import guarded
from ..providers.settings import CloudSettings
from ..spec.resources import CLOUDS
from ..spec.start_source import StartSource
from ..threads import CallKind, Threads
from .admission import Admission
from .agents import Agents
from .effects import Effects
from .files import JobFiles
from .job_loop import JobLoops
from .journal import SqliteJournal
from .journal_text import Unreadable
from .planning import Choose, compute_plan
from .pubsub import Hub, LiveUpdate, to_json
from .quarantine import Quarantined, quarantine_for
from .runtime import RECENT_STEPS, Job
from .store_access import at_source, open_for
from .tokens import TokenStore
from .views.job import JobView, job_view
from .vms.offers import OffersWatch
from .vms.sharing import PoolSharing
from .vms.watch import ProviderWatch

log = logging.getLogger("makara.manager")
_SWEEP_S = 60.0
_BEATS_IN_A_LEASE = 4  # as a Kubernetes node renews its lease: every 10 s of 40


class Service:
    """All jobs of one manager. Use: `await start()`, ..., `await close()`.

    `clock` gives Unix seconds for all bounds and must not jump, like a `SteadyClock`. `choose_plan` replaces
    the planner's choice; benchmarks compare policies by it.

    `failed()` raises when the manager must stop: its journal failed or was changed by another process, or its
    settings (`clouds`) lack a place where it may have VMs. Public methods run on the event loop that called
    `start`.
    """

    def __init__(
        self,
        config: ServerConfig,
        journal: SqliteJournal,
        tokens: TokenStore,
        providers: Mapping[str, Provider],
        *,
        timing: Timing | None = None,
        clock: Callable[[], float] | None = None,
        threads: Threads | None = None,
        clouds: CloudSettings | None = None,
        choose_plan: Choose = compute_plan,
    ) -> None:
        self.config = config
        self._clouds = clouds
        self.journal = journal
        self.tokens = tokens
        self.providers = providers
        called = guarded(providers)
        self.hub = Hub()
        self.files = JobFiles(config.home)
        self.jobs: dict[str, Job] = {}
        self.manager_url = config.public_url or f"http://{config.host}:{config.port}"
        self.manager_ca: str | None = None
        """PEM of the authority that agents trust; None: plain HTTP, or the system's authorities."""
        self.clock = clock or SteadyClock()
        self._failure: BaseException | None = None
        self._has_failed = asyncio.Event()
        timing = timing or Timing()
        self.leases = replace(timing.leases, secret=self.files.generation_secret())
        self.timing = replace(timing, leases=self.leases)
        self._tasks: list[asyncio.Task[None]] = []
        self.threads = threads or Threads()
        self.effects = Effects(
            providers=called,
            tokens=tokens,
            scratch=config.home / "scratch",
            manager_url=lambda: self.manager_url,
            manager_ca=lambda: self.manager_ca,
            join_secret=self.files.join_secret(),
            vm_directory=self.vm_directory,
            state_of=lambda job: self.jobs[job].state,
            open_store=self._open_store,
            open_source=self._open_source,
            emit=self.handle,
            mark_done=lambda key: self.threads.run(CallKind.JOURNAL, journal.mark_done, key),
            threads=self.threads,
            slow_call_s=config.slow_call_s,
            fatal=self._fail,
            clock=self.clock,
            store_patience_s=config.store_patience_s,
            choose_plan=choose_plan,
        )
        self.watches = {
            name: ProviderWatch(
                name=name,
                provider=provider,
                jobs=self.jobs,
                effects=self.effects,
                threads=self.threads,
                handle=self.handle,
                clock=self.clock,
                every_s=config.cloud_list_s if name in CLOUDS else config.tick_s,
                slow_call_s=config.slow_call_s,
            )
            for name, provider in called.items()
        }
        self._sharing = PoolSharing(self.watches, self.timing)
        self.agents = Agents(
            jobs=self.jobs,
            watches=self.watches,
            journal=journal,
            hub=self.hub,
            threads=self.threads,
            handle=self.handle,
            clock=self.clock,
            leases=self.leases,
        )
        self._offers = OffersWatch(
            providers=called,
            jobs=self.jobs,
            effects=self.effects,
            threads=self.threads,
            handle=self.handle,
            clock=self.clock,
            manager_url=lambda: self.manager_url,
        )
        self.admission = Admission(
            jobs=self.jobs,
            files=self.files,
            journal=journal,
            effects=self.effects,
            threads=self.threads,
            handle=self.handle,
            clock=self.clock,
        )
        self._loops = JobLoops(
            timing=self.timing,
            config=config,
            append=lambda job, facts, commands, expected: self.threads.run(
                CallKind.JOURNAL, journal.append, job, facts, commands, expected
            ),
            start=self.effects.start,
            resume=self.effects.resume,
            tell=self._tell,
            fatal=self._fail,
            clock=self.clock,
        )

    def heartbeat_s(self, job: str) -> float:
        """How often an agent of the job reports when nothing changes."""
        spec = self.jobs[job].state.spec
        num_vms = spec.resources.max_nodes if spec is not None else 1
        rarest_s = max(self.config.heartbeat_s, self.timing.vm_lease_s / _BEATS_IN_A_LEASE)
        return min(max(self.config.heartbeat_s, num_vms / self.config.heartbeats_per_s), rarest_s)

    def vm_directory(self, vm: str) -> Path:
        return self.config.home / "vms" / vm

    def _open_store(self, job: str) -> Store:
        """The store of a job. Blocking."""
        spec = self.jobs[job].state.spec
        assert spec is not None, "only a submitted job has a store"
        return open_for(spec, self.files.secrets(job), self.stores_of(self.jobs[job]))

    def _open_source(self, job: str, source: StartSource) -> Store:
        """The store of the checkpoint that a job starts from, with the job's own keys. Blocking."""
        spec = self.jobs[job].state.spec
        assert spec is not None, "only a submitted job starts from something"
        there = at_source(spec, source.uri, source.endpoint, source.region)
        return open_for(there, self.files.secrets(job), self.stores_of(self.jobs[job]))

    def stores_of(self, job: Job) -> tuple[str, ...]:
        """The stores for which this manager's own credentials and rights serve the job."""
        return self.config.stores_for(job.state.owner)

    def shown_to(self, owner: str | None) -> list[Job]:
        """The jobs that exist for this user (None: an administrator), oldest first."""
        return [job for job in self.jobs.values() if job.is_shown_to(owner)]

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the journal, start every lease anew, and run pending commands.

        If VMs of the journal cannot be reached, does nothing, and `failed()` raises `ConfigError`.
        """
        for job in await self.threads.run(CallKind.HISTORY, self.journal.jobs):
            facts = await self.threads.run(CallKind.HISTORY, self.journal.facts, job)
            metrics = await self.threads.run(CallKind.HISTORY, self.journal.metrics, job, 0, RECENT_STEPS)
            self.jobs[job] = Job(job, facts, metrics)
        if self._clouds is not None:
            try:
                states = (runtime.state for runtime in self.jobs.values())
                check_places(self._clouds, states, local=self.config.offers_local)
            except ConfigError as error:
                self._fail(error)
                return
        await self.threads.run(CallKind.FILES, self.files.forget_others, self.jobs.keys())
        await self.threads.run(CallKind.TOKENS, self.tokens.begin_anew, self.leases.worker_token_s)
        await self._start_pending()
        for runtime in self.jobs.values():
            self.admission.forget_secrets(runtime)  # of a job that ended just before the previous process did
        for job in self._ticking():
            with contextlib.suppress(Quarantined):  # what it is, the job shows
                await self.handle(job.job, ManagerStarted(now=self.clock()))
        watches = [watch.run for watch in self.watches.values()]
        closings = [watch.follow_closings for name, watch in self.watches.items() if name in CLOUDS]
        loops = (self._tick, self._sweep, self._offers.run, *watches, *closings)
        self._tasks = [asyncio.create_task(self._guard(loop)) for loop in loops]

    async def _start_pending(self) -> None:
        """Run pending commands again; those of a job that is set aside once it is resumed."""
        for job, command in await self.threads.run(CallKind.HISTORY, self.journal.pending_commands):
            runtime = self.jobs[job]
            if isinstance(command, Unreadable):
                fault = ValueError(f"a command in its journal cannot be read: {command.error}")
                runtime.quarantine = runtime.quarantine or quarantine_for(fault, self.clock(), None)
                continue
            if isinstance(command, RequestVm):
                self.effects.renting.inherit(command)
            if runtime.quarantine is not None and runtime.active:
                self.effects.hold(job, command)
            else:
                self.effects.start(job, command)

    async def close(self) -> None:
        """Stop. VMs and their training go on; the next manager takes over from the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.admission.close(self.config.close_timeout_s)
        await self.effects.close()
        await self._loops.close(self.config.close_timeout_s)
        self.hub.close()

    def active(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.active]

    def _ticking(self) -> list[Job]:
        """Those for which time matters: also ended ones whose VMs may still be paid for."""
        return [job for job in self.jobs.values() if job.active or job.state.leaving]

    # ---- what users ask for --------------------------------------------------------------------------------

    async def stop(self, job: str) -> None:
        """Have the job publish a checkpoint and end; does nothing if it has ended."""
        if self.jobs[job].state.ended is not None:
            return
        try:
            await self.handle(job, StopRequested(now=self.clock()))
        except Quarantined:  # it was set aside just now: stop it as such
            await self.handle(job, StopRequested(now=self.clock()))

    async def resume(self, job: str, how: Resumption) -> bool:
        """Answer a job that waits for a person; returns False, and does nothing, if it does not offer it."""
        waiting = self.jobs[job].state.waiting
        if waiting is None or how not in waiting.offers:
            return False
        await self.handle(job, ResumeRequested(now=self.clock(), how=how))
        return True

    def view(self, job: Job) -> JobView:
        """What users see of the job."""
        return job_view(job, self.effects.trouble.get(job.job, {}), self.clock())

    # ---- one event -----------------------------------------------------------------------------------------

    async def handle(self, job: str, event: Event) -> None:
        """Decide on one event and journal the decision; carrying out follows. Raises `Quarantined`."""
        await self._loops.handle(self.jobs[job], event)

    def _tell(self, runtime: Job, facts: Sequence[Fact]) -> None:
        self.agents.tell(runtime, facts)
        first = runtime.sequence - len(facts) + 1
        for sequence, fact in enumerate(facts, first):
            log.info("job %s: %s", runtime.job, fact.fact)
            self.hub.publish(runtime.job, LiveUpdate("fact", to_json(fact), sequence))
        runtime.dirty = True
        if runtime.state.ended is not None:
            self.admission.forget_secrets(runtime)
            self._publish_status(runtime)

    def _publish_status(self, runtime: Job) -> None:
        runtime.dirty = False
        if self.hub.watched(runtime.job):
            self.hub.publish(runtime.job, LiveUpdate("status", to_json(self.view(runtime))))

    # ---- time and providers --------------------------------------------------------------------------------

    async def _guard(self, loop: Callable[[], Any]) -> None:
        try:
            await loop()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.critical("the manager cannot go on", exc_info=error)
        self._failure = self._failure or error
        self._has_failed.set()

    async def failed(self) -> None:
        """Wait until the manager must stop, and raise the reason."""
        await self._has_failed.wait()
        assert self._failure is not None, "set together with the event"
        raise self._failure

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_s)
            self.tick()

    def tick(self) -> None:
        """Share out pools of VMs, give every job a tick, and publish changes."""
        self._sharing.share(self._ticking(), self.clock())
        for runtime in self._ticking():
            self._loops.tick(runtime)
        for runtime in self.jobs.values():
            if runtime.dirty:
                self._publish_status(runtime)

    async def end_streams(self) -> None:
        """End live updates of watchers whose token has become invalid."""
        shown = self.hub.token_ids()
        lives = await self.threads.run(
            CallKind.TOKENS, lambda: {token for token in shown if self.tokens.lives(token)}
        )
        self.hub.end(shown - lives)

    async def _sweep(self) -> None:
        while True:
            await self.threads.run(CallKind.TOKENS, self.tokens.sweep)
            await self.end_streams()
            for runtime in self.jobs.values():
                self.admission.forget_secrets(runtime)
            await asyncio.sleep(_SWEEP_S)
