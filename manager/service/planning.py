"""`ComputePlan`, carried out: the job's state put as a question to `makara.morphing`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from ...morphing import Impossible, Request, Slot, choose
from ...pipeline import Plan, Range
from ...simulator import Calibration, InvalidCalibration, simulate
from ..core.commands import ComputePlan
from ..core.events import PlanComputed
from ..core.state import JobState
from ..spec.job_spec import JobSpec
from ..threads import Kind, Threads


class Planner:
    """Computes plans for all jobs: one at a time for each, and of those that wait the one asked for last.

    A big job whose workers change while it is planned asks again and again. Its questions wait for each
    other, and leave a thread to other jobs. Used on the event loop.
    """

    def __init__(
        self, threads: Threads, state_of: Callable[[str], JobState], clock: Callable[[], float]
    ) -> None:
        self._threads = threads
        self._state_of = state_of
        self._clock = clock
        self._turns: dict[str, asyncio.Lock] = {}  # by job, while it has questions
        self._newest: dict[str, str] = {}  # the key of the question that the job asked last

    async def answer(self, job: str, command: ComputePlan) -> PlanComputed | None:
        """The answer; None if nobody waited for it any more when its turn came."""
        self._newest[job] = command.key
        turn = self._turns.setdefault(job, asyncio.Lock())  # questions take turns in the order they came
        async with turn:
            answer = await self._threads.run(Kind.PLANNING, self._compute, job, command)
        if self._newest.get(job) == command.key:
            del self._newest[job], self._turns[job]
        return answer

    def _compute(self, job: str, command: ComputePlan) -> PlanComputed | None:
        """In a thread, which may have been waited for: what has changed meanwhile is looked at here."""
        state = self._state_of(job)
        superseded = self._newest.get(job) != command.key or state.last_generation >= command.generation
        return None if superseded or state.ended is not None else compute_plan(state, command, self._clock)


def compute_plan(state: JobState, command: ComputePlan, clock: Callable[[], float]) -> PlanComputed:
    """The best plan for the command's workers, or why there is none. Blocks; pure but for `clock`."""
    try:
        answer = choose(request_of(state, command))
    except InvalidCalibration as error:
        answer = Impossible(f"the calibration cannot be used: {error}")
    if isinstance(answer, Impossible):
        return PlanComputed(
            now=clock(), generation=command.generation, asked=command.asked, plan=None, reason=answer.reason
        )
    return PlanComputed(
        now=clock(),
        generation=command.generation,
        asked=command.asked,
        plan=answer.plan.to_json(),
        workers=answer.workers,
        predicted_s=answer.predicted_s,
        current_s=_predicted_now(state, command) if command.reconsider else None,
    )


def _predicted_now(state: JobState, command: ComputePlan) -> float | None:
    """Seconds of a step of the plan that runs, as workers and sections now are; None if it does not run on
    workers that the question is about."""
    if state.current is None or state.calibration is None:
        return None
    slots = {slot.worker: slot for slot in command.workers}
    hosts = [worker for worker, _ in state.current.seats]
    if not slots.keys() >= set(hosts):
        return None
    return simulate(
        Plan.from_json(state.current.plan),
        Calibration.from_json(state.calibration),
        vm_of=[slots[worker].vm for worker in hosts],
        slowdown=[slots[worker].slowdown for worker in hosts],
        timeline=False,
    ).time_s


def request_of(state: JobState, command: ComputePlan) -> Request:
    """What the planner is asked: the job's settings and the command's workers."""
    assert state.spec is not None, "only a submitted job is planned"
    assert state.recipe is not None, "a plan needs the recipe"
    assert state.calibration is not None, "a recipe comes with its calibration"
    parallelism = state.spec.parallelism
    return Request(
        calibration=Calibration.from_json(state.calibration),
        num_sections=state.recipe.num_sections,
        num_micro_batches=state.recipe.num_micro_batches,
        workers=[Slot(w.worker, w.vm, w.memory_bytes, w.slowdown) for w in command.workers],
        generation=command.generation,
        pipeline_parallel_degree=parallelism.pipeline_parallel_degree,
        data_parallel_degree=parallelism.data_parallel_degree,
        recompute=parallelism.recompute,
        optimizer_offload=offload(state.spec),
        memory_limit_bytes=state.spec.resources.device_memory,
        holding=holding(state),
    )


def offload(spec: JobSpec) -> Literal["auto", "on", "off"]:
    """What the planner is asked. `auto` must not change from plan to plan with `exact`: a device rounds
    otherwise than its host."""
    wanted = spec.parallelism.optimizer_offload
    return "off" if wanted == "auto" and spec.training.numerics == "exact" else wanted


def holding(state: JobState) -> dict[str, Range]:
    """The sections that workers hosted when a generation last formed, by worker: they hold them still, also
    where a death has closed it since. A trainer that has failed since holds nothing."""
    return {
        worker: Range(start, stop)
        for (worker, incarnation), (start, stop) in state.hosts.items()
        if state.failed.get(worker, -1) < incarnation
    }
