"""Where the core asks for VMs, what follows from a cloud's answers, and that no cap is passed meanwhile."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from core_script import Script
from makara.manager.core import Observations, fold
from makara.manager.core.commands import ReleaseVm, RequestVm
from makara.manager.core.cost import bill, hourly_ceiling, noted, spent_by
from makara.manager.core.events import (
    AttemptFailed,
    AttemptSucceeded,
    Batch,
    ConsoleRead,
    ManagerStarted,
    OffersSeen,
    ReleaseRefused,
    ReportReceived,
    RequestTroubled,
    ResumeRequested,
    StopRequested,
    VmEndingSeen,
    VmTerminated,
)
from makara.manager.core.facts import (
    AttemptMade,
    AttemptRefused,
    EndReason,
    JobEnded,
    PersonNeeded,
    RefusalKind,
    Resumption,
    StopOrdered,
    VmCreated,
    VmEnded,
    VmGone,
    VmNotReleased,
    VmRequested,
)
from makara.manager.core.fold.renting import place_of
from makara.manager.core.strikes.table import Kind
from makara.manager.core.vms import VmStatus
from makara.manager.spec.placement import Market, Offer, Placement, Price
from makara.protocol.messages import Phase, Profiling, WorkerReport

SPOT, ON_DEMAND = Market.SPOT, Market.ON_DEMAND
CLOUD: dict[str, Any] = {"provider": "aws", "instance_type": ["small", "large"], "max_nodes": 3}


def offer(
    zone: str = "a",
    kind: str = "small",
    market: Market = SPOT,
    *,
    ceiling: float | None = 1.0,
    num_gpus: int = 0,
) -> Offer:
    placement = Placement(provider="aws", market=market, region="r", zone=zone, instance_type=kind)
    if ceiling is None:
        return Offer(placement=placement, price=None)
    price = Price(hourly=ceiling / 2, ceiling=ceiling, at=0.0, source="a test")
    return Offer(placement=placement, price=price, num_gpus=num_gpus)


def rented(script: Script, *offers: Offer, joined: bool = True, **resources: Any) -> Script:
    """A job on a cloud that has these offers; VMs from there have joined before, unless told otherwise."""
    script.submit(resources={**CLOUD, **resources})
    script.event(OffersSeen(now=script.now, offers=offers))
    if joined:
        script.wait()
        vm = script.last(RequestVm).vm
        succeed(script)
        script.report(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()))
    return script


def asked(script: Script) -> list[tuple[str, str, str]]:
    """(VM, zone, type) of every attempt."""
    made = [fact.attempt for fact in script.facts if isinstance(fact, AttemptMade)]
    return [(it.name, it.placement.zone, it.placement.instance_type) for it in made]


def markets(script: Script) -> list[Market]:
    made = [fact.attempt for fact in script.facts if isinstance(fact, AttemptMade)]
    return [it.placement.market for it in made]


def pass_time(script: Script, seconds: float, *, answers: bool = True) -> None:
    """As a manager sees it that is not suspended; clouds answer, and who has joined goes on reporting."""
    for _ in range(int(seconds / 5.0)):
        script.wait(5.0)
        if answers:
            answer(script)
        script.report()


def answer(script: Script) -> None:
    """All requests that are open give a VM."""
    for vm in script.state.live_vms:
        if vm.attempt is not None and vm.attempted_at is not None and not vm.id:
            number, name = vm.attempt.number, f"i-{vm.vm}"
            script.event(AttemptSucceeded(now=script.now, vm=vm.vm, number=number, id=name))


def fail(script: Script, kind: RefusalKind = RefusalKind.NO_CAPACITY, error: str = "none there") -> None:
    """The newest request is refused."""
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    number = attempt.number
    script.event(AttemptFailed(now=script.now, vm=attempt.vm, number=number, kind=kind, error=error))


def succeed(script: Script) -> None:
    """The newest request gives a VM."""
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    vm, number = attempt.vm, attempt.number
    script.event(AttemptSucceeded(now=script.now, vm=vm, number=number, id=f"i-{vm}"))


def join(script: Script) -> None:
    """The VM that was asked for last joins."""
    report = WorkerReport(
        worker=f"{script.last(RequestVm).vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()
    )
    script.report(report)


def test_an_attempt_is_journalled_with_the_command_that_makes_it() -> None:
    script = rented(Script(), offer(), joined=False, max_price=0.4)
    script.wait()
    made, command = script.last(AttemptMade), script.last(RequestVm)
    assert made.attempt == command.attempt
    assert made.attempt.name == f"{made.vm}-1"
    assert made.attempt.max_price == 0.4
    assert made.price.ceiling == 1.0
    succeed(script)
    assert script.last(VmCreated).id == script.state.vms[made.vm].id == f"i-{made.vm}"


@pytest.mark.parametrize(("on_demand", "sent"), [(0.3, 0.3), (0.5, 0.4), (None, 0.4)])
def test_a_bid_is_at_most_the_on_demand_price(on_demand: float | None, sent: float) -> None:
    offered = offer().model_copy(update={"on_demand": on_demand})
    script = rented(Script(), offered, joined=False, max_price=0.4)
    script.wait()
    assert script.last(AttemptMade).attempt.max_price == sent


def test_an_attempt_asks_for_the_jobs_image_and_disk() -> None:
    script = rented(Script(), offer(), joined=False, image="ami-1", disk_gb=80)
    script.wait()
    attempt = script.last(AttemptMade).attempt
    assert (attempt.image, attempt.disk_gb) == ("ami-1", 80)


def test_an_attempt_keeps_how_many_gpus_its_offer_has() -> None:
    script = rented(Script(), offer(num_gpus=4), joined=False)
    script.wait()
    assert script.last(AttemptMade).attempt.num_gpus == 4


def test_nothing_is_asked_for_before_prices_are_known() -> None:
    script = Script()
    script.submit(resources=CLOUD)
    script.wait()
    assert script.count(VmRequested) == 0
    assert script.observations.why_no_vm == "prices are not known yet"


def test_a_place_without_capacity_leads_to_the_next_and_is_tried_again_later() -> None:
    script = rented(Script(), offer("a"), offer("a", "large"), offer("b"), joined=False)
    script.wait()
    fail(script)
    fail(script)
    fail(script)
    assert asked(script) == [("v0-1", "a", "small"), ("v0-2", "a", "large"), ("v0-3", "b", "small")]
    assert script.last(VmEnded).reason is EndReason.REQUEST_FAILED
    assert not script.state.counted_vms, "nothing of it exists"
    script.wait(1.0)
    assert len(asked(script)) == 3
    script.wait(script.timing.strikes[Kind.REFUSED].first_s)
    assert asked(script)[3][1:] == ("a", "small")


def test_a_quota_holds_in_all_zones_and_not_for_other_types() -> None:
    script = rented(Script(), offer("a"), offer("b"), offer("b", "large"), joined=False)
    script.wait()
    fail(script, RefusalKind.QUOTA)
    assert asked(script)[-1] == ("v0-2", "b", "large")


def test_while_a_vm_lives_no_other_zone_is_asked_unless_several_are_listed() -> None:
    here = rented(Script(), offer("a"), offer("b"))
    here.wait()
    fail(here)
    assert {zone for _, zone, _ in asked(here)} == {"a"}
    listed = rented(Script(), offer("a"), offer("b"), zones=["a", "b"])
    listed.wait()
    fail(listed)
    assert asked(listed)[-1][1] == "b"


def test_where_nothing_is_allowed_a_person_is_asked_and_nobody_else() -> None:
    script = rented(Script(), offer(), offer(market=ON_DEMAND), joined=False)
    script.wait()
    fail(script, RefusalKind.NOT_ALLOWED, "you may not")
    script.wait(1.0)
    assert script.last(PersonNeeded).reason == "you may not"
    script.wait(3600.0)
    assert script.count(RequestVm) == 1


def test_what_is_not_allowed_is_tried_again_while_something_else_is() -> None:
    script = rented(Script(), offer("a"), offer("b", "large"), joined=False)
    script.wait()
    fail(script, RefusalKind.NOT_ALLOWED, "you may not")
    asked_s = dict[str, list[float]]()
    while len(asked_s.get("small", ())) < 3:
        (*_, (_, _, instance_type)) = asked(script)
        asked_s.setdefault(instance_type, []).append(script.now)
        fail(script, RefusalKind.NO_CAPACITY if instance_type == "large" else RefusalKind.NOT_ALLOWED)
        before = len(asked(script))
        while len(asked(script)) == before:
            script.wait(1.0)
    assert script.count(PersonNeeded) == 0
    pauses = [later - earlier for earlier, later in pairwise(asked_s["small"])]
    assert min(pauses) >= script.timing.strikes[Kind.LIMITED].first_s
    assert max(pauses) <= script.timing.strikes[Kind.LIMITED].first_s + 60.0


def test_credentials_that_fail_are_tried_again_ever_later_and_nobody_is_asked() -> None:
    script = rented(Script(), offer("a"), offer("b", "large"), joined=False)
    asked_at: list[float] = []
    for _ in range(700):
        script.wait(5.0)
        if len(asked(script)) > len(asked_at):
            asked_at.append(script.now)
            fail(script, RefusalKind.CREDENTIALS, "the token has expired")
            script.wait(1.0)
            assert script.observations.why_no_vm == "the token has expired"
    assert script.count(PersonNeeded) == 0
    assert script.state.spot_absent_since is None, "whether there are any was not told"
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert len(pauses) > 6
    assert pauses == sorted(pauses)
    assert pauses[-1] <= script.timing.strikes[Kind.REFUSED].longest_s + 5.0
    while not script.state.live_vms:
        script.wait(5.0)
    succeed(script)
    assert not script.state.strikes.all(Kind.REFUSED)


def test_credentials_that_fail_say_nothing_of_another_cloud() -> None:
    there = offer("a").placement.model_copy(update={"provider": "azure", "instance_type": "Standard_S"})
    other = offer("a").model_copy(update={"placement": there})
    script = rented(
        Script(),
        offer("a"),
        offer("b"),
        other,
        joined=False,
        provider=["aws", "azure"],
        instance_type=["small", "Standard_S"],
    )
    script.wait()
    fail(script, RefusalKind.CREDENTIALS)
    attempt = script.last(RequestVm).attempt
    assert attempt is not None
    assert (attempt.number, attempt.placement.provider) == (2, "azure")


def test_on_demand_vms_stand_in_up_to_a_number_once_spot_was_absent_for_long() -> None:
    script = rented(
        Script(), offer(), offer(market=ON_DEMAND), joined=False, on_demand_nodes=1, on_demand_after="20m"
    )
    for _ in range(238):
        script.wait(5.0)
        if script.state.live_vms:
            fail(script)
    assert set(markets(script)) == {SPOT}
    for _ in range(100):
        if markets(script)[-1] is SPOT:
            fail(script)
            script.wait(5.0)
    succeed(script)
    vm = script.last(RequestVm).vm
    for _ in range(100):
        script.report(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()))
        script.wait(5.0)
        for other in script.state.live_vms:
            if other.status is VmStatus.REQUESTED:
                fail(script)
    assert script.state.vms[vm].live
    assert markets(script).count(ON_DEMAND) == 1


def test_a_vm_counts_until_it_is_gone() -> None:
    script = rented(Script(releasing=False), offer())
    script.wait()
    assert len(script.state.live_vms) == 3
    pass_time(script, script.timing.request_timeout_s + 60.0)
    assert len(script.state.leaving) == 2, "those that never joined"
    assert len(script.state.counted_vms) == 3
    requested, hourly = script.count(RequestVm), hourly_ceiling(script.state)
    assert hourly == 3.0
    for vm in list(script.state.leaving):
        script.event(VmTerminated(now=script.now, vm=vm))
    assert script.count(VmGone) == 2
    pass_time(script, 30.0)
    assert script.count(RequestVm) == requested + 1, "alone, as those before it did not join"
    join(script)
    pass_time(script, 30.0)
    assert script.count(RequestVm) == requested + 2


def test_a_refusal_that_comes_late_settles_what_was_given_up() -> None:
    script = rented(Script(releasing=False), offer(), joined=False)
    script.wait()
    pass_time(script, script.timing.request_timeout_s + 5.0, answers=False)
    assert len(script.state.leaving) == 1
    fail(script)
    assert not script.state.counted_vms
    assert spent_by(script.state, script.now).at_most == 0.0


def test_a_cloud_that_lost_a_vm_is_told_to_release_it_all_the_same() -> None:
    script = rented(Script(), offer())
    vm = script.state.live_vms[0].vm
    script.event(VmTerminated(now=script.now, vm=vm))
    assert script.last(ReleaseVm).vm == vm


def test_max_hourly_cost_holds_at_ceilings() -> None:
    script = rented(Script(releasing=False), offer(), max_hourly_cost=2.5)
    script.wait()
    assert hourly_ceiling(script.state) == 2.0
    assert "max_hourly_cost" in script.observations.why_no_vm
    script.event(OffersSeen(now=script.now, offers=(offer(ceiling=0.5),)))
    script.wait()
    assert hourly_ceiling(script.state) == 2.5


def test_what_has_no_price_is_not_asked_for_unless_the_user_states_one() -> None:
    script = rented(Script(), offer(ceiling=None), joined=False)
    script.wait()
    assert script.count(RequestVm) == 0
    assert "resources.hourly_price" in script.observations.why_no_vm
    stated = rented(Script(), offer(ceiling=None), joined=False, hourly_price=0.7)
    stated.wait()
    assert stated.last(AttemptMade).price.ceiling == 0.7


def test_a_job_saves_and_stops_while_its_budget_still_pays_for_the_end() -> None:
    script = rented(Script(), offer(ceiling=1.0), max_nodes=1, budget=1.0)
    for _ in range(1000):
        if script.count(StopOrdered):
            break
        pass_time(script, 5.0)
        assert spent_by(script.state, script.now).at_most < 1.0
    timing, left = script.timing, 1.0 - spent_by(script.state, script.now).at_most
    assert left >= (timing.end_reserve_s + timing.stop_timeout_s - 5.0) / 3600.0
    pass_time(script, 1000.0)
    ended = script.last(JobEnded)
    assert ended.status == "stopped"
    assert ended.reason.startswith("its budget of 1 USD is spent")
    assert spent_by(script.state, script.now).at_most < 1.0


@pytest.mark.parametrize(("budget", "most_s"), [(2.0, 3600.0), (12.0, 3600.0)])
def test_while_a_release_is_refused_the_job_keeps_as_much_more_for_the_others(
    budget: float, most_s: float
) -> None:
    script = rented(Script(releasing=False), offer(ceiling=1.0), max_nodes=2, budget=budget)
    vm = next(iter(script.state.live_vms)).vm
    script.event(VmEndingSeen(now=script.now, vm=vm))
    began_at = script.now
    for _ in range(2):  # it is refused again and again
        script.event(ReleaseRefused(now=script.now, vm=vm, error="AccessDenied: no"))
    assert script.count(VmNotReleased) == 1
    told = script.last(VmNotReleased)
    assert (told.vm, told.message, told.hourly_at_most) == (vm, "AccessDenied: no", 1.0)
    while not script.count(StopOrdered):
        pass_time(script, 5.0)
    left_s = (budget - spent_by(script.state, script.now).at_most) / hourly_ceiling(script.state) * 3600.0
    timing, refused_s = script.timing, script.now - began_at
    kept_s = timing.given_up_after_s + timing.stop_timeout_s + min(refused_s, most_s) - 5.0
    assert left_s >= kept_s
    assert left_s <= kept_s + 20.0
    assert refused_s > timing.release_s


def test_a_refused_release_of_what_costs_nothing_is_not_told() -> None:
    script = Script(releasing=False)
    (worker, _) = script.start(2)
    vm = worker.rpartition(".")[0]
    script.event(VmEndingSeen(now=script.now, vm=vm))
    script.event(ReleaseRefused(now=script.now, vm=vm, error="it hangs"))
    assert not script.count(VmNotReleased)


def test_a_clock_that_is_set_back_makes_nothing_cheaper() -> None:
    script = rented(Script(), offer(ceiling=1.0), max_nodes=1, budget=4.0)
    pass_time(script, 3600.0)
    spent, hour = spent_by(script.state, script.now).at_most, 1.0
    assert spent > 0.99 * hour
    script.state, script.observations = fold(script.facts), Observations()
    script.now -= 100_000.0
    script.event(ManagerStarted(now=script.now))
    again = spent_by(script.state, script.now).at_most
    assert again >= spent
    pass_time(script, 1800.0)
    assert spent_by(script.state, script.now).at_most >= again + 0.49 * hour


def test_a_note_in_a_vms_first_minute_makes_nothing_dearer() -> None:
    script = rented(Script(), offer(ceiling=1.0), max_nodes=1)
    (vm,), began_at = script.state.live_vms, script.now
    early = noted(vm, began_at + 20.0, 0.0)
    for seconds in (20.0, 45.0, 60.0, 100.0, 3600.0):
        assert bill(early, began_at + seconds).at_most == pytest.approx(
            bill(vm, began_at + seconds).at_most
        ), seconds
    assert bill(early, began_at + 30.0).at_most == pytest.approx(1.0 / 60.0), "a minute is billed at least"


def test_while_vms_are_paid_for_the_journal_tells_every_few_minutes_that_time_passes() -> None:
    script = rented(Script(releasing=False), offer(ceiling=1.0), max_nodes=1)
    script.event(StopRequested(now=script.now))
    pass_time(script, 5000.0)
    assert script.state.ended is not None
    assert len(script.state.leaving) == 1, "its release is refused"
    last_s = [later.at - earlier.at for earlier, later in pairwise(script.facts)][-10:]
    assert set(last_s) == {script.timing.note_every_s}


def test_a_budget_that_pays_for_no_vm_ends_the_job() -> None:
    script = rented(Script(), offer(ceiling=10.0), joined=False, budget=1.0)
    script.wait()
    script.wait()
    assert script.count(RequestVm) == 0
    assert "budget of 1 USD pays for no more VMs" in script.last(JobEnded).reason


def test_a_budget_that_pays_for_fewer_vms_than_are_missing_has_those_rented() -> None:
    script = rented(Script(), offer(ceiling=1.0), budget=1.0)
    script.event(VmTerminated(now=script.now, vm=script.last(RequestVm).vm))
    script.wait(5.0)
    assert len(script.state.live_vms) == 1, "for 1935 s of one VM there is enough, of two there is not"
    assert script.count(StopOrdered) == 0
    join(script)
    script.wait(5.0)
    assert script.state.active, "it trains on what it has"


def test_a_job_whose_budget_pays_for_fewer_than_min_nodes_does_not_wait_for_its_end_beside_idle_vms() -> None:
    script = rented(Script(), offer(ceiling=1.0), min_nodes=2, budget=1.2)
    script.wait(5.0)
    join(script)
    pass_time(script, 500.0)
    assert len(script.state.live_vms) == 2
    script.event(VmTerminated(now=script.now, vm=script.last(RequestVm).vm))
    script.wait(5.0)
    script.wait(5.0)
    assert "budget of 1.2 USD pays for no more VMs" in script.last(JobEnded).reason
    assert spent_by(script.state, script.now).at_most < 0.6


def test_a_clouds_first_vm_is_asked_for_alone_until_it_joins() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    script.wait(5.0)
    assert script.count(RequestVm) == 1
    succeed(script)
    script.report(
        WorkerReport(
            worker=f"{script.last(RequestVm).vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()
        )
    )
    script.wait()
    assert script.count(RequestVm) == 3


def test_after_three_vms_that_never_join_a_person_is_asked() -> None:
    script = rented(Script(), offer(), joined=False)
    pass_time(script, 3.0 * script.timing.request_timeout_s + 1300.0)
    assert script.count(RequestVm) == 3
    assert script.last(PersonNeeded).reason == "3 VMs in a row were rented and did not join"


def until_none_is_asked_for(script: Script) -> Script:
    """A VM lives, and those beside it do not join: first two, then one at a time."""
    pass_time(script, 5.0)
    assert script.count(RequestVm) == 3
    pass_time(script, 2.5 * script.timing.request_timeout_s)
    assert script.state.never_joined == 2
    assert len(script.state.live_vms) == 2, "one at a time"
    pass_time(script, 2.0 * script.timing.request_timeout_s)
    assert script.state.never_joined == 3
    return script


def test_after_three_in_a_row_that_never_join_no_more_are_asked_for_and_what_lives_trains_on() -> None:
    script = until_none_is_asked_for(rented(Script(), offer(), offer(market=ON_DEMAND)))
    assert script.count(RequestVm) == 5
    pass_time(script, 1000.0)
    assert script.count(RequestVm) == 5
    assert script.observations.why_no_vm == "3 VMs in a row were rented and did not join"
    assert not script.count(PersonNeeded)
    (vm,) = script.state.live_vms
    script.workers.clear()
    script.event(VmTerminated(now=script.now, vm=vm.vm))
    script.wait()
    assert script.last(PersonNeeded).reason == "3 VMs in a row were rented and did not join"


def test_a_vm_that_joins_ends_a_row_of_those_that_did_not() -> None:
    script = rented(Script(), offer())
    pass_time(script, 2.5 * script.timing.request_timeout_s)
    assert script.state.never_joined == 2
    join(script)
    assert script.state.never_joined == 0
    pass_time(script, 5.0)
    assert len(script.state.live_vms) == 3


def test_too_few_vms_that_live_do_not_train_and_a_person_is_asked() -> None:
    script = rented(Script(), offer(), min_nodes=2)
    while script.state.never_joined < 3:
        pass_time(script, 5.0)
    pass_time(script, script.timing.console_s + 10.0)
    assert script.last(PersonNeeded).reason == "3 VMs in a row were rented and did not join"


def test_whom_a_person_had_go_on_the_first_is_tried_alone_again() -> None:
    script = until_none_is_asked_for(rented(Script(), offer()))
    (vm,) = script.state.live_vms
    script.workers.clear()
    script.event(VmTerminated(now=script.now, vm=vm.vm))
    script.wait()
    assert script.count(PersonNeeded) == 1
    requested = script.count(RequestVm)
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    pass_time(script, 5.0)
    assert script.count(RequestVm) == requested + 1
    assert script.observations.why_no_vm == "the first VM from aws is tried alone until it joins"


def test_vms_that_are_to_report_elsewhere_are_counted_apart_and_the_first_is_tried_alone() -> None:
    script = until_none_is_asked_for(rented(Script(), offer()))
    requested = script.count(RequestVm)
    script.event(OffersSeen(now=script.now, offers=(offer(),), manager_url="https://elsewhere"))
    pass_time(script, 5.0)
    assert script.count(RequestVm) == requested + 1
    assert script.last(AttemptMade).manager_url == "https://elsewhere"
    join(script)
    pass_time(script, 5.0)
    assert script.count(RequestVm) == requested + 2


def test_where_one_clouds_vms_never_join_another_cloud_is_asked() -> None:
    kinds = ["small", "large", "Standard_D2s_v5"]
    place = Placement(provider="azure", market=SPOT, region="r", zone="1", instance_type="Standard_D2s_v5")
    other = Offer(placement=place, price=Price(hourly=1.0, ceiling=1.0, at=0.0, source="a test"))
    script = rented(Script(), offer(), other, joined=False, provider=["aws", "azure"], instance_type=kinds)
    while script.state.never_joined < 3:
        pass_time(script, 5.0)
    pass_time(script, 60.0)
    assert script.last(AttemptMade).attempt.placement.provider == "azure"
    assert not script.count(PersonNeeded)


def test_attempts_of_older_journals_are_read() -> None:
    attempt = {"vm": "v", "placement": {"provider": "aws"}}
    price = {"hourly": 1.0, "ceiling": 1.0, "at": 0.0, "source": "a test"}
    old = {"fact": "attempt_made", "at": 1.0, "vm": "v", "attempt": attempt, "price": price}
    made = AttemptMade.model_validate(old)
    assert (made.manager_url, made.attempt.num_gpus) == ("", 0)


def restart(script: Script, step_s: float = 0.0) -> None:
    """Another manager takes over, whose clock is so many seconds ahead of the last one's."""
    script.state, script.observations = fold(script.facts), Observations()
    script.now += step_s
    script.event(ManagerStarted(now=script.now))


