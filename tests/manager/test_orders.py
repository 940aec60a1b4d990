"""Orders: what each VM is told, as a projection of the state."""

from __future__ import annotations

from core_script import RECIPE, Script
from makara.manager.core.events import StopRequested, VmTerminated
from makara.manager.core.orders import Leases, orders
from makara.protocol.messages import Member, Orders, Phase, WorkerReport, plan_hash


def test_a_stranger_is_told_to_shut_down() -> None:
    script = Script()
    script.submit()
    assert orders(script.state, "v77").action == "shutdown"
    assert orders(script.state, "v77").job is None


def test_a_vm_that_waits_gets_the_job_and_nothing_to_do() -> None:
    script = Script()
    script.submit()
    script.wait()
    told = orders(
        script.state, next(iter(script.state.vms)), Leases(trainer_lease_s=3.0, orphan_timeout_s=60.0)
    )
    assert told.action == "idle"
    assert told.job is not None
    assert (told.job.job, told.job.entrypoint, told.job.store.uri) == ("j", "train:build", "file:///c")
    assert (told.lease_s, told.orphan_timeout_s) == (3.0, 60.0)
    assert told.version == script.state.num_facts


def test_one_worker_is_told_to_profile_until_the_recipe_is_known() -> None:
    script = Script()
    script.submit()
    script.wait()
    first, second = script.state.vms
    script.report(
        *(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE) for vm in (first, second))
    )
    told = orders(script.state, first)
    assert told.generation is not None
    assert (told.action, told.generation.kind) == ("profile", "profile")
    assert [member.worker for member in told.generation.members] == [told.generation.first] == [f"{first}.0"]
    assert orders(script.state, second).action == "idle"
    done = Script()
    workers = done.start(2)
    assert all(orders(done.state, worker[:-2]).recipe == RECIPE for worker in workers)


def test_members_prepare_then_go() -> None:
    script = Script()
    first, second = script.start(2)
    told = orders(script.state, first[:-2])
    assert told.action == "train"
    assert told.generation is not None
    assert (told.generation.phase, told.generation.endpoint) == ("prepare", None)
    members = [Member(worker=worker, address="10.0.0.1") for worker in (first, second)]
    assert told.generation.members == members
    assert told.generation.plan_hash == plan_hash(told.generation.plan, members)
    other = orders(script.state, second[:-2]).generation
    assert other is not None
    assert (other.first, other.ranks) == (first, {second: 1})
    assert (other.members, other.plan, other.plan_hash) == ([], {}, told.generation.plan_hash)
    script.prepare()
    prepared = orders(script.state, first[:-2]).generation
    assert prepared is not None
    assert prepared.phase == "prepare"  # not before the head is swapped
    script.open()
    going = orders(script.state, second[:-2]).generation
    assert going is not None
    assert (going.phase, going.endpoint) == ("go", "10.0.0.1:1")


def test_survivors_are_woken_and_the_dead_is_fenced() -> None:
    script = Script()
    first, second = script.run(2)
    before = orders(script.state, second[:-2]).version
    script.event(VmTerminated(now=script.now, vm=first[:-2]))
    told = orders(script.state, second[:-2])
    assert told.version > before
    assert (told.abandoned, told.generation) == (1, None)
    assert orders(script.state, first[:-2]).action == "shutdown"


def test_a_generation_given_up_in_preparation_gives_back_the_orders_of_the_one_that_runs() -> None:
    script = Script()
    first, second = script.run(2, resources={"max_nodes": 3})
    third = f"{list(script.state.vms)[2]}.0"
    script.report(WorkerReport(worker=third, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(5.0)
    script.answer(1, 3)
    told = orders(script.state, first[:-2]).generation
    assert told is not None
    assert (told.number, told.phase) == (2, "prepare")
    script.event(VmTerminated(now=script.now, vm=third[:-2]))
    told = orders(script.state, second[:-2]).generation
    assert told is not None
    assert (told.number, told.phase) == (1, "go")
    assert orders(script.state, second[:-2]).abandoned == 0


def test_a_stopping_job_holds() -> None:
    script = Script()
    first, _ = script.run(2)
    script.event(StopRequested(now=script.now))
    told = orders(script.state, first[:-2])
    assert told.hold
    assert Orders.model_validate_json(told.model_dump_json()) == told
