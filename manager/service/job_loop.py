"""The event loop of each job: decides on events one by one, journals the decision, then carries it out.

Reports of VMs are gathered, so that a thousand reports of a step need only a few decisions. The first report
after a quiet time is decided on at once; then the job rests for `rest_factor` times as long as that decision
took, and reports that arrive meanwhile are decided on together. So no job takes more than its share of the
loop, however many VMs it has. Beats, which carry no news, wait for the next decision or tick. All other
events are decided on at once, in order.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import ServerConfig
from ..core import Decision, LastReport, Observations, Timing, decide, stop_set_aside
from ..core.commands import Command
from ..core.events import Batch, ConnectionClosed, Event, ReportReceived, StopRequested, Tick, VmTerminated
from ..core.facts import Fact
from ..core.strikes.ledger import JOB, strike
from ..core.strikes.table import Kind
from .journal_text import NotReadable
from .quarantine import Quarantine, Quarantined, quarantine_for
from .runtime import Gathered, Job, Observation

log = logging.getLogger("makara.manager")


class ManagerFailed(Exception):
    """The journal's content is unknown: no job can be decided on any more."""


@dataclass(kw_only=True, eq=False)
class JobLoops:
    """The events of all jobs: those of one job in order, independent of other jobs.

    An error while deciding on a job sets that job aside (`quarantine`). Runs on the event loop.
    """

    timing: Timing
    config: ServerConfig
    append: Callable[[str, Sequence[Fact], Sequence[Command], int], Awaitable[int]]
    start: Callable[[str, Command], None]
    resume: Callable[[str], None]
    """Runs again the commands whose results came while the job was set aside."""
    tell: Callable[[Job, Sequence[Fact]], None]
    fatal: Callable[[BaseException], None]
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: dict[str, asyncio.Task[None]] = {}

    async def handle(self, job: Job, event: Event) -> None:
        """Decide on `event` and journal the decision. Raises `Quarantined` if that is impossible."""
        # A cancelled caller (a closed connection) must not leave the state behind the journal.
        if isinstance(event, ReportReceived | ConnectionClosed | VmTerminated):
            await asyncio.shield(self._gather(job, event).decided)
        else:
            await asyncio.shield(self._begin(self._handle_next(job, lambda: event)))

    def tick(self, job: Job) -> None:
        """Give the job a tick, unless it is still busy with its last one or rests after it."""
        if job.job not in self._ticking and time.monotonic() >= job.next_tick:
            task = self._begin(self._run_tick(job))
            self._ticking[job.job] = task
            task.add_done_callback(lambda task: self._tick_done(job.job, task))

    async def close(self, timeout_s: float) -> None:
        """Wait for decisions in progress, for at most `timeout_s` in case the journal hangs."""
        if self._tasks:
            _, hanging = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in hanging:
                task.cancel()

    def _tick_done(self, job: str, task: asyncio.Task[None]) -> None:
        del self._ticking[job]
        if not task.cancelled() and task.exception() is not None:
            log.debug("job %s: its tick: %r", job, task.exception())  # reported where it was raised

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _handle_next(self, job: Job, make_event: Callable[[], Event]) -> None:
        async with job.lock:
            await self._decide_gathered(job)
            await self._decide_or_drop(job, make_event())

    async def _run_tick(self, job: Job) -> None:
        async with job.lock:
            await self._decide_gathered(job)
            job.spent_s = 0.0
            await self._decide_or_drop(job, Tick(now=self.clock(), new_vms=job.new_vms(), share=job.share))
            job.next_tick = time.monotonic() + self._rest_s(job)

    async def _decide_or_drop(self, job: Job, event: Event) -> None:
        """Decide on the event, unless the job is set aside and stays so."""
        if job.quarantine is not None and job.set_aside:
            await self._while_set_aside(job, job.quarantine, event)
        else:
            await self._decide(job, event)

    # ---- what is observed is gathered ----------------------------------------------------------------------

    def _gather(self, job: Job, event: Observation) -> Gathered:
        if job.gathered is None:
            job.gathered = Gathered([], asyncio.get_running_loop().create_future())
            self._begin(self._decide_when_rested(job))
        job.gathered.events.append(event)
        return job.gathered

    async def _decide_when_rested(self, job: Job) -> None:
        await asyncio.sleep(max(0.0, job.rests_until - time.monotonic()))
        async with job.lock:
            await self._decide_gathered(job)

    async def _decide_gathered(self, job: Job) -> None:
        """Decide on the gathered observations; waiting callers get the error if that fails."""
        beats, job.beats = job.beats, {}
        gathered, job.gathered = job.gathered, None
        if gathered is None and not beats:
            return
        gathered = gathered or Gathered([], asyncio.get_running_loop().create_future())
        events, decided, job.spent_s = (*beats.values(), *gathered.events), gathered.decided, 0.0
        try:
            now = self.clock()
            await self._decide_or_drop(job, events[0] if len(events) == 1 else Batch(now=now, events=events))
        except Exception as error:
            decided.set_exception(error)
            decided.exception()  # mark it retrieved: no caller may be waiting
        else:
            decided.set_result(None)
        job.rests_until = time.monotonic() + self._rest_s(job)

    def _rest_s(self, job: Job) -> float:
        return min(self.config.rest_factor * job.spent_s, self.config.longest_rest_s)

    # ---- one decision --------------------------------------------------------------------------------------

    async def _decide(self, job: Job, event: Event) -> None:
        try:
            began = time.thread_time()
            decision = decide(job.state, job.observations, event, self.timing)
            job.spent_s += time.thread_time() - began
            await self._carry_out(job, decision)
        except ManagerFailed:
            raise
        except Exception as error:
            raise Quarantined(self._quarantine(job, error).reason) from error

    async def _carry_out(self, job: Job, decision: Decision) -> None:
        """Journal the decision, then apply it and have it carried out."""
        if decision.facts or decision.commands:
            try:
                job.sequence = await self.append(job.job, decision.facts, decision.commands, job.sequence)
            except NotReadable:
                raise
            except Exception as error:  # whether it was journalled is unknown
                self.fatal(error)
                raise ManagerFailed("the journal failed") from error
        job.dirty |= decision.observations.unheard != job.observations.unheard  # of isolation a fact tells
        job.dirty |= _told(decision.observations) != _told(job.observations)
        job.state, job.observations = decision.state, decision.observations
        for command in decision.commands:
            self.start(job.job, command)
        if decision.facts:
            began = time.thread_time()
            self.tell(job, decision.facts)
            job.spent_s += time.thread_time() - began

    # ---- a job that is set aside ---------------------------------------------------------------------------

    def _quarantine(self, job: Job, error: Exception) -> Quarantine:
        now = self.clock()
        job.strikes, job.dirty = strike(job.strikes, Kind.UNDECIDED, JOB, now), True
        retry_at = job.strikes.of(Kind.UNDECIDED).until(self.timing.strikes[Kind.UNDECIDED])
        job.quarantine = quarantine_for(error, now, retry_at)
        log.error("job %s is set aside for %.0f s", job.job, retry_at - now, exc_info=error)
        return job.quarantine

    async def _while_set_aside(self, job: Job, quarantine: Quarantine, event: Event) -> None:
        """Resume the job if it is time or a person asks for something; else drop the event."""
        now = event.now
        due = quarantine.retry_at is not None and now >= quarantine.retry_at
        asked = isinstance(event, StopRequested)
        wanted = due or (asked and job.state.stop_ordered_at is None)
        if quarantine.readable and wanted and await self._try_to_resume(job, event):
            return
        if not asked and not isinstance(event, Tick):
            raise Quarantined(quarantine.reason)
        decision = stop_set_aside(
            job.state,
            _as_reported(job, now, since=0.0),
            event,
            self.timing,
            readable=quarantine.readable,
            why=quarantine.error,
        )
        await self._carry_out(job, decision)

    async def _try_to_resume(self, job: Job, event: Event) -> bool:
        """Resume as after a restart, with all leases anew. Returns False if that fails again."""
        job.quarantine, job.observations = None, _as_reported(job, event.now, since=event.now)
        try:
            await self._decide(job, event)
        except Quarantined:
            return False
        log.info("job %s is taken up again", job.job)
        job.dirty = True
        self.resume(job.job)
        return True


def _told(observations: Observations) -> tuple[str | None, str]:
    """What users are told about lack of progress, and about VMs."""
    progress = observations.no_progress.describe() if observations.no_progress is not None else None
    return progress, observations.why_no_vm


def _as_reported(job: Job, now: float, since: float) -> Observations:
    """New ones from the VMs' last reports, with leases from `since`; the old ones may be the problem."""
    vms = {vm.vm for vm in job.state.live_vms}
    last_reports = {vm: LastReport(report, now) for vm, report in job.reports.items() if vm in vms}
    return Observations(started_at=since).with_last_reports(last_reports)