def test_a_vm_that_never_joins_gets_no_more_time_by_restarts_of_the_manager() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm, asked_at = script.last(RequestVm).vm, script.now
    succeed(script)
    for _ in range(2):
        pass_time(script, 0.45 * script.timing.request_timeout_s)
        restart(script)
    pass_time(script, script.timing.join_grace_s)
    assert script.state.vms[vm].live, "a manager waits for a while for those that could not join without one"
    pass_time(script, 5.0)
    assert script.state.vms[vm].reason is EndReason.REQUEST_FAILED
    assert script.now - asked_at > script.timing.request_timeout_s


def test_a_vm_has_its_time_to_join_from_when_its_cloud_has_it() -> None:
    script = rented(Script(), offer(), offer("b"), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    pass_time(script, 1000.0, answers=False)
    fail(script)
    assert script.last(RequestVm).key == f"{vm}/request/2"
    pass_time(script, 1000.0, answers=False)
    assert script.state.vms[vm].live, "its newest attempt counts"
    succeed(script)
    pass_time(script, 1600.0)
    assert script.state.vms[vm].live, "its creation counts"
    pass_time(script, 210.0)
    assert script.state.vms[vm].reason is EndReason.REQUEST_FAILED


def test_a_vm_that_joins_soon_after_a_long_absence_of_the_manager_is_taken_in() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    restart(script, 4.0 * script.timing.request_timeout_s)
    pass_time(script, 200.0)
    script.report(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()))
    pass_time(script, script.timing.join_grace_s)
    assert script.state.vms[vm].joined


