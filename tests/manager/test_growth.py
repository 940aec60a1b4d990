"""More VMs of a cloud are asked for where the planner says that they pay for the change of plan."""

from __future__ import annotations

import random

import pytest
from core_script import MEMORY
from makara.manager.core import Observations, Timing, fold, worth
from makara.manager.core.commands import ComputeGrowth, RequestVm, WorkerSlot
from makara.manager.core.context import Context
from makara.manager.core.events import (
    AttemptFailed,
    JobCommandFailed,
    ManagerStarted,
    OffersSeen,
    Tick,
)
from makara.manager.core.facts import (
    JobEnded,
    PlanImpossible,
    RefusalKind,
    VmNoticed,
    WorkerPaced,
)
from makara.manager.core.vms import VmStatus
from makara.manager.service.journal import StoredFact
from makara.manager.service.planning.growth import compute_growth
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.manager.spec.job_spec import Resilience
from makara.morphing import Infeasible, Request, Slot, choose
from makara.protocol.gpus import usable_bytes
from makara.simulator import Calibration
from rented_script import OFFER, PLACE, RentedScript, StepTimes, all_alike, answer, running, shared


def pairs(num_vms: int) -> float:
    """Seconds of a step that only every second VM makes shorter."""
    return 60.0 / (num_vms // 2)


def from_two(num_vms: int) -> float | None:
    """Seconds of a step of a model that needs two VMs, and has no use for more."""
    return 60.0 if num_vms >= 2 else None


def coming(script: RentedScript) -> int:
    return sum(vm.status is VmStatus.REQUESTED for vm in script.state.live_vms)


def context(script: RentedScript) -> Context:
    return Context(script.state, script.observations, Tick(now=script.now), script.timing)


def ticks(script: RentedScript, num: int = 8) -> None:
    for _ in range(num):
        script.wait(0.25)


def test_vms_that_pay_are_asked_for_one_question_after_the_other() -> None:
    script = running(2, max_nodes=5, step_s=shared)
    ticks(script)
    assert coming(script) == 3
    questions = [it for it in script.commands if isinstance(it, ComputeGrowth)]
    assert [(len(it.workers), it.most) for it in questions] == [(2, 3), (3, 2), (4, 1)]
    assert script.observations.why_no_vm == ""


def test_the_fewest_that_pay_are_asked_for_together() -> None:
    script = running(2, max_nodes=5, step_s=pairs)
    script.wait(0.25)
    assert coming(script) == 0, "the planner is asked first"
    script.wait(0.25)
    assert coming(script) == 2
    ticks(script)
    assert coming(script) == 2
    assert script.observations.why_no_vm == "no plan is faster with 1 more"


def test_vms_that_bring_little_are_not_asked_for_and_the_user_is_told() -> None:
    def a_little(num_vms: int) -> float:
        return 60.0 * 0.996**num_vms

    script = running(2, max_nodes=4, step_s=a_little)
    script.pass_time(600.0)
    assert coming(script) == 0
    told = "2 more would make a step 0.8 % shorter, which does not pay for the change"
    job = Job("j", [StoredFact(n, fact) for n, fact in enumerate(script.facts, 1)], [])
    job.observations = script.observations
    assert job_view(job, {}, script.now).notes == [
        f"no more VMs are requested for now: {told}",
        "silent corruption is found by comparing hosts of a section, and each section has one host",
    ]
    assert script.count(ComputeGrowth) == 1, "nothing changed since"


@pytest.mark.parametrize(("step_s", "num_asked"), [(shared, 1), (all_alike, 0)])
def test_a_lost_vm_is_replaced_if_that_pays(step_s: StepTimes, num_asked: int) -> None:
    script = running(3, step_s=step_s)
    script.lose(script.state.live_vms[2].vm)
    ticks(script)
    assert coming(script) == num_asked


def test_a_vm_under_notice_is_replaced_before_it_is_gone() -> None:
    script = running(3, max_nodes=4, step_s=lambda num_vms: 60.0 / min(num_vms, 3))
    ticks(script)
    assert coming(script) == 0
    vm = script.state.live_vms[0].vm
    script.extra[vm] = {"notice_deadline_s": 120.0}
    script.report()
    assert script.count(VmNoticed) == 1
    ticks(script)
    assert coming(script) == 1


def test_nothing_is_asked_before_a_first_plan_and_for_min_nodes() -> None:
    script = running(3, min_nodes=3)
    assert script.count(ComputeGrowth) == 0
    script.lose(script.state.live_vms[2].vm)
    script.wait(0.25)
    assert coming(script) == 1
    assert script.count(ComputeGrowth) == 0


def test_what_no_plan_does_without_is_asked_for_and_no_more() -> None:
    script = running(3, step_s=from_two)
    for vm in script.state.live_vms[1:]:
        script.lose(vm.vm)
    ticks(script)
    assert coming(script) == 1


def test_where_the_planner_finds_no_plan_after_all_as_many_are_asked_for_as_may_be_had() -> None:
    script = running(3, max_nodes=4)
    script.lose(script.state.live_vms[1].vm)
    ticks(script)
    assert coming(script) == 0
    script.now += script.timing.replan_s
    script.report()
    script.wait()
    script.answer_impossible("its workers cannot be reached")
    assert script.count(PlanImpossible) == 1
    ticks(script)
    assert coming(script) == 2


def test_where_no_number_of_vms_makes_a_plan_none_is_asked_for() -> None:
    script = running(3, max_nodes=4, step_s=lambda num_vms: None)
    script.lose(script.state.live_vms[1].vm)
    ticks(script)
    assert coming(script) == 0
    assert script.observations.why_no_vm == "there is no plan, not even with 2 more of them"


def test_where_more_vms_are_to_be_had_elsewhere_those_that_make_no_plan_are_asked_for() -> None:
    script = running(3, max_nodes=4, step_s=lambda num_vms: None, max_hourly_cost=3.0)
    script.lose(script.state.live_vms[1].vm)
    ticks(script)
    assert script.last(ComputeGrowth).most == 1
    assert coming(script) == 1


def test_steps_that_were_lost_count_among_those_to_come() -> None:
    """Found: a job that had gone back to a checkpoint near its end rented no more VMs."""
    script = running(2, max_nodes=3, step_s=None, training={"steps": 100}, predicted_s=10.0)
    assert worth.rest_s(context(script)) == 1000.0
    script.report(*(it.model_copy(update={"step": 95}) for it in script.workers.values()))
    assert worth.rest_s(context(script)) == 50.0
    for vm in script.state.live_vms:
        script.lose(vm.vm)
    assert worth.rest_s(context(script)) == 1000.0


def test_while_the_planner_thinks_nothing_is_asked_for_and_it_is_not_asked_again() -> None:
    script = running(2, max_nodes=4, step_s=None)
    script.pass_time(script.timing.planning_timeout_s - 20.0)
    script.lose(script.state.live_vms[1].vm)
    script.wait(1.0)
    assert (coming(script), script.count(ComputeGrowth)) == (0, 1)
    late = answer(script.last(ComputeGrowth), shared, script.now)
    script.event(late)
    script.wait(1.0)
    assert (coming(script), script.count(ComputeGrowth)) == (0, 2), "what it was about is no more"


@pytest.mark.parametrize("fails", [True, False])
def test_where_the_planner_fails_as_many_are_asked_for_as_may_be_had(fails: bool) -> None:
    script = running(2, max_nodes=4, step_s=None)
    script.wait(0.25)
    if fails:
        key, command = script.last(ComputeGrowth).key, "compute_growth"
        script.event(JobCommandFailed(now=script.now, command=command, error="a fault", key=key))
    else:
        script.pass_time(script.timing.planning_timeout_s + 5.0)
    ticks(script, 2)
    assert coming(script) == 2
    assert script.count(JobEnded) == 0


def test_an_earlier_managers_question_that_failed_says_nothing_of_this_ones() -> None:
    script = running(2, max_nodes=4, step_s=None)
    script.wait(0.25)
    key = script.last(ComputeGrowth).key
    script.state, script.observations = fold(script.facts), Observations()
    script.event(ManagerStarted(now=script.now))
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    script.report()
    script.wait(1.0)
    assert script.last(ComputeGrowth).key != key
    script.event(JobCommandFailed(now=script.now, command="compute_growth", error="a fault", key=key))
    script.wait(0.25)
    assert coming(script) == 0


def test_a_market_without_capacity_leads_to_no_more_questions() -> None:
    script = running(2, max_nodes=4, step_s=shared)
    for _ in range(720):
        script.wait(5.0)
        script.report()
        for vm in script.state.live_vms:
            if vm.status is VmStatus.REQUESTED and vm.attempt is not None:
                kind, number = RefusalKind.NO_CAPACITY, vm.attempt.number
                script.event(AttemptFailed(now=script.now, vm=vm.vm, number=number, kind=kind, error="none"))
    assert script.count(RequestVm) > 10
    assert script.count(ComputeGrowth) <= 3


def test_a_change_that_costs_more_must_save_more() -> None:
    def formed_in(seconds: float) -> RentedScript:
        script = running(2, max_nodes=3, step_s=lambda num_vms: 60.0 - num_vms)
        script.now += 5.0
        script.event(OffersSeen(now=script.now, offers=()))
        script.report()
        script.lose(script.state.live_vms[1].vm)
        script.wait(5.0)
        script.answer(1, 1)
        script.prepare()
        script.open()
        script.now += seconds
        script.form(load_s=seconds)
        script.event(OffersSeen(now=script.now, offers=(OFFER,)))
        ticks(script)
        return script

    assert coming(formed_in(5.0)) == 2
    assert coming(formed_in(100.0)) == 0, "3 % of an hour and a half is less than 200 s"


def test_where_vms_are_lost_often_more_must_be_saved() -> None:
    script = running(4, step_s=lambda num_vms: 60.0 * 0.985**num_vms, timing=Timing())
    replaced: list[int] = []
    for _ in range(7):
        script.lose(script.state.live_vms[-1].vm)
        script.pass_time(100.0)
        replaced.append(coming(script))
        script.join()
    assert script.state.losses.count == 7
    assert replaced[:2] == [1, 1]
    assert replaced[2:4] == [0, 2], "then two together pay, where one does not"


def test_a_job_that_ends_soon_rents_no_more() -> None:
    script = running(2, max_nodes=3, step_s=shared, training={"steps": 10}, predicted_s=1.0)
    ticks(script)
    assert coming(script) == 0
    assert (
        script.observations.why_no_vm
        == "1 more would make a step 33.3 % shorter, which does not pay for the change"
    )


def test_money_bounds_how_many_are_thought_of() -> None:
    script = running(2, max_nodes=8, step_s=pairs, max_hourly_cost=3.0)
    ticks(script)
    assert script.last(ComputeGrowth).most == 1
    assert coming(script) == 0


def test_vms_that_nobody_bills_are_asked_for_without_a_question() -> None:
    script = running(2, max_nodes=4, provider="local")
    script.wait(0.25)
    assert (coming(script), script.count(ComputeGrowth)) == (2, 0)


def test_a_vm_more_is_taken_to_be_as_others_of_its_type_else_as_the_usual_one() -> None:
    script = running(3, max_nodes=4, step_s=None)
    worker = f"{script.state.live_vms[0].vm}.0"
    script.timing = Timing()
    for name in (worker, f"{script.state.live_vms[1].vm}.0"):
        script.facts.append(WorkerPaced(at=script.now, worker=name, incarnation=1, slowdown=1.5))
    script.state = fold(script.facts)
    script.wait(0.25)
    asked = script.last(ComputeGrowth)
    assert sorted(slot.slowdown for slot in asked.workers) == [1.0, 1.5, 1.5]
    assert [(slot.slowdown, slot.memory_bytes) for slot in asked.more] == [(1.5, MEMORY)]
    other = running(3, max_nodes=4, step_s=None)
    place = PLACE.model_copy(update={"instance_type": "large"})
    offer = OFFER.model_copy(update={"placement": place, "memory_bytes": 7 << 30})
    other.event(OffersSeen(now=other.now, offers=(offer,)))
    other.wait(0.25)
    assert [(slot.slowdown, slot.memory_bytes) for slot in other.last(ComputeGrowth).more] == [(1.0, 7 << 30)]


def test_a_gpu_of_an_offer_counts_with_what_can_be_used_of_it() -> None:
    script = running(3, max_nodes=4, step_s=None)
    place = PLACE.model_copy(update={"instance_type": "gpu"})
    gpu = {"placement": place, "num_gpus": 1, "gpu_memory_bytes": 16 << 30}
    script.event(OffersSeen(now=script.now, offers=(OFFER.model_copy(update=gpu),)))
    script.wait(0.25)
    [slot] = script.last(ComputeGrowth).more
    assert slot.memory_bytes == usable_bytes(16 << 30) == pytest.approx(0.84 * (16 << 30), rel=0.01)


# ---- the planner's part ------------------------------------------------------------------------------------


def question(num_vms: int, most: int, least_gain: float, memory_bytes: int = MEMORY) -> ComputeGrowth:
    def slot(vm: str) -> WorkerSlot:
        return WorkerSlot(worker=f"{vm}.0", vm=vm, memory_bytes=memory_bytes)

    workers = tuple(slot(f"v{n}") for n in range(num_vms))
    return ComputeGrowth(key="k", workers=workers, more=(slot("more"),), most=most, least_gain=least_gain)


def step_s(script: RentedScript, num_vms: int) -> float | None:
    slots = [Slot(f"w{n}", f"w{n}", MEMORY) for n in range(num_vms)]
    assert script.state.calibration is not None
    request = Request(
        calibration=Calibration.from_json(script.state.calibration),
        num_sections=2,
        num_micro_batches=4,
        workers=slots,
        generation=0,
    )
    found = choose(request)
    return None if isinstance(found, Infeasible) else found.predicted_s


def test_the_planner_finds_the_fewest_that_save_enough() -> None:
    script = running(2)
    rng = random.Random(7)
    for _ in range(40):
        num_vms, most, least = rng.randint(0, 5), rng.randint(1, 9), rng.choice((0.01, 0.1, 0.3, 0.6, 1.0))
        found = compute_growth(script.state, question(num_vms, most, least), lambda: 1.0)
        expected = answer(question(num_vms, most, least), lambda n: step_s(script, n) if n else None, 1.0)
        assert (found.num_more, found.step_s, found.grown_s) == (
            expected.num_more,
            expected.step_s,
            expected.grown_s,
        )


def test_where_memory_allows_no_copies_plans_without_them_are_weighed() -> None:
    """Found: with more copies asked for than memory allows, VMs were rented again and again."""
    script = running(2)
    assert script.state.spec is not None
    resilience = Resilience(tolerated_failures=5)
    spec = script.state.spec.model_copy(update={"resilience": resilience})
    tolerating = script.state.changed(spec=spec)
    for num_vms, most in ((1, 2), (2, 3), (3, 1)):
        asked = question(num_vms, most, 0.01)
        found = compute_growth(tolerating, asked, lambda: 1.0)
        assert found.step_s is not None
        assert found.step_s == compute_growth(script.state, asked, lambda: 1.0).step_s
