"""VMs of a cloud that no plan uses are released after a while, and not asked for again at once."""

from __future__ import annotations

from typing import Any

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Timing, Vitals, fold
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import AttemptSucceeded, ManagerStarted, OffersSeen, VmTerminated
from makara.manager.core.facts import EndReason, VmEnded
from makara.manager.core.rules.surplus import LOWERED
from makara.manager.core.state import VmStatus
from makara.manager.spec.placement import Market, Offer, Placement, Price
from makara.protocol.messages import Phase, Profile, WorkerReport

PLACE = Placement(provider="aws", market=Market.SPOT, region="r", zone="a", instance_type="small")
OFFER = Offer(placement=PLACE, price=Price(hourly=0.5, ceiling=1.0, at=0.0, source="a test"))


def join(script: Script, *, ready: bool = True) -> None:
    """All that is asked for is made and joins."""
    for vm in script.state.live_vms:
        if vm.status is not VmStatus.REQUESTED:
            continue
        assert vm.attempt is not None
        script.event(AttemptSucceeded(now=script.now, vm=vm.vm, number=vm.attempt.number, id=f"i-{vm.vm}"))
        worker = WorkerReport(worker=f"{vm.vm}.0", incarnation=1, phase=Phase.IDLE)
        script.workers[worker.worker] = worker.model_copy(update={"graph_hash": "5ec7" if ready else None})
    script.report()


def pass_time(script: Script, seconds: float) -> None:
    for _ in range(int(seconds / 5.0)):
        script.wait(5.0)
        script.report()


def running(num_vms: int, depth: int = 2, replicas: int = 1, **resources: Any) -> Script:
    """A job on so many VMs of a cloud, whose plan uses the first of them."""
    script = Script(timing=Timing(unused_s=100.0, grow_again_s=400.0))
    types = {"instance_type": "small"} if resources.get("provider", "aws") == "aws" else {}
    script.submit(resources={"provider": "aws", "max_nodes": num_vms, **types, **resources})
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    for _ in range(2):  # the first joins alone
        script.wait(1.0)
        join(script, ready=False)
    workers = list(script.workers)
    script.report(script.change(workers[0], profile=Profile(recipe=RECIPE, calibration=uniform(2).to_json())))
    script.report(*(script.change(worker, graph_hash="5ec7") for worker in workers))
    plan(script, depth, replicas)
    return script


def plan(script: Script, depth: int, replicas: int) -> None:
    """What the planner answers runs."""
    script.wait(5.0)
    script.answer(depth, replicas)
    script.prepare()
    script.open()
    script.form()


def unused(script: Script) -> list[str]:
    return [it.vm for it in script.facts if isinstance(it, VmEnded) and it.reason is EndReason.UNUSED]


def test_what_no_plan_uses_is_released_after_a_while_the_newest_first_and_not_asked_for_again() -> None:
    script = running(4)
    vms = [vm.vm for vm in script.state.live_vms]
    pass_time(script, script.timing.unused_s - 10.0)
    assert not unused(script)
    pass_time(script, 30.0)
    assert unused(script) == [vms[3], vms[2]]
    requested = script.count(RequestVm)
    pass_time(script, 2.0 * script.timing.grow_again_s)
    assert script.count(RequestVm) == requested
    assert script.vitals.why_no_vm == LOWERED
    assert [vm.vm for vm in script.state.live_vms] == vms[:2]


def test_once_another_plan_runs_all_are_asked_for_again() -> None:
    script = running(4)
    pass_time(script, script.timing.unused_s + 20.0)
    lost = script.state.live_vms[1].vm
    del script.workers[f"{lost}.0"]
    requested = script.count(RequestVm)
    script.event(VmTerminated(now=script.now, vm=lost))
    script.wait(1.0)
    assert script.count(RequestVm) == requested + 1, "as many as the plan used"
    plan(script, 1, 1)
    script.wait(1.0)
    assert len(script.state.live_vms) == 4


@pytest.mark.parametrize("kept", [3, 4])
def test_min_nodes_are_kept(kept: int) -> None:
    script = running(4, min_nodes=kept)
    pass_time(script, 2.0 * script.timing.unused_s)
    assert len(script.state.live_vms) == kept


def test_a_reserve_stays_while_another_vm_is_on_its_way() -> None:
    script = running(3)
    pass_time(script, script.timing.unused_s - 60.0)
    script.event(VmTerminated(now=script.now, vm=script.state.live_vms[2].vm))
    pass_time(script, 5.0)
    script.wait(1.0)
    vm = script.last(RequestVm).vm
    script.event(AttemptSucceeded(now=script.now, vm=vm, number=1, id="i-x"))
    script.workers = {
        name: it for name, it in script.workers.items() if name.rpartition(".")[0] in script.state.vms.live
    }
    pass_time(script, script.timing.unused_s)
    assert not unused(script)


def test_a_job_that_had_not_all_its_vms_asks_again_after_a_while() -> None:
    script = running(3, depth=1)
    lost = script.state.live_vms[2].vm
    script.event(OffersSeen(now=script.now, offers=()))
    del script.workers[f"{lost}.0"]
    script.event(VmTerminated(now=script.now, vm=lost))
    pass_time(script, script.timing.unused_s + 20.0)
    assert len(script.state.live_vms) == 1
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    pass_time(script, script.timing.grow_again_s / 2)
    assert len(script.state.live_vms) == 1
    pass_time(script, script.timing.grow_again_s / 2 + 20.0)
    assert len(script.state.live_vms) == 3


def test_a_new_manager_keeps_a_reserve_for_as_long_and_knows_that_fewer_are_wanted() -> None:
    script = running(4)
    pass_time(script, script.timing.unused_s + 20.0)
    requested = script.count(RequestVm)
    script.state, script.vitals = fold(script.facts), Vitals()
    script.event(ManagerStarted(now=script.now))
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    pass_time(script, 60.0)
    assert script.count(RequestVm) == requested


def test_vms_that_nobody_pays_for_are_a_reserve_for_ever() -> None:
    script = running(4, provider="local")
    pass_time(script, 3.0 * script.timing.unused_s)
    assert len(script.state.live_vms) == 4