def test_a_clock_that_is_set_back_gives_a_vm_that_never_joins_no_more_time() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    pass_time(script, 60.0)
    restart(script, -4000.0)
    pass_time(script, script.timing.join_grace_s + 5.0)
    assert script.state.vms[vm].reason is EndReason.REQUEST_FAILED


def unjoined(script: Script) -> Script:
    """Three VMs did not join; what the last one wrote is not known yet."""
    rented(script, offer(), joined=False)
    while script.state.never_joined < 3:
        pass_time(script, 5.0)
    return script


def test_what_the_last_vm_wrote_that_did_not_join_is_in_the_question() -> None:
    script = unjoined(Script())
    released = [command for command in script.commands if isinstance(command, ReleaseVm)]
    assert [command.console for command in released] == [False, False, True]
    pass_time(script, 10.0)
    assert not script.count(PersonNeeded)
    assert not script.state.live_vms
    script.event(ConsoleRead(now=script.now, vm=released[-1].vm, text="no route to host"))
    asked = script.last(PersonNeeded)
    assert (asked.reason, asked.console) == (
        "3 VMs in a row were rented and did not join",
        "no route to host",
    )
    assert script.state.waiting is not None
    assert script.state.waiting.console == "no route to host"
    script.event(ConsoleRead(now=script.now, vm=released[-1].vm, text="said twice"))
    assert script.count(PersonNeeded) == 1


