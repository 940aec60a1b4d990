"""While the planner is idle: what it will be asked if a VM is lost next, and the answers, before it happens.

For each VM of the plan that steps the core is asked what it would ask the planner if that VM were gone, and
what the answer is made of is computed and kept (`answer_table`). A death is then answered at once, but where
pipelines may be unequal: plans around whole ones are found at the time. The losses of a job are
looked at one after the other, with rests as long as the work; a real question of any job comes first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ...core import Observations, Timing, apply, decide, worth
from ...core.commands import ComputePlan
from ...core.events import VmTerminated
from ...core.facts import EndReason, VmEnded
from ...core.state import Generation, JobState, vm_of
from ...threads import CallKind, Threads
from ..planning import search_ahead
from ..runtime import Job
from .answer_table import AnswerTable
from .planner import Planner

log = logging.getLogger("makara.manager")

_LOOK_S = 1.0  # how often to look whether there is something to compute
_MOST = 256  # VMs, whose losses are looked at; those that the cloud may take sooner come first


class _GaveWay(Exception):
    """A real question has come."""


@dataclass(slots=True)
class _Work:
    """What is computed for a job, as long as all questions depend on `about`."""

    about: Hashable
    table: AnswerTable
    state: JobState
    observations: Observations
    left: deque[str]
    """VMs whose losses are still to be looked at."""


class AnswersAhead:
    """Fills a table for each job that steps, in the planner's idle time. Runs on the event loop."""

    def __init__(self, jobs: Mapping[str, Job], planner: Planner, threads: Threads, timing: Timing) -> None:
        self._jobs = jobs
        self._planner = planner
        self._threads = threads
        self._timing = timing
        self._work: dict[str, _Work] = {}
        self._failed: dict[str, int] = {}  # by job, the generation after which a fault ended this

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            worked = await self.advance()
            await asyncio.sleep(time.monotonic() - began if worked else _LOOK_S)

    async def advance(self) -> bool:
        """Look at one more loss of each job; False if there was nothing to do, or the planner is at work."""
        worked = False
        for runtime in list(self._jobs.values()):
            last = runtime.state.last_generation
            if self._planner.busy or self._failed.get(runtime.job) == last:
                continue
            try:
                worked |= await self._advance(runtime)
            except Exception:  # it is a convenience: a fault shows in the job when it is asked in earnest
                log.exception("job %s: what follows from losses is not computed ahead", runtime.job)
                self._failed[runtime.job] = last
        return worked

    async def _advance(self, runtime: Job) -> bool:
        work = self._work_of(runtime)
        if work is None or not work.left:
            return False
        vm = work.left.popleft()
        try:
            await self._threads.run(CallKind.AHEAD, self._compute, work, vm, self._planner.clock())
        except _GaveWay:
            work.left.appendleft(vm)
        return True

    def _work_of(self, runtime: Job) -> _Work | None:
        """What there is to do for a job; None while it does not step by a plan that is to stay."""
        state, observations, job = runtime.state, runtime.observations, runtime.job
        if state.ended is not None:
            self._work.pop(job, None)
            self._planner.tables.pop(job, None)
            return None
        current = state.current
        if runtime.quarantine is not None or current is None or not _stays(state, observations, current):
            return None
        about = _about(state, observations, current, self._planner.clock(), self._timing)
        work = self._work.get(job)
        if work is None or work.about != about:
            table = AnswerTable(current.number)
            work = _Work(about, table, state, observations, deque(_vms(state, current)))
            self._work[job] = work
            self._planner.tables[job] = table
        work.state, work.observations = state, observations
        return work

    def _compute(self, work: _Work, vm: str, now: float) -> None:
        """In a thread. Raises `_GaveWay`, with what was computed until then kept."""
        decision = decide(work.state, work.observations, VmTerminated(now=now, vm=vm), self._timing)
        for command in decision.commands:
            if isinstance(command, ComputePlan):
                search_ahead(decision.state, command, work.table.filled(self._give_way))

    def _give_way(self) -> None:
        if self._planner.busy:
            raise _GaveWay


def _stays(state: JobState, observations: Observations, current: Generation) -> bool:
    """Whether the generation has done a step, and no other is about to replace it."""
    if not state.active or current.formed is None or state.planned is not None:
        return False
    return observations.planning is None and observations.newest_step > current.formed.step


def _about(
    state: JobState, observations: Observations, current: Generation, now: float, timing: Timing
) -> Hashable:
    """What the questions of all losses depend on: the plan, the workers and their paces, and the rates after
    one more loss."""
    vms = tuple((vm.vm, vm.status, vm.at_risk) for vm in state.live_vms if vm.joined)
    lost = VmEnded(at=now, vm=_vms(state, current)[0], reason=EndReason.PREEMPTED, gone=True)
    risk = worth.risk(apply(state, lost), now, timing)
    return current.number, vms, observations.usable, state.paces_changed_at, risk


def _vms(state: JobState, current: Generation) -> list[str]:
    """The VMs of its plan, those first that the cloud may take sooner than others."""
    names = dict.fromkeys(vm_of(worker) for worker, _ in current.incarnations)
    return sorted(names, key=lambda name: not state.vms[name].at_risk)[:_MOST]
