"""From a scenario and the names of policies to their outcomes, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...pipeline import Plan
from ..core.commands import ComputePlan, WorkerSlot
from ..core.state import JobState
from ..spec.job_spec import JobSpec
from ..spec.resources import Resources
from .outcome import Outcome, Prices, Steady, morphs
from .planner import CachedPlanner
from .policies import POLICIES, Policy, with_depth
from .scenario import ReplayError, Scenario
from .time_account import Item
from .trace_world import JOB, TraceWorld


def replay(
    scenario: Scenario,
    policies: Sequence[str] = ("makara",),
    *,
    fixed_depth: int | None = None,
    prices: Prices | None = None,
    planner: CachedPlanner | None = None,
) -> list[Outcome]:
    """One outcome for each policy, in their order. The same arguments always give the same outcomes.

    `fixed_depth`: the P of policies that fix it; None: the best for `max_nodes` VMs. A `planner` that was
    used for the same job before need not be asked again. Raises `ReplayError` for an unknown policy, or when
    a depth is to be fixed and `max_nodes` VMs cannot run the model.
    """
    for name in policies:
        if name not in POLICIES:
            raise ReplayError(f"policy: {name!r} is unknown; known are {', '.join(POLICIES)}")
    planner = planner or CachedPlanner()
    scenario = replace(scenario, spec=_unbilled(scenario.spec))
    steady = _steady(scenario, planner)

    def run(policy: Policy) -> Outcome:
        if not policy.fixes_depth:
            return _outcome(scenario, policy, planner, steady, prices or Prices())
        depth = fixed_depth if fixed_depth is not None else _best_depth(scenario, steady, planner)
        restricted = replace(scenario, spec=with_depth(scenario.spec, depth))
        told = replace(policy, about=f"P={depth} throughout, {policy.about}")
        return _outcome(restricted, told, planner, steady, prices or Prices())

    return [run(POLICIES[name]) for name in policies]


def _unbilled(spec: JobSpec) -> JobSpec:
    """The job on VMs that nobody bills: who comes and goes is the trace's, and no offer is made."""
    resources = spec.resources
    kept = {name: getattr(resources, name) for name in _OF_VMS}
    return spec.model_copy(update={"resources": Resources(provider="local", **kept)})


_OF_VMS = ("min_nodes", "max_nodes", "workers_per_node", "threads", "device_memory")


def _best_depth(scenario: Scenario, steady: Steady | None, planner: CachedPlanner) -> int:
    """P of the best grid for `max_nodes` VMs."""
    if scenario.spec.parallelism.unequal_pipelines != "off":
        parallelism = scenario.spec.parallelism.model_copy(update={"unequal_pipelines": "off"})
        spec = scenario.spec.model_copy(update={"parallelism": parallelism})
        steady = _steady(replace(scenario, spec=spec), planner)
    if steady is None:
        vms = scenario.spec.resources.max_nodes
        raise ReplayError(f"resources.max_nodes: there is no plan for {vms} VMs, so no depth to fix")
    return int(steady.shape.partition("x")[0])


def _outcome(
    scenario: Scenario, policy: Policy, planner: CachedPlanner, steady: Steady | None, prices: Prices
) -> Outcome:
    scenario = replace(scenario, calibration=policy.model(scenario.calibration))
    world = TraceWorld(scenario, policy, planner)
    world.run()
    ledger, wall_s = world.training.ledger, world.now_ns / 1e9
    assert sum(ledger.items.values()) == world.now_ns, "all of the time is accounted for"
    seconds = {item.value: spent_ns / 1e9 for item, spent_ns in ledger.items.items()}
    samples = ledger.steps * scenario.spec.training.global_batch_size
    series = world.training.samples
    return Outcome(
        policy=policy.name,
        about=policy.about,
        wall_s=wall_s,
        finished=world.state.finished is not None,
        steps=ledger.steps,
        samples=samples,
        goodput=seconds[Item.USEFUL] / wall_s if wall_s else 0.0,
        samples_per_s=samples / wall_s if wall_s else 0.0,
        seconds=seconds,
        morphs=morphs(world.state, world.training.begun),
        lost_steps=ledger.num_lost,
        cut_off_steps=ledger.num_cut_off,
        checkpoints=ledger.num_published,
        vm_hours=world.fleet.vm_ns(world.now_ns) / 3600e9,
        most_vms=max((sample.num_vms for sample in series), default=0),
        steady=steady,
        prices=prices,
        series=series,
        num_decisions=world.num_decisions,
    )


def _steady(scenario: Scenario, planner: CachedPlanner) -> Steady | None:
    """The job on as many VMs as it may have, none of which ever leaves."""
    calibration, spec = scenario.calibration.to_json(), scenario.spec
    state = JobState(job=JOB, spec=spec, recipe=scenario.recipe, calibration=calibration)
    num_vms = spec.resources.max_nodes
    workers = tuple(
        WorkerSlot(worker=f"vm{vm}.{index}", vm=f"vm{vm}", memory_bytes=scenario.device.memory_bytes)
        for vm in range(num_vms)
        for index in range(spec.resources.workers_per_node)
    )
    answer = planner.answer(state, ComputePlan(key="steady", generation=1, workers=workers), 0.0)
    if answer.plan is None or answer.predicted_s is None:
        return None
    return Steady(num_vms=num_vms, shape=Plan.from_json(answer.plan).shape, step_s=answer.predicted_s)
