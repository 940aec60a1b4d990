"""What VMs are counted to cost while there is no manager, and what no cloud ever showed."""

from __future__ import annotations

import pytest
from core_script import Script
from makara.manager.core import Observations, fold
from makara.manager.core.commands import RequestVm
from makara.manager.core.cost import spent_by
from makara.manager.core.events import (
    AttemptFailed,
    ManagerStarted,
    OffersSeen,
    StopRequested,
    VmListed,
    VmTerminated,
)
from makara.manager.core.facts import JobEnded, RefusalKind, StopOrdered, VmEnded
from makara.manager.core.strikes.table import Kind
from makara.manager.spec.placement import Offer
from test_renting import answer, asked, fail, join, offer, pass_time, rented, succeed

HOUR_S = 3600.0
AWAY_S = 10 * HOUR_S


def begin_again(script: Script, after_s: float, offered: Offer | None = None) -> None:
    """Another manager begins, so long after the last one died."""
    script.state, script.observations = fold(script.facts), Observations()
    script.now += after_s
    script.event(ManagerStarted(now=script.now))
    script.event(OffersSeen(now=script.now, offers=(offered or offer(),)))


def counted(script: Script) -> float:
    """USD at most, where a VM costs 1 an hour."""
    return spent_by(script.state, script.now).at_most


def unseen(script: Script) -> float:
    """USD for the longest time for which a VM may live without a manager."""
    return (script.timing.end_reserve_s + script.timing.note_every_s) / HOUR_S


@pytest.mark.parametrize("budget", [5.0, 20.0, None])
@pytest.mark.parametrize("ran_s", [None, HOUR_S + 700.0])
def test_a_manager_that_was_away_counts_its_vms_until_they_must_have_ended(
    budget: float | None, ran_s: float | None
) -> None:
    """Found: 8.73 USD were counted for 0.65, and the job was stopped for its budget."""
    caps = {} if budget is None else {"budget": budget}
    script = rented(Script(), offer(), max_nodes=1, **caps)
    pass_time(script, HOUR_S)
    before = counted(script)
    (vm,) = script.state.live_vms
    begin_again(script, AWAY_S)
    script.workers.clear()
    script.wait(5.0)
    assert not script.count(StopOrdered), "whether it was there is not known yet"
    script.event(VmTerminated(now=script.now, vm=vm.vm, ran_s=ran_s))
    if ran_s is not None:
        assert counted(script) == pytest.approx(ran_s / HOUR_S)
    else:
        assert before + script.timing.end_reserve_s / HOUR_S <= counted(script) <= before + unseen(script)
    pass_time(script, 30.0)
    assert not script.count(JobEnded)
    assert script.last(RequestVm).vm != vm.vm, "it goes on with another"


def test_a_vm_that_is_seen_again_has_been_there_all_the_time() -> None:
    for seen_by_list in (True, False):
        script = rented(Script(), offer(), max_nodes=1)
        pass_time(script, HOUR_S)
        (vm,) = script.state.live_vms
        begin_again(script, AWAY_S)
        assert counted(script) < 2.0
        if seen_by_list:
            script.event(VmListed(now=script.now, vm=vm.vm, number=1, lives=True))
        else:
            script.report()
            script.wait(5.0)
        assert counted(script) == pytest.approx(11.0, abs=0.01)
        begin_again(script, AWAY_S)
        assert counted(script) == pytest.approx(11.0 + unseen(script), abs=0.1)


@pytest.mark.parametrize(("after_s", "num_strikes"), [(AWAY_S, 0), (20.0, 1)])
def test_a_vm_that_ended_itself_for_want_of_a_manager_is_no_loss_that_counts(
    after_s: float, num_strikes: int
) -> None:
    script = rented(Script(), offer(), max_nodes=1)
    pass_time(script, HOUR_S)
    (vm,) = script.state.live_vms
    begin_again(script, after_s)
    script.event(VmTerminated(now=script.now, vm=vm.vm))
    assert script.state.strikes.count(Kind.LOST_VM) == num_strikes


def test_a_list_that_shows_its_end_is_no_sign_of_life() -> None:
    script = rented(Script(), offer(), max_nodes=1)
    pass_time(script, HOUR_S)
    (vm,) = script.state.live_vms
    begin_again(script, AWAY_S)
    script.event(VmListed(now=script.now, vm=vm.vm, number=1, lives=False))
    assert counted(script) < 2.0


