"""A job that asks for several copies of each section: deaths, reroutes, and what is said of too few."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from branching_world import BranchingWorld
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import VmTerminated
from makara.manager.core.facts import CopiesChanged
from makara.manager.core.state import vm_of
from makara.manager.service.planning import compute_plan
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.morphing import copies_of
from makara.pipeline import Plan
from makara.protocol.messages import Phase, Profile, WorkerReport
from makara.simulator import Link


def started(num_vms: int, tolerated: int, per_vm: int = 1, **changes: Any) -> Script:
    """A job whose planner is the real one, running."""
    script = Script()
    start(
        script,
        num_vms,
        per_vm,
        training={"global_batch_size": 16, "steps": 100_000},
        resilience={"tolerated_failures": tolerated},
        resources={"min_nodes": 1, "max_nodes": num_vms, "workers_per_node": per_vm},
        **changes,
    )
    go_on(script)
    return script


def start(script: Script, num_vms: int, per_vm: int, **changes: Any) -> None:
    """VMs joined, the model profiled, and the planner asked."""
    script.submit(**changes)
    for _ in range(num_vms):
        script.wait(1.0)
        workers = [f"{vm}.{index}" for vm in script.state.vms for index in range(per_vm)]
        script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    assert len(workers) == num_vms * per_vm
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(
        recipe=RECIPE.model_copy(update={"num_micro_batches": 8}),
        calibration=uniform(2).to_json(),
    )
    script.report(script.change(workers[0], profile=profile))
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))
    assert script.count(ComputePlan)


def go_on(script: Script) -> None:
    """The planner answers its newest question, and the generation forms."""
    script.event(compute_plan(script.state, script.last(ComputePlan), lambda: script.now))
    if script.state.planned is not None:
        script.prepare()
        script.open()
        script.form()


def lose(script: Script, *vms: str) -> None:
    """The VMs die together, their peers are broken, and the planner is asked."""
    asked, current = script.count(ComputePlan), script.state.current
    assert current is not None
    for vm in vms:
        script.event(VmTerminated(now=script.now, vm=vm))
    left = [worker for worker, _ in current.incarnations if vm_of(worker) not in vms]
    script.report(*(script.change(worker, phase=Phase.BROKEN) for worker in left), silent=vms)
    for _ in range(60):
        if script.count(ComputePlan) > asked:
            return
        script.wait(1.0)
        script.report()
    raise AssertionError("the planner is not asked")


def copies(script: Script) -> int:
    current = script.state.current
    assert current is not None
    return copies_of(Plan.from_json(current.plan), [vm_of(worker) for worker, _ in current.incarnations])


def vms(script: Script) -> list[str]:
    """Those that live; VMs that are asked for in place of others never have a worker."""
    return [vm.vm for vm in script.state.live_vms if f"{vm.vm}.0" in script.workers]


def hosted(script: Script, dead: tuple[str, ...]) -> bool:
    """Whether each section of the running plan has a host that lives on: no store is needed."""
    current = script.state.current
    assert current is not None
    plan = Plan.from_json(current.plan)
    workers = [worker for worker, _ in current.incarnations]
    return all(
        any(vm_of(workers[rank]) not in dead for rank in plan.hosts(section))
        for section in range(plan.num_sections)
    )


@pytest.mark.parametrize("tolerated", [1, 2])
def test_vms_that_die_together_leave_a_host_of_each_section(tolerated: int) -> None:
    for per_vm, depth in itertools.product((1, 2), (1, 2)):
        script = started(6, tolerated, parallelism={"pipeline_parallel_degree": depth}, per_vm=per_vm)
        assert copies(script) > tolerated
        for dead in itertools.combinations(vms(script), tolerated):
            assert hosted(script, dead)


def test_too_few_vms_go_on_with_fewer_copies_and_it_is_said() -> None:
    script = started(4, 1, parallelism={"pipeline_parallel_degree": 2})
    assert copies(script) == 2
    lose(script, vms(script)[0])
    go_on(script)
    assert copies(script) == 1
    told = [fact for fact in script.facts if isinstance(fact, CopiesChanged)]
    assert [(fact.copies, fact.wanted, fact.enough_vms) for fact in told] == [(1, 2, 4)]
    assert notes(script) == [
        "silent corruption is found by comparing hosts of a section, and 1 of 2 sections have one host",
        "some section lives on 1 VM only, resilience.tolerated_failures asks for 2: "
        "there are too few VMs for now, 4 like these would do",
    ]


def test_a_job_that_may_not_have_enough_vms_is_told_so() -> None:
    script = started(4, 1, parallelism={"pipeline_parallel_degree": 2})
    lose(script, vms(script)[0])
    go_on(script)
    assert script.state.spec is not None
    resources = script.state.spec.resources.model_copy(update={"max_nodes": 3})
    spec = script.state.spec.model_copy(update={"resources": resources})
    script.state = script.state.changed(spec=spec)
    assert notes(script)[-1].endswith("too few VMs for now, 4 like these would do, resources.max_nodes is 3")


def test_a_rerouted_plan_with_fewer_copies_does_not_say_that_vms_are_too_few() -> None:
    world = BranchingWorld(
        uniform(2, inter_vm=Link(latency_s=0.0, bytes_per_s=1.0)),
        num_vms=5,
        training={"global_batch_size": 16, "steps": 100_000},
        resilience={"tolerated_failures": 1},
        resources={"min_nodes": 1},
        parallelism={"pipeline_parallel_degree": 2},
    )
    world.kill(next(iter(world.vms)))
    world.settle()
    assert world.copies == 1
    assert notes(world)[-1] == (
        "some section lives on 1 VM only, resilience.tolerated_failures asks for 2: "
        "the plan is the one of before, rerouted around lost VMs, until the next change of plan"
    )


def notes(told: Script | BranchingWorld) -> list[str]:
    """As `makara status` and the page show them."""
    job = Job("j", [], [])
    job.state, job.observations = told.state, told.observations
    return job_view(job, {}, 0.0).notes


def test_nothing_is_said_of_copies_that_nobody_asked_for() -> None:
    script = started(3, 0)
    lose(script, vms(script)[0])
    go_on(script)
    assert not [fact for fact in script.facts if isinstance(fact, CopiesChanged)]
