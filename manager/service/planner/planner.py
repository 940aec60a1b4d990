"""Answers the questions of all jobs, in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...core import worth
from ...core.commands import ComputeGrowth, ComputePlan
from ...core.events import GrowthComputed, PlanComputed
from ...core.state import JobState
from ...threads import CallKind, Threads
from ..planning import Choose, compute_growth, compute_plan
from .answer_table import AnswerTable

log = logging.getLogger("makara.manager")


class Planner:
    """Computes plans for all jobs: one at a time for each job, and of waiting requests only the newest.

    A big job whose workers keep changing asks again and again; its requests wait for each other, and leave a
    thread for other jobs. Used on the event loop.
    """

    def __init__(
        self,
        threads: Threads,
        state_of: Callable[[str], JobState],
        clock: Callable[[], float],
        choose_plan: Choose,
    ) -> None:
        self._threads = threads
        self._state_of = state_of
        self._choose_plan = choose_plan
        self.clock = clock
        self.tables: dict[str, AnswerTable] = {}
        """By job, what was computed before it is asked (`answers_ahead`)."""
        self._turns: dict[str, asyncio.Lock] = {}  # by job, while it has requests
        self._newest: dict[str, str] = {}  # the key of each job's newest request
        self._growing = 0  # questions whether more VMs would pay

    @property
    def busy(self) -> bool:
        """Whether it has a question, so that nothing else is to be computed."""
        return bool(self._newest or self._growing)

    @property
    def can_look_ahead(self) -> bool:
        """Whether what it chooses is known to follow from the question alone."""
        return self._choose_plan is compute_plan

    async def answer(self, job: str, command: ComputePlan) -> PlanComputed | None:
        """Compute the plan; None if the request was obsolete when its turn came."""
        self._newest[job] = command.key
        turn = self._turns.setdefault(job, asyncio.Lock())  # first come, first served
        try:
            async with turn:
                return await self._threads.run(CallKind.PLANNING, self._compute, job, command)
        finally:
            if self._newest.get(job) == command.key:
                del self._newest[job], self._turns[job]

    async def answer_growth(self, job: str, command: ComputeGrowth) -> GrowthComputed | None:
        """Compute whether more VMs would pay; None if the job has ended meanwhile."""
        self._growing += 1
        try:
            return await self._threads.run(CallKind.GROWTH, self._compute_growth, job, command)
        finally:
            self._growing -= 1

    def _compute_growth(self, job: str, command: ComputeGrowth) -> GrowthComputed | None:
        state = self._state_of(job)
        return None if state.ended is not None else compute_growth(state, command, self.clock)

    def _compute(self, job: str, command: ComputePlan) -> PlanComputed | None:
        """Compute in a thread; the wait for that thread may have been long, so check for changes first."""
        state = self._state_of(job)
        superseded = self._newest.get(job) != command.key or state.last_generation >= command.generation
        if superseded or state.ended is not None:
            return None
        table, formed = self.tables.get(job), worth.last_formed(state)
        if table is None or formed is None or table.number != formed.number or not self.can_look_ahead:
            return self._choose_plan(state, command, self.clock)
        computed = table.num_computed
        answer = compute_plan(state, command, self.clock, table.looked_up())
        if table.num_computed == computed:
            log.info("job %s: the searches after generation %d were done before", job, table.number)
        return answer