def test_short_lives_of_managers_after_a_long_absence_make_nothing_dearer() -> None:
    script = rented(Script(), offer(), max_nodes=1)
    pass_time(script, HOUR_S)
    before = counted(script)
    begin_again(script, AWAY_S)
    for _ in range(5):
        begin_again(script, 20.0)
    assert counted(script) <= before + unseen(script)
    begin_again(script, -3 * HOUR_S)
    assert counted(script) >= before, "a clock that is set back makes nothing cheaper"


def test_vms_that_do_not_end_themselves_are_counted_in_full() -> None:
    stays = offer().model_copy(update={"ends_itself": False})
    script = rented(Script(), stays, max_nodes=1)
    pass_time(script, HOUR_S)
    begin_again(script, AWAY_S, stays)
    assert counted(script) == pytest.approx(11.0)


def test_a_job_that_had_ended_counts_its_vms_likewise() -> None:
    """What is counted decides whether it may be resumed."""
    script = rented(Script(releasing=False), offer(), max_nodes=1)
    pass_time(script, HOUR_S)
    script.event(StopRequested(now=script.now))
    pass_time(script, 400.0)
    assert script.state.ended is not None
    (vm,), before = script.state.leaving, counted(script)
    begin_again(script, AWAY_S)
    script.event(VmTerminated(now=script.now, vm=vm))
    assert before < counted(script) <= before + unseen(script)


def test_a_vm_on_its_way_is_counted_until_its_own_timer_must_have_ended_it() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    begin_again(script, AWAY_S)
    script.event(VmTerminated(now=script.now, vm=vm))
    most_s = script.timing.unjoined_after_s + script.timing.note_every_s
    assert script.timing.unjoined_after_s / HOUR_S <= counted(script) <= most_s / HOUR_S


def given_up(script: Script, **resources: object) -> str:
    """A VM of which nothing was ever seen, and which was given up; the next one is not asked for."""
    rented(script, offer(), joined=False, **resources)
    script.wait()
    vm = script.last(RequestVm).vm
    pass_time(script, script.timing.request_timeout_s + 5.0, answers=False)
    assert script.last(VmEnded).vm == vm
    return vm


def test_a_vm_that_no_list_ever_showed_costs_nothing() -> None:
    """Found: 1.62 USD were counted though no VM was ever made."""
    script = Script(releasing=False)
    vm = given_up(script)
    assert counted(script) > 0.5, "there may be one"
    script.event(VmTerminated(now=script.now, vm=vm))
    assert counted(script) == 0.0


@pytest.mark.parametrize("lives", [True, False])
def test_a_vm_that_was_listed_costs_though_its_creation_was_never_answered(lives: bool) -> None:
    script = Script(releasing=False)
    vm = given_up(script)
    script.event(VmListed(now=script.now, vm=vm, number=1, lives=lives))
    script.event(VmTerminated(now=script.now, vm=vm))
    assert counted(script) > 0.5
    assert script.state.bills[vm].spent.at_most > 0.5


def test_a_list_of_another_attempt_says_nothing_of_the_newest() -> None:
    script = rented(Script(releasing=False), offer("a"), offer("b"), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    fail(script)
    script.event(VmListed(now=script.now, vm=vm, number=1, lives=False))
    assert [name for name, _, _ in asked(script)] == [f"{vm}-1", f"{vm}-2"]
    assert not script.state.vms[vm].existed


def test_a_vm_that_a_lost_call_made_while_there_was_no_manager_is_counted() -> None:
    script = rented(Script(releasing=False), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    begin_again(script, AWAY_S)
    pass_time(script, script.timing.join_grace_s + 10.0, answers=False)
    script.event(VmTerminated(now=script.now, vm=vm))
    assert counted(script) >= script.timing.unjoined_after_s / HOUR_S


def test_a_vm_that_its_cloud_ended_before_it_was_told_of_is_counted() -> None:
    script = rented(Script(releasing=False), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    pass_time(script, 300.0, answers=False)
    ended = AttemptFailed(now=script.now, vm=vm, number=1, kind=RefusalKind.ENDED, error="it has ended")
    script.event(ended)
    script.event(VmTerminated(now=script.now, vm=vm))
    assert counted(script) == pytest.approx(300.0 / HOUR_S)


def test_a_vm_that_joined_is_counted_though_its_creation_was_never_answered() -> None:
    script = rented(Script(releasing=False), offer(), joined=False, max_nodes=1)
    script.wait()
    vm = script.last(RequestVm).vm
    join(script)
    pass_time(script, 300.0, answers=False)
    script.event(VmTerminated(now=script.now, vm=vm))
    answer(script)
    assert counted(script) >= 300.0 / HOUR_S
