"""What a job does about its share of a pool: VMs that others want are handed over, kept, or given back."""

from __future__ import annotations

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core.commands import ComputePlan, RequestVm
from makara.manager.core.events import AttemptFailed, OffersSeen, StopRequested, VmTerminated
from makara.manager.core.facts import EndReason, HoldChanged, RefusalKind, VmEnded, VmYielded
from makara.manager.core.pools.claims import claim_of, kept_vms
from makara.manager.core.pools.shares import Claim, Share
from makara.manager.core.state import vm_of
from makara.manager.core.strikes.table import Kind
from makara.manager.spec.placement import Attempt
from makara.protocol.messages import Phase, Profile, WorkerReport
from test_renting import join, offer, pass_time, rented, succeed

WHY = "others wait"


def share(most: int, pool: str = "local") -> Share:
    return Share(most={pool: most}, why=WHY)


def claim(script: Script) -> Claim:
    return claim_of(script.state, script.observations, script.timing, script.now)


def test_a_job_asks_for_no_more_than_its_share() -> None:
    script = Script(share=share(1))
    script.submit(resources={"max_nodes": 3})
    script.wait()
    script.wait(1.0)
    assert script.count(RequestVm) == 1
    assert script.observations.why_no_vm == WHY
    script.share = share(3)
    script.wait(1.0)
    assert script.count(RequestVm) == 3


def test_one_that_trains_hands_over_what_is_beyond_its_share_by_a_planned_change() -> None:
    script = Script()
    workers = script.run(4)
    script.share = share(3)
    script.wait(1.0)
    (given,) = [fact.vm for fact in script.facts if isinstance(fact, VmYielded)]
    assert given == vm_of(workers[3])  # the newest
    assert script.state.current is not None  # it goes on meanwhile
    assert [slot.worker for slot in script.last(ComputePlan).workers] == workers[:3]
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.report(*(script.change(w, phase=Phase.LEFT) for w in workers[2:]))
    script.form(step=8)
    ended = script.last(VmEnded)
    assert (ended.vm, ended.reason, ended.detail) == (
        given,
        EndReason.RELEASED,
        "given up for jobs that wait",
    )
    script.wait(30.0)
    assert script.count(RequestVm) == 4  # no other in its place


def test_what_no_plan_does_without_is_kept_and_claimed() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2})
    script.share = share(1)
    script.wait(1.0)
    assert script.count(VmYielded) == 1
    script.answer_impossible("too little memory")
    assert len(kept_vms(script.state)) == 2
    assert not script.count(HoldChanged)
    assert script.state.current is not None
    assert claim(script).least == 2
    script.share = Share()
    script.wait(1.0)
    assert script.state.vms[vm_of(workers[1])].drained_at is None


def test_a_vm_on_its_way_is_given_up_at_once_and_before_others() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 3, "min_nodes": 3})
    script.wait()
    first = next(iter(script.state.vms))
    script.report(WorkerReport(worker=f"{first}.0", incarnation=1, phase=Phase.IDLE))
    script.share = share(1)
    script.wait(1.0)
    assert [vm.vm for vm in script.state.live_vms] == [first]


def test_one_that_waits_keeps_its_vms_for_a_while_then_gives_them_back() -> None:
    script = Script()
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    script.report(*(script.change(w, step=7) for w in workers))
    script.share = share(0)
    lost = workers.pop()
    script.report(script.change(lost, phase=Phase.EXITED))
    script.workers.pop(lost)
    script.event(VmTerminated(now=script.now, vm=vm_of(lost)))
    kept = script.state.vms[vm_of(workers[0])]
    pass_time(script, script.timing.keep_waiting_s - 20.0)
    assert script.state.vms[kept.vm].status.value == "joined"
    pass_time(script, 40.0)
    assert script.count(VmYielded) == 1
    pass_time(script, script.timing.stop_timeout_s)  # half of the sections are lost: nothing can be saved
    assert not script.state.live_vms


def test_one_that_holds_nothing_gives_its_vms_back_after_a_while() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 2, "min_nodes": 2})
    script.wait()
    first = next(iter(script.state.vms))
    script.report(WorkerReport(worker=f"{first}.0", incarnation=1, phase=Phase.IDLE))
    script.share = share(0)
    pass_time(script, script.timing.keep_waiting_s - 20.0)
    assert len(script.state.live_vms) == 1
    pass_time(script, 40.0)
    assert not script.state.live_vms
    assert not claim(script).trains


def test_vms_of_a_job_that_has_ended_count_as_being_handed_over_until_they_are_gone() -> None:
    """Found: the others in its pool gave up VMs for one that waited, though these were about to be free."""
    script = rented(Script(releasing=False), offer(), max_nodes=1)
    held = claim(script).held
    assert held.total() == 1
    script.event(StopRequested(now=script.now))
    assert script.state.ended is not None
    assert (claim(script).held, claim(script).leaving, claim(script).is_active) == ({}, held, False)
    for vm in [*script.state.leaving]:
        script.event(VmTerminated(now=script.now, vm=vm))
    assert claim(script).leaving == {}


# ---- clouds ------------------------------------------------------------------------------------------------


