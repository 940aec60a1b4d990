"""Where nothing has to change, the plan that runs goes on unless another is worth the change to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_script import Script
from makara.manager.core import Timing, worth
from makara.manager.core.commands import ComputePlan
from makara.manager.core.context import Context
from makara.manager.core.events import PlanComputed, Tick
from makara.manager.core.facts import GenerationPlanned, PlanKept
from makara.manager.core.fold import fold
from makara.manager.service.planning import compute_plan
from makara.protocol.messages import Phase, WorkerReport
from test_core_drift import steps
from test_rerouting import FIXED, rerouted_job


def grown(tolerated_failures: int = 0, **training: int) -> tuple[Script, list[str]]:
    """A job of 2x1 on two VMs of four, whose other two have joined; the planner is asked."""
    script = Script()
    script.submit(
        resources={"max_nodes": 4},
        training={"global_batch_size": 8, "steps": 100_000, **training},
        resilience={"tolerated_failures": tolerated_failures},
    )
    script.wait()
    vms = list(script.state.vms)
    workers = [f"{vm}.0" for vm in vms]
    first = [WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers[:2]]
    script.report(*first)
    _profiled(script, workers[:2])
    script.wait(5.0)
    script.answer(2, 1, predicted_s=6.0)
    script.prepare()
    script.open()
    script.form()
    script.wait(20.0)
    others = [WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7") for w in workers[2:]]
    asked = script.count(ComputePlan)
    script.report(*others)
    script.wait(5.0)
    assert script.count(ComputePlan) == asked + 1
    return script, workers


def _profiled(script: Script, workers: list[str]) -> None:
    from calibrations import uniform
    from core_script import RECIPE
    from makara.protocol.messages import Profile

    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))


def answered(script: Script, **change: Any) -> PlanComputed:
    """What the planner answers to its newest question, changed like this."""
    question = script.last(ComputePlan).model_copy(update=change)
    return compute_plan(script.state, question, lambda: script.now)


def test_newcomers_are_taken_in_where_that_pays() -> None:
    script, _ = grown()
    asked = script.last(ComputePlan)
    assert asked.reconsider
    assert asked.least_gain == 0.0
    assert asked.change_s == 0.5  # as the generation that runs took to form
    answer = answered(script)
    assert not answer.stays
    assert [one.name for one in answer.alternatives[:2]] == ["best", "running"]
    assert answer.alternatives[0].begins_s == pytest.approx(0.5)
    assert answer.alternatives[1].begins_s == 0.0
    script.event(answer)
    assert script.last(GenerationPlanned).cause.endswith("joined")
    assert script.last(GenerationPlanned).alternatives == answer.alternatives


def test_what_runs_goes_on_where_the_end_comes_before_the_change_has_paid() -> None:
    script, workers = grown()
    step_s = answered(script).predicted_s
    assert step_s is not None
    answer = answered(script, change_s=30.0, ends_s=40.0)
    assert answer.stays
    assert answer.best_until == script.now + 40.0, "with more time it would pay"
    script.event(answer)
    kept = script.last(PlanKept)
    assert (kept.generation, kept.until) == (1, answer.best_until)
    assert [one.name for one in kept.alternatives[:2]] == ["running", "best"]
    assert kept.alternatives[0].worth is not None
    assert kept.alternatives[1].worth is not None
    assert kept.alternatives[0].worth > kept.alternatives[1].worth
    assert script.num_plans == 1
    asked = script.count(ComputePlan)
    for _ in range(30):
        script.wait(1.0)
        script.report()
    assert script.count(ComputePlan) == asked, "it is not asked again sooner"
    for _ in range(12):
        script.wait(1.0)
        script.report()
    assert script.count(ComputePlan) == asked + 1
    again = script.last(ComputePlan)
    assert {slot.worker for slot in again.workers} == set(workers)
    script.event(answered(script, change_s=30.0, ends_s=40.0))
    assert script.count(PlanKept) == 1, "the same is not said twice"


def test_a_change_that_would_never_pay_is_not_asked_about_again() -> None:
    script, _ = grown()
    answer = answered(script, least_gain=0.9, ends_s=1000.0)
    assert answer.stays
    assert answer.best_until is None


def test_a_plan_must_be_worth_more_by_what_is_asked_for() -> None:
    script, _ = grown()
    rates = [1.0 / one.step_s for one in answered(script).alternatives[:2] if one.step_s]
    gain = 1.0 - min(rates) / max(rates)
    free = {"change_s": 0.0, "risk": None, "ends_s": None}
    script.state = script.state.changed(calibration={**(script.state.calibration or {}), **_no_bytes()})
    assert not answered(script, least_gain=gain - 0.01, **free).stays
    assert answered(script, least_gain=gain + 0.01, **free).stays


def _no_bytes() -> dict[str, Any]:
    """Nothing must be moved."""
    return {"snapshot_bytes": [0, 0]}


def test_a_plan_that_is_taken_for_its_copies_is_told_first() -> None:
    script, _ = grown(tolerated_failures=1)
    answer = answered(script)
    best, running, *others = answer.alternatives
    stays = {"stays": True, "alternatives": (running, best, *others), "best_until": script.now + 60.0}
    script.event(answer.model_copy(update=stays))
    planned = script.last(GenerationPlanned)
    assert planned.number == 2
    assert planned.alternatives[0] == best
    assert running in planned.alternatives
    assert planned.best_until is None


def test_where_the_best_plan_is_the_one_that_runs_nothing_is_weighed() -> None:
    script, _ = grown()
    answer = answered(script)
    script.event(answer)
    script.prepare()
    script.open()
    script.form()
    question = script.last(ComputePlan).model_copy(update={"generation": 3})
    again = compute_plan(script.state, question, lambda: script.now)
    assert not again.stays
    assert [one.name for one in again.alternatives if one.worth is not None] == ["best"]


def test_a_rest_that_cannot_pay_for_it_leaves_a_slow_worker_where_it_is() -> None:
    for num_steps, num_plans in ((34, 1), (100_000, 2)):
        script = Script(predicted_s=4.0)
        workers = script.run(4, training={"global_batch_size": 8, "steps": num_steps})
        slow = workers[-1].partition(".")[0]
        steps(script, workers, 30, **{slow: 3.0})
        asked = script.last(ComputePlan)
        assert asked.reconsider
        assert asked.least_gain == script.timing.worth_it
        script.event(answered(script, change_s=80.0))
        assert script.num_plans == num_plans


def test_a_journal_with_kept_plans_folds() -> None:
    script, _ = grown()
    script.event(answered(script, change_s=30.0, ends_s=40.0))
    written = [fact.model_dump_json() for fact in script.facts]
    read = [type(fact).model_validate_json(text) for fact, text in zip(script.facts, written, strict=True)]
    assert fold(read) == script.state
    assert isinstance(read[-1], PlanKept)


# ---- when others join --------------------------------------------------------------------------------------


def end_s(script: Script, ready: set[str]) -> float:
    context = Context(script.state, script.observations, Tick(now=script.now), script.timing)
    return worth.ends_s(context, ready)


def test_a_vm_that_boots_is_expected_after_what_others_took_and_a_late_one_as_late_again() -> None:
    script, _ = grown()
    vms = [vm.vm for vm in script.state.live_vms]
    first = script.state.vms[vms[0]]
    began = script.now
    changed = {
        vm: replace(script.state.vms[vm], attempted_at=began - 60.0, joined_at=began) for vm in vms[:3]
    }
    coming = replace(
        script.state.vms[vms[3]], status=type(first.status).REQUESTED, joined_at=None,
        attempted_at=began, created_at=began,
    )  # fmt: skip
    for vm in (*changed.values(), coming):
        script.state = script.state.with_vm(vm)
    ready = set(vms[:3])
    assert end_s(script, ready) == pytest.approx(60.0)
    script.now = began + 50.0
    assert end_s(script, ready) == pytest.approx(10.0)
    script.now = began + 60.0
    assert end_s(script, ready) == Timing().settle_s
    script.now = began + 90.0
    assert end_s(script, ready) == pytest.approx(30.0), "half a minute late: half a minute more"


@pytest.mark.parametrize("job", [lambda: grown()[0], lambda: rerouted_job(**FIXED)[0]], ids=["runs", "ran"])
def test_of_a_calibration_that_cannot_be_used_the_planner_says_so(job: Callable[[], Script]) -> None:
    script = job()
    assert script.state.calibration is not None
    state = replace(script.state, calibration={**script.state.calibration, "forward_s": [-1.0, -1.0]})
    answer = compute_plan(state, script.last(ComputePlan), lambda: script.now)
    assert answer.plan is None
    assert answer.reason is not None
    assert answer.reason.startswith("the calibration cannot be used: forward_s"), answer.reason
