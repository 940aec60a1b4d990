"""When VMs join, plans around whole pipelines stand beside the plan that runs and the best one."""

from __future__ import annotations

from dataclasses import replace

from makara.manager.core.commands import ComputePlan, WorkerSlot
from makara.manager.core.events import PlanComputed
from makara.manager.core.state import Generation, Incarnation
from makara.manager.service.planning import compute_plan
from makara.pipeline import Plan
from makara.simulator import Link
from reforming import Model, models, ours

NOW, CHANGE_S = 1000.0, 2.0


def joined(model: Model, num_members: int, num_newcomers: int, ends_s: float) -> tuple[Plan, PlanComputed]:
    """The plan that runs, and what the planner answers when others have joined; H is `ends_s`."""
    members = [f"w{number:02}" for number in range(num_members)]
    runs = ours(model, None, members)
    current = Generation(
        number=1,
        cause="start",
        plan=runs.plan.to_json(),
        shape=runs.plan.shape,
        members=tuple(Incarnation(worker, 1) for worker in runs.workers),
        num_workers=len(runs.workers),
        detected_at=0.0,
        planned_at=0.0,
        decided_s=0.0,
        predicted_s=None,
    )
    state = replace(model.job_after(runs), current=current)
    workers = [*members, *(f"x{number:02}" for number in range(num_newcomers))]
    question = ComputePlan(
        key="k",
        generation=2,
        workers=tuple(WorkerSlot(worker=w, vm=w, memory_bytes=model.memory_bytes) for w in workers),
        reconsider=True,
        change_s=CHANGE_S,
        ends_s=ends_s,
        risk=model.risk,
    )
    return runs.plan, compute_plan(state, question, lambda: NOW)


def slow_to_load() -> Model:
    """The convolutions, whose sums and messages cost nothing, and whose state moves at 10 MB/s."""
    (model,) = (one for one in models() if one.name == "convolutions")
    num = model.calibration.num_sections
    calibration = replace(
        model.calibration,
        inter_vm=Link(latency_s=0.0, bytes_per_s=1e7),
        gradient_bytes=(1,) * num,
        cut_bytes=(0,) * (num - 1),
        grad_cut_bytes=(0,) * (num - 1),
    )
    return replace(model, calibration=calibration)


def weighed(answer: PlanComputed) -> list[str]:
    return [one.name for one in answer.alternatives if one.worth is not None]


def test_what_runs_stays_where_others_join_too_soon_for_any_change() -> None:
    running, answer = joined(slow_to_load(), 12, 3, ends_s=5.0)
    assert answer.stays
    assert weighed(answer)[0] == "running"
    assert answer.best_until == NOW + 5.0, "with more time another would be worth more"
    assert answer.plan is not None
    assert Plan.from_json(answer.plan).shape == answer.alternatives[1].shape != running.shape


def test_newcomers_form_a_pipeline_beside_a_whole_one_for_as_long_as_that_pays() -> None:
    model = slow_to_load()
    running, answer = joined(model, 12, 3, ends_s=100.0)
    assert not answer.stays
    assert weighed(answer)[0] == "reformed"
    assert {"running", "best"} < set(weighed(answer))
    assert answer.best_until == NOW + 100.0
    assert answer.plan is not None
    plan = Plan.from_json(answer.plan)
    assert running.shape == "7+5"
    assert plan.shape == "7+8"
    assert plan.ranges[:7] == running.ranges[:7], "those of the first pipeline keep what they hold"
    assert answer.workers[:7] == tuple(worker for worker in answer.workers[:7] if worker[0] == "w")
    (best,) = (one for one in answer.alternatives if one.name == "best")
    assert best.step_s is not None
    assert answer.predicted_s is not None
    assert best.step_s < answer.predicted_s


def test_a_plan_that_is_worth_most_for_good_is_not_asked_about_again() -> None:
    _, answer = joined(slow_to_load(), 13, 3, ends_s=1000.0)
    assert weighed(answer)[0] == "reformed"
    assert answer.best_until is None


def test_what_runs_is_not_weighed_under_another_name() -> None:
    running, answer = joined(slow_to_load(), 14, 1, ends_s=100.0)
    assert answer.stays
    assert answer.alternatives[0].name == "running"
    assert running.shape == "7x2"
    others = [one for one in answer.alternatives[1:] if one.worth is not None]
    assert others
    assert all(one.shape != running.shape for one in others)