def test_a_question_does_not_wait_for_ever_for_what_a_vm_wrote() -> None:
    script = unjoined(Script())
    pass_time(script, script.timing.console_s + 10.0)
    assert script.last(PersonNeeded).console == ""


def test_a_manager_that_died_before_it_asked_asks_all_the_same() -> None:
    script = unjoined(Script())
    restart(script, -4000.0)
    script.event(OffersSeen(now=script.now, offers=(offer(),)))
    pass_time(script, script.timing.console_s + 10.0)
    assert script.count(PersonNeeded) == 1
    assert script.count(RequestVm) == 3


def test_a_job_that_was_stopped_meanwhile_asks_nothing() -> None:
    script = unjoined(Script())
    script.event(StopRequested(now=script.now))
    script.event(ConsoleRead(now=script.now, vm=script.last(ReleaseVm).vm, text="no route to host"))
    assert not script.count(PersonNeeded)


def test_questions_and_releases_of_older_journals_are_read() -> None:
    asked = {"fact": "person_needed", "at": 1.0, "reason": "why", "offers": ["again"], "vms_until": 2.0}
    assert PersonNeeded.model_validate(asked).console == ""
    assert not ReleaseVm.model_validate({"command": "release_vm", "key": "v/release", "vm": "v"}).console


def test_a_vm_that_had_joined_and_whose_creation_is_answered_late_by_its_end_was_taken() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    script.report(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling()))
    script.workers.clear()
    fail(script, RefusalKind.ENDED, "it has ended")
    ended = script.last(VmEnded)
    assert (ended.vm, ended.reason, ended.detail) == (vm, EndReason.PREEMPTED, "it has ended")
    assert (script.state.never_joined, script.state.strikes.count(Kind.REQUEST)) == (0, 0)
    assert not script.count(AttemptRefused)
    script.wait()
    assert script.count(RequestVm) == 1 + 3, "the place is not avoided"


