"""VMs of a cloud that no plan uses are released after a while, and not asked for again at once."""

from __future__ import annotations

import pytest
from core_script import Script
from makara.manager.core import Observations, fold
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import AttemptSucceeded, ManagerStarted, OffersSeen
from makara.manager.core.facts import EndReason, VmEnded
from makara.manager.core.rules.surplus import LOWERED
from rented_script import OFFER, running, shared


def unused(script: Script) -> list[str]:
    return [it.vm for it in script.facts if isinstance(it, VmEnded) and it.reason is EndReason.UNUSED]


def test_what_no_plan_uses_is_released_after_a_while_the_newest_first_and_not_asked_for_again() -> None:
    script = running(4)
    vms = [vm.vm for vm in script.state.live_vms]
    script.pass_time(script.timing.unused_s - 10.0)
    assert not unused(script)
    script.pass_time(30.0)
    assert unused(script) == [vms[3], vms[2]]
    requested = script.count(RequestVm)
    script.pass_time(script.timing.grow_again_s / 2)
    assert script.observations.why_no_vm == LOWERED
    script.pass_time(2.0 * script.timing.grow_again_s)
    assert script.count(RequestVm) == requested
    assert script.observations.why_no_vm == "no plan is faster with 2 more"
    assert [vm.vm for vm in script.state.live_vms] == vms[:2]


def test_vms_of_which_more_was_expected_are_asked_for_again_once_another_plan_runs() -> None:
    script = running(4, step_s=shared)
    script.pass_time(script.timing.unused_s + 20.0)
    requested = script.count(RequestVm)
    script.lose(script.state.live_vms[1].vm)
    script.wait(1.0)
    script.wait(1.0)
    assert script.count(RequestVm) == requested + 1, "as many as the plan used"
    script.plan(1, 1)
    for _ in range(4):
        script.wait(1.0)
    assert len(script.state.live_vms) == 4


def test_vms_of_which_more_was_expected_are_asked_for_again_after_a_while() -> None:
    script = running(3, depth=1, step_s=shared)
    script.pass_time(script.timing.unused_s + 20.0)
    assert len(script.state.live_vms) == 1
    script.pass_time(script.timing.grow_again_s / 2)
    assert len(script.state.live_vms) == 1
    script.pass_time(script.timing.grow_again_s / 2 + 20.0)
    assert len(script.state.live_vms) == 3


@pytest.mark.parametrize("kept", [3, 4])
def test_min_nodes_are_kept(kept: int) -> None:
    script = running(4, min_nodes=kept)
    script.pass_time(2.0 * script.timing.unused_s)
    assert len(script.state.live_vms) == kept


def test_a_reserve_stays_while_another_vm_is_on_its_way() -> None:
    script = running(3, step_s=shared)
    script.pass_time(script.timing.unused_s - 60.0)
    script.lose(script.state.live_vms[2].vm)
    script.pass_time(5.0)
    script.wait(1.0)
    vm = script.last(RequestVm).vm
    script.event(AttemptSucceeded(now=script.now, vm=vm, number=1, id="i-x"))
    script.workers = {
        name: it for name, it in script.workers.items() if name.rpartition(".")[0] in script.state.vms.live
    }
    script.pass_time(script.timing.unused_s)
    assert not unused(script)


def test_a_new_manager_keeps_a_reserve_for_as_long_and_knows_that_fewer_are_wanted() -> None:
    script = running(4)
    script.pass_time(script.timing.unused_s + 20.0)
    requested = script.count(RequestVm)
    script.state, script.observations = fold(script.facts), Observations()
    script.event(ManagerStarted(now=script.now))
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    script.pass_time(60.0)
    assert script.count(RequestVm) == requested


def test_vms_that_nobody_pays_for_are_a_reserve_for_ever() -> None:
    script = running(4, provider="local")
    script.pass_time(3.0 * script.timing.unused_s)
    assert len(script.state.live_vms) == 4
