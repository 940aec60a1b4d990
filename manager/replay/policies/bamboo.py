"""Bamboo: every worker also holds, and runs forward, the sections of its successor in the pipeline.

Simulated as plans of the usual form: ranges that reach to the end of the successor's. So a worker's death
leaves its sections a host, its predecessor, and is rerouted around; two neighbours' deaths are not. What
redundancy costs:

* Time: every forward twice, all the time, with the recomputation that includes it. Bamboo hides a part in
  the gaps of the pipeline; with many more micro-batches than stages there are hardly any.
* Memory: the states of both ranges. What forwards of the successor keep goes to the host, and costs nothing.
* Traffic: the sums of both ranges are reduced and applied by both hosts.

The last stage has no successor. Bamboo has it run the first stage's sections, which is no range; so here the
first stage has no second host in its own pipeline. In favour of Bamboo, peers of other pipelines take part of
the dead worker's work.
"""

from __future__ import annotations

from dataclasses import replace

from ....morphing import Choice, Infeasible, Request, choose
from ....pipeline import Plan, Range
from ....simulator import Calibration, simulate
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState
from ...service.planning.requests import request_of
from ..planner import CachedPlanner, answer_of, key_of
from .policy import Policy
from .slipstream import rerouting_until

_STATES = (2.0, 2.5, 3.0)  # times the state of its own range, where the ranges' sizes differ


def twice_forward(calibration: Calibration) -> Calibration:
    """The calibration with every forward run by two workers."""
    return replace(calibration, forward_s=tuple(2 * seconds for seconds in calibration.forward_s))


def with_successors(plan: Plan) -> Plan:
    """The grid with each worker holding the range of the next in its pipeline as well."""
    ranges = list(plan.ranges)
    for path in plan.paths:
        for hop, following in zip(path.hops, path.hops[1:], strict=False):
            ranges[hop.worker] = Range(hop.range.start, following.range.stop)
    return replace(plan, ranges=tuple(ranges))


def _redundant_grid(
    planner: CachedPlanner, state: JobState, command: ComputePlan, now: float
) -> PlanComputed:
    def compute() -> PlanComputed:
        found = _chosen(request_of(state, command.workers, command.generation))
        return answer_of(command, found, now)

    return planner.recalled(("bamboo", key_of(state, command)), state, command, now, compute)


def _chosen(request: Request) -> Choice | Infeasible:
    """The fastest grid whose workers have room for two ranges."""
    calibration, found = request.calibration, Infeasible("no worker has room for two ranges")
    for times in _STATES:
        states, optimizers = (
            tuple(round(times * size_bytes) for size_bytes in sizes)
            for sizes in (calibration.state_bytes, calibration.optimizer_bytes)
        )
        larger = replace(calibration, state_bytes=states, optimizer_bytes=optimizers)
        answer = choose(replace(request, calibration=larger, unequal_pipelines="off"))
        if isinstance(answer, Infeasible):
            return answer
        plan = with_successors(answer.plan)
        slots = {slot.worker: slot for slot in request.workers}
        used = [slots[worker] for worker in answer.workers]
        own = calibration.with_optimizer_on_host() if plan.optimizer_on_host else calibration
        step = simulate(plan, own, vm_of=[slot.vm for slot in used], timeline=False)
        limit = request.memory_limit_bytes
        capacity = [min(slot.memory_bytes, limit or slot.memory_bytes) for slot in used]
        if all(need <= has for need, has in zip(step.peak_bytes, capacity, strict=True)):
            return replace(answer, plan=plan, predicted_s=step.time_s)
    return found


BAMBOO = Policy(
    name="bamboo",
    about="every worker holds and runs its successor's sections too; rerouted while each section has a host",
    answer=rerouting_until(_redundant_grid),
    model=twice_forward,
)