def test_a_vm_that_its_cloud_is_ending_has_ended_and_counts_until_it_is_gone() -> None:
    script = rented(Script(releasing=False), offer(), max_nodes=1)
    (vm,) = (it.vm for it in script.state.live_vms)
    script.event(VmEndingSeen(now=script.now, vm=vm))
    ended = script.last(VmEnded)
    assert (ended.reason, ended.detail, ended.gone) == (EndReason.PREEMPTED, "its cloud is ending it", False)
    assert script.last(ReleaseVm).vm == vm
    script.wait()
    assert script.count(RequestVm) == 1
    script.event(VmTerminated(now=script.now, vm=vm))
    script.wait()
    assert script.count(RequestVm) == 2


def test_a_vm_that_has_not_joined_has_ended_only_once_it_is_gone() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    script.event(VmEndingSeen(now=script.now, vm=vm))
    assert script.state.vms[vm].live
    script.event(VmTerminated(now=script.now, vm=vm))
    assert script.state.never_joined == 1


TAKEN = "Server.SpotInstanceTermination: Instance terminated because capacity is needed"


def test_vms_that_are_taken_back_before_they_join_say_nothing_against_their_image() -> None:
    """Found: after three the job waited for a person, long after the squeeze had ended."""
    script = rented(Script(), offer("a"), offer("b"), joined=False, max_nodes=1)
    began: list[float] = []
    for _ in range(30):
        while not (live := script.state.live_vms):
            script.wait(1.0)
        began.append(script.now)
        pass_time(script, 60.0)
        script.event(VmTerminated(now=script.now, vm=live[0].vm, taken_back=TAKEN))
        ended = script.last(VmEnded)
        assert (ended.reason, ended.detail, ended.gone) == (EndReason.PREEMPTED, TAKEN, True)
    assert script.state.never_joined == 0
    assert not script.count(PersonNeeded)
    assert [zone for _, zone, _ in asked(script)][:6] == ["a", "b", "a", "b", "a", "b"]
    pauses = [later - earlier - 60.0 for earlier, later in pairwise(began)]
    assert max(pauses[:4]) <= 5.0
    assert 100.0 < max(pauses[-2:]) <= 300.0, "they grow"
    pass_time(script, 300.0)
    join(script)
    place = script.last(RequestVm).attempt
    assert place is not None
    assert not script.state.strikes.count(Kind.REFUSED, place_of(place.placement, RefusalKind.ENDED))


