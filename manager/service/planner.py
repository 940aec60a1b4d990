"""Answers the questions of all jobs, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.commands import ComputeGrowth, ComputePlan
from ..core.events import GrowthComputed, PlanComputed
from ..core.state import JobState
from ..threads import CallKind, Threads
from .planning import Choose, compute_growth


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
        self._clock = clock
        self._turns: dict[str, asyncio.Lock] = {}  # by job, while it has requests
        self._newest: dict[str, str] = {}  # the key of each job's newest request

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
        return await self._threads.run(CallKind.GROWTH, self._compute_growth, job, command)

    def _compute_growth(self, job: str, command: ComputeGrowth) -> GrowthComputed | None:
        state = self._state_of(job)
        return None if state.ended is not None else compute_growth(state, command, self._clock)

    def _compute(self, job: str, command: ComputePlan) -> PlanComputed | None:
        """Compute in a thread; the wait for that thread may have been long, so check for changes first."""
        state = self._state_of(job)
        superseded = self._newest.get(job) != command.key or state.last_generation >= command.generation
        if superseded or state.ended is not None:
            return None
        return self._choose_plan(state, command, self._clock)