def refuse(script: Script, seconds: float = 0.0) -> None:
    """The cloud refuses whatever is asked for meanwhile."""
    for _ in range(int(seconds / 5.0) + 1):
        while asked := [vm for vm in script.state.live_vms if vm.attempted_at is not None and not vm.id]:
            attempt = asked[0].attempt
            assert attempt is not None
            fail_attempt(script, attempt)
        script.wait(5.0)
        script.report()


def fail_attempt(script: Script, attempt: Attempt, kind: RefusalKind = RefusalKind.NO_CAPACITY) -> None:
    error = "none there"
    failed = AttemptFailed(now=script.now, vm=attempt.vm, number=attempt.number, kind=kind, error=error)
    script.event(failed)


@pytest.mark.parametrize(("min_nodes", "waits_s"), [(2, 1200.0), (30, 1800.0)])
def test_vms_of_a_cloud_that_wait_for_others_cost_a_bounded_sum(min_nodes: int, waits_s: float) -> None:
    """As much as `min_nodes` of them cost in ten minutes, and half an hour at most."""
    script = rented(Script(), offer(), min_nodes=min_nodes, max_nodes=max(3, min_nodes))
    refuse(script, waits_s - 30.0)
    assert not script.count(VmYielded)
    refuse(script, 60.0)
    assert script.count(VmYielded) == 1
    assert not script.state.live_vms
    assert script.observations.strikes.count(Kind.SHORT) == 1
    assert claim(script).pools == ()  # meanwhile others may have what there is
    asked = script.count(RequestVm)
    pass_time(script, 200.0)
    assert script.count(RequestVm) == asked
    assert "waited in vain" in script.observations.why_no_vm
    pass_time(script, 150.0)
    assert script.count(RequestVm) > asked


def test_vms_of_a_cloud_that_wait_for_others_one_after_the_other_cost_a_bounded_sum() -> None:
    """Found: each that the cloud took back after five minutes began its wait from nothing; so for ever."""
    script = rented(Script(), offer(), min_nodes=2, max_nodes=2)
    for _ in range(4):
        assert not script.observations.strikes.count(Kind.SHORT)
        refuse(script, 290.0)
        for vm in [vm.vm for vm in script.state.live_vms if vm.joined]:
            script.event(VmTerminated(now=script.now, vm=vm, taken_back="no spot capacity"))
        script.workers.clear()
        asked = script.count(RequestVm)
        while script.count(RequestVm) == asked and script.count(VmYielded) == 0:
            script.wait(5.0)
        succeed(script)
        join(script)
    refuse(script, 60.0)
    assert script.observations.strikes.count(Kind.SHORT) == 1
    assert not script.state.live_vms


def test_a_vm_of_a_cloud_for_which_there_is_no_plan_costs_a_bounded_sum() -> None:
    """Found: with the default `min_nodes` it was held and paid for without end."""
    script = rented(Script(), offer(), max_nodes=2)
    (worker,) = script.workers
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(worker, profile=profile))
    script.report(script.change(worker, graph_hash="5ec7"))
    if not script.count(ComputePlan):
        refuse(script, 5.0)
    script.answer_impossible("too little memory")
    refuse(script, 1300.0)
    assert script.observations.strikes.count(Kind.SHORT) == 1
    assert not script.state.live_vms


def test_a_pool_of_a_cloud_is_refused_until_it_gives_a_vm() -> None:
    script = rented(Script(), offer("a"), offer("b"), min_nodes=2, zones=["a", "b"])
    pools = "aws/r/a/small/spot", "aws/r/b/small/spot"
    assert (claim(script).pools, claim(script).refused) == (pools, {})
    script.wait(1.0)
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    fail_attempt(script, attempt)
    assert set(claim(script).refused) == {pools[0]}  # the other zone may have one
    refuse(script)
    assert set(claim(script).refused) == {*pools}
    script.wait(30.0)
    succeed(script)
    assert len(claim(script).refused) == 1
    script.wait(600.0)
    assert not claim(script).refused  # where it did not ask again


def test_what_is_not_sold_for_what_the_job_bids_is_no_want_of_capacity() -> None:
    """Found: any job with a low bid had all others give their VMs up."""
    script = rented(Script(), offer("a"))
    script.wait(1.0)
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    fail_attempt(script, attempt, RefusalKind.NOT_SOLD)
    assert not claim(script).refused


def test_a_job_without_a_plan_needs_one_vm_more_and_waits() -> None:
    """Found: two jobs that each need four of four machines held three and one, and took that for training."""
    script = Script()
    workers = script.run(2)
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    script.report(script.change(workers[0], phase=Phase.IDLE))
    script.answer_impossible("too little memory")
    assert (claim(script).least, claim(script).trains) == (2, False)
    script.wait(5.0)
    (new,) = (vm.vm for vm in script.state.live_vms if not vm.joined)
    script.report(WorkerReport(worker=f"{new}.0", incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    assert claim(script).trains


def test_of_a_pool_that_is_shared_no_more_is_asked_for_and_other_types_are() -> None:
    script = rented(Script(), offer(), min_nodes=1)
    script.event(OffersSeen(now=script.now, offers=(offer(), offer(kind="large"))))
    script.share = share(1, "aws/r/a/small/spot")
    script.wait(1.0)
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    assert attempt.placement.instance_type == "large"