@pytest.mark.parametrize(("market", "others_joined"), [(SPOT, True), (SPOT, False), (ON_DEMAND, True)])
def test_a_spot_vm_that_its_cloud_no_longer_knows_was_taken_where_others_have_joined(
    market: Market, others_joined: bool
) -> None:
    """Azure says of no VM why it is gone."""
    script = rented(Script(), offer(market=market), joined=others_joined, use_spot=market is SPOT)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    script.event(VmTerminated(now=script.now, vm=vm))
    is_taken = market is SPOT and others_joined
    assert script.state.never_joined == (0 if is_taken else 1)
    assert script.last(VmEnded).reason is (EndReason.PREEMPTED if is_taken else EndReason.REQUEST_FAILED)


def test_a_launch_that_ends_at_once_is_told_in_the_clouds_words() -> None:
    script = rented(Script(), offer("a"), offer("b"), joined=False)
    script.wait()
    fail(script, RefusalKind.ENDED, "i-1 has ended: Client.VolumeLimitExceeded: Volume limit exceeded")
    assert script.last(VmEnded).detail == "i-1 has ended: Client.VolumeLimitExceeded: Volume limit exceeded"
    script.wait()
    assert [zone for _, zone, _ in asked(script)] == ["a", "b"]
    assert (script.state.never_joined, script.state.strikes.count(Kind.REQUEST)) == (0, 0)


