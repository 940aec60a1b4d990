"""Takes in agents' reports and sends each agent its orders."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...protocol.messages import Report
from ..core.events import ConnectionClosed, Event, ReportReceived
from ..core.facts import Fact, VmEnded
from ..core.orders import Leases, is_same, orders
from ..spec.resources import CLOUDS
from ..threads import CallKind, Threads
from .believed_steps import believed
from .journal import SqliteJournal
from .pubsub import Hub, LiveUpdate, to_json
from .quarantine import Quarantined
from .runtime import Connection, Job
from .views.steps import step_view
from .vms.watch import ProviderWatch, provider_of

log = logging.getLogger("makara.manager")


@dataclass(kw_only=True, eq=False)
class Agents:
    """The agents of all jobs. Runs on the event loop."""

    jobs: Mapping[str, Job]
    watches: Mapping[str, ProviderWatch]
    journal: SqliteJournal
    hub: Hub
    threads: Threads
    handle: Callable[[str, Event], Awaitable[None]]
    clock: Callable[[], float]
    leases: Leases

    def connect(self, job: str, vm: str, connection: Connection) -> None:
        """Register a VM's agent and send its orders; replaces an earlier connection of the VM."""
        runtime = self.jobs[job]
        earlier = runtime.connections.get(vm)
        if earlier is not None:
            earlier.replaced()
        runtime.connections[vm] = connection
        runtime.told.pop(vm, None)
        if runtime.quarantine is None or runtime.quarantine.readable or not runtime.active:
            self._push(runtime, vm, connection)

    async def disconnect(self, job: str, vm: str, connection: Connection) -> None:
        """Note that a connection closed: only a suspicion, and none if the VM has another one by now."""
        runtime = self.jobs[job]
        if runtime.connections.get(vm) is not connection:
            return
        del runtime.connections[vm]
        runtime.told.pop(vm, None)
        if not runtime.has_use_of(vm):
            runtime.not_understood.pop(vm, None)
        if runtime.state.ended is None:
            with contextlib.suppress(Quarantined):  # the VM's silence is noticed once the job is resumed
                await self.handle(job, ConnectionClosed(now=self.clock(), vm=vm))
        known = runtime.state.vms.live.get(vm)
        provider = provider_of(runtime.state, known) if known is not None else None
        if provider in CLOUDS and provider in self.watches:
            self.watches[provider].closings.add(job, vm)

    async def report(self, job: str, report: Report) -> None:
        """Take in a VM's report. On return, everything in it that has to be durable is stored."""
        runtime = self.jobs[job]
        steps = believed(runtime.state, report, runtime.pace, self.clock())
        if len(steps) < len(report.metrics):
            num_refused = len(report.metrics) - len(steps)
            log.warning("VM %s: %d steps that its job cannot have committed", report.vm, num_refused)
        if steps:
            await self.threads.run(CallKind.JOURNAL, self.journal.record_metrics, job, steps)
            for step in runtime.add_steps(steps, self.clock()):
                self.hub.publish(job, LiveUpdate("step", to_json(step_view(step))))
        if runtime.has_use_of(report.vm):
            runtime.reports[report.vm] = report
        runtime.not_understood.pop(report.vm, None)
        runtime.dirty = True
        if runtime.state.ended is None:
            with contextlib.suppress(Quarantined):  # it is kept above, for when the job is resumed
                await self.handle(job, ReportReceived(now=self.clock(), report=report))

    def beat(self, job: str, report: Report) -> None:
        """Take in a beat: the VM lives, perhaps with progress, else unchanged. Used from the next tick on."""
        runtime = self.jobs[job]
        if runtime.has_use_of(report.vm):
            runtime.reports[report.vm] = report
        if runtime.state.ended is None:
            runtime.beats[report.vm] = ReportReceived(now=self.clock(), report=report)

    def not_understood(self, job: str, vm: str, why: str) -> None:
        """Note that a VM's message cannot be read; shown until one can be."""
        runtime = self.jobs[job]
        if runtime.not_understood.get(vm) != why:
            log.error("VM %s: %s", vm, why)
            runtime.not_understood[vm] = why
            runtime.dirty = True

    def tell(self, runtime: Job, facts: Sequence[Fact]) -> None:
        """Send new orders to agents whose orders `facts` changed, and drop reports of ended VMs."""
        for vm, connection in runtime.connections.items():
            self._push(runtime, vm, connection)
        for fact in facts:
            if isinstance(fact, VmEnded):
                runtime.reports.pop(fact.vm, None)
                runtime.not_understood.pop(fact.vm, None)

    def _push(self, runtime: Job, vm: str, connection: Connection) -> None:
        """Send the VM its orders, unless this connection was sent the same already."""
        now, before = orders(runtime.state, vm, self.leases, runtime.parts), runtime.told.get(vm)
        if before is None or not is_same(now, before):
            runtime.told[vm] = now
            connection.push(now)
