"""One job's events, one after the other: decided on, made durable, and only then carried out and told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from .commands import Command
from .core import Decision, Pulse, Timing, Vitals, decide, stop_set_aside
from .events import Event, StopRequested, Tick
from .facts import Fact
from .journal_text import NotReadable
from .quarantine import Quarantine, Quarantined, quarantine_for
from .runtime import Job

log = logging.getLogger("makara.manager")


class ManagerFailed(Exception):
    """What is in the journal is not known: no job can be decided on any more."""


class Outlets(NamedTuple):
    """Where decisions go."""

    append: Callable[[str, Sequence[Fact], Sequence[Command], int], Awaitable[int]]
    start: Callable[[str, Command], None]
    resume: Callable[[str], None]
    """Run the commands again whose results came while the job was set aside."""
    tell: Callable[[Job, Sequence[Fact]], None]
    fatal: Callable[[BaseException], None]
    clock: Callable[[], float]


class JobLoops:
    """The events of all jobs: those of one job in order, none waiting for another job's.

    A fault while one job is decided on sets that job aside (`quarantine`). Runs on the event loop.
    """

    def __init__(self, outlets: Outlets, timing: Timing, *, retry_s: float, longest_retry_s: float) -> None:
        self._out = outlets
        self._timing = timing
        self._retry_s = retry_s
        self._longest_retry_s = longest_retry_s
        self._turns: set[asyncio.Task[None]] = set()
        self._ticking: dict[str, asyncio.Task[None]] = {}

    async def handle(self, job: Job, event: Event) -> None:
        """Decide on `event` and make the decision durable. Raises `Quarantined` when that cannot be done."""
        # A caller that is cancelled (a closed connection) must not leave the state behind the journal.
        await asyncio.shield(self._begin(job, lambda: event))

    def tick(self, job: Job) -> None:
        """Have time pass for the job, unless it is still at its last tick."""
        if job.job not in self._ticking:
            task = self._begin(job, lambda: Tick(now=self._out.clock(), new_vms=job.new_vms()))
            self._ticking[job.job] = task
            task.add_done_callback(lambda task: self._ticked(job.job, task))

    async def close(self, timeout_s: float) -> None:
        """Wait for what is being decided on, unless the journal hangs."""
        if self._turns:
            _, hanging = await asyncio.wait(self._turns, timeout=timeout_s)
            for turn in hanging:
                turn.cancel()

    def _ticked(self, job: str, task: asyncio.Task[None]) -> None:
        del self._ticking[job]
        if not task.cancelled() and task.exception() is not None:
            log.debug("job %s: its tick: %r", job, task.exception())  # it was told where it was raised

    def _begin(self, job: Job, make_event: Callable[[], Event]) -> asyncio.Task[None]:
        turn = asyncio.create_task(self._turn(job, make_event))
        self._turns.add(turn)
        turn.add_done_callback(self._turns.discard)
        return turn

    async def _turn(self, job: Job, make_event: Callable[[], Event]) -> None:
        async with job.lock:
            event = make_event()
            if job.quarantine is not None and job.set_aside:
                await self._set_aside(job, job.quarantine, event)
            else:
                await self._decide(job, event)

    async def _decide(self, job: Job, event: Event) -> None:
        try:
            await self._take(job, decide(job.state, job.vitals, event, self._timing))
        except ManagerFailed:
            raise
        except Exception as error:
            self._quarantine(job, error)
            raise Quarantined(str(error)) from error

    async def _take(self, job: Job, decision: Decision) -> None:
        """Store the decision, then take it over and have it carried out."""
        if decision.facts or decision.commands:
            try:
                job.sequence = await self._out.append(
                    job.job, decision.facts, decision.commands, job.sequence
                )
            except NotReadable:
                raise
            except Exception as error:  # what is in the journal is not known any more
                self._out.fatal(error)
                raise ManagerFailed("the journal failed") from error
        job.dirty |= decision.vitals.unheard is not job.vitals.unheard
        job.state, job.vitals = decision.state, decision.vitals
        for command in decision.commands:
            self._out.start(job.job, command)
        if decision.facts:
            self._out.tell(job, decision.facts)

    # ---- a job that is set aside ---------------------------------------------------------------------------

    def _quarantine(self, job: Job, error: Exception) -> None:
        now = self._out.clock()
        if job.failures and now - job.failed_at > 2 * self._longest_retry_s:
            job.failures = 0
        wait_s = min(self._retry_s * 2 ** min(job.failures, 30), self._longest_retry_s)
        job.failures, job.failed_at, job.dirty = job.failures + 1, now, True
        job.quarantine = quarantine_for(error, now, now + wait_s)
        log.error("job %s is set aside for %.0f s", job.job, wait_s, exc_info=error)

    async def _set_aside(self, job: Job, quarantine: Quarantine, event: Event) -> None:
        """Take the job up again if it is time or a person wants something; else drop the event."""
        now = event.now
        due = quarantine.retry_at is not None and now >= quarantine.retry_at
        asked = isinstance(event, StopRequested)
        wanted = due or (asked and job.state.stop_ordered_at is None)
        if quarantine.readable and wanted and await self._take_up(job, event):
            return
        if not asked and not isinstance(event, Tick):
            raise Quarantined(quarantine.error)
        decision = stop_set_aside(
            job.state,
            _as_reported(job, now, since=0.0),
            event,
            self._timing,
            readable=quarantine.readable,
            why=quarantine.error,
        )
        await self._take(job, decision)

    async def _take_up(self, job: Job, event: Event) -> bool:
        """Go on as after a restart: every lease begins anew. False if that fails again."""
        job.quarantine, job.vitals = None, _as_reported(job, event.now, since=event.now)
        try:
            await self._decide(job, event)
        except Quarantined:
            return False
        log.info("job %s is taken up again", job.job)
        job.dirty = True
        self._out.resume(job.job)
        return True


def _as_reported(job: Job, now: float, since: float) -> Vitals:
    """What the VMs said last, with leases from `since`. The job's own vitals may be what went wrong."""
    vms = {vm.vm for vm in job.state.live_vms}
    pulses = {vm: Pulse(report, now) for vm, report in job.reports.items() if vm in vms}
    return Vitals(started_at=since, pulses=pulses)