def test_a_vm_of_which_nothing_was_ever_seen_is_asked_for_elsewhere() -> None:
    """Found: three times thirty minutes of one zone, and then "3 VMs were rented and did not join"."""
    script = rented(Script(), offer("a"), offer("b"), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    script.event(RequestTroubled(now=script.now, vm=vm, error="InternalServerError: try later"))
    limit_s = script.timing.request_timeout_s
    pass_time(script, limit_s + 5.0, answers=False)
    why = f"no VM was seen in {limit_s:g} s: InternalServerError: try later"
    assert (script.last(VmEnded).reason, script.last(VmEnded).detail) == (EndReason.REQUEST_FAILED, why)
    assert script.count(ReleaseVm) == 1, "there may be one"
    script.wait(1.0)
    assert [zone for _, zone, _ in asked(script)] == ["a", "b"]
    pass_time(script, 6.0 * limit_s, answers=False)
    assert script.state.never_joined == 0
    assert not script.count(PersonNeeded)


def test_a_vm_that_is_gone_in_the_instant_of_its_first_report_had_joined() -> None:
    script = rented(Script(), offer(), joined=False)
    script.wait()
    vm = script.last(RequestVm).vm
    succeed(script)
    script.workers = {
        f"{vm}.0": WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling())
    }
    report = ReportReceived(now=script.now, report=script._report(vm))
    script.event(Batch(now=script.now, events=(report, VmTerminated(now=script.now, vm=vm))))
    assert script.last(VmEnded).reason is EndReason.PREEMPTED
    assert script.state.never_joined == 0


@pytest.mark.parametrize("kind", [kind for kind in RefusalKind if kind is not RefusalKind.NO_ANSWER])
def test_a_manager_that_died_goes_on_with_what_the_journal_has(kind: RefusalKind) -> None:
    script = rented(Script(), offer("a"), offer("b"), joined=False)
    script.wait()
    script.state, script.observations = fold(script.facts), Observations()
    script.event(ManagerStarted(now=script.now))
    fail(script, kind)
    fail(script, kind)  # the command was run twice: its answer comes twice
    assert script.count(AttemptRefused) == 1
    assert script.count(RequestVm) == 1, "what there is to have is not known to this manager yet"
