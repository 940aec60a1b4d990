"""After a death the plan of before, rerouted around the dead worker, is one of the plans to choose from."""

from __future__ import annotations

from typing import Any

from core_script import Script
from makara.manager.cli.show import alternatives_lines
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import PlanComputed, VmTerminated
from makara.manager.core.facts import GenerationPlanned
from makara.manager.service.planning import compute_plan
from makara.pipeline import Plan, Range
from makara.protocol.messages import Phase

FIXED = {"pipeline_parallel_degree": 2, "data_parallel_degree": 2}


def lose(script: Script, worker: str) -> None:
    """The worker's VM is gone, its peers are broken, and the planner is asked."""
    vm, asked = worker.partition(".")[0], script.count(ComputePlan)
    current = script.state.current
    assert current is not None
    script.event(VmTerminated(now=script.now, vm=vm))
    left = [w for w, _ in current.incarnations if w != worker]
    script.report(*(script.change(w, phase=Phase.BROKEN) for w in left), silent=(vm,))
    while script.count(ComputePlan) == asked:
        script.wait(1.0)
        script.report()


def planned(script: Script, **change: Any) -> PlanComputed:
    """What the planner answers to its newest question."""
    question = script.last(ComputePlan).model_copy(update=change)
    return compute_plan(script.state, question, lambda: script.now)


def rerouted_job(**parallelism: int) -> tuple[Script, list[str]]:
    """A job of 2x2, whose last worker is dead."""
    script = Script()
    workers = script.run(4, parallelism=parallelism, training={"global_batch_size": 8, "steps": 100_000})
    lose(script, workers[3])
    return script, workers


def test_a_job_of_a_fixed_grid_goes_on_by_rerouting() -> None:
    script, workers = rerouted_job(**FIXED)
    script.event(planned(script))
    generation = script.state.planned
    assert generation is not None
    assert generation.shape == "2x2-1"
    assert [worker for worker, _ in generation.members] == workers[:3]
    plan = Plan.from_json(generation.plan)
    assert plan.ranges == (Range(0, 1), Range(1, 2), Range(0, 1))
    assert [path.micro_batches for path in plan.paths] == [(0, 2), (1, 3)]
    script.prepare()
    script.open()
    script.form()
    assert script.state.running


def test_a_death_after_a_reroute_is_routed_around_again() -> None:
    script, workers = rerouted_job(**FIXED)
    script.event(planned(script))
    script.prepare()
    script.open()
    script.form()
    lose(script, workers[0])
    answer = planned(script)
    assert answer.plan is not None
    assert answer.workers == (workers[1], workers[2])
    assert Plan.from_json(answer.plan).shape == "2x1"


def test_what_a_lost_section_needs_is_no_reroute() -> None:
    script, workers = rerouted_job(**FIXED)
    script.event(planned(script))
    script.prepare()
    script.open()
    script.form()
    lose(script, workers[1])
    answer = planned(script)
    assert answer.plan is None
    assert answer.best_until is None


def test_a_worker_that_began_anew_holds_nothing_that_could_stay_in_place() -> None:
    script, workers = rerouted_job(**FIXED)
    script.state = script.state.changed(failed={workers[1]: 1})
    assert planned(script).plan is None


def test_another_grid_is_taken_where_it_does_more_before_the_next_change() -> None:
    script, _ = rerouted_job()
    answer = planned(script, ends_s=3600.0)
    assert answer.plan is not None
    assert answer.best_until is None
    assert Plan.from_json(answer.plan).shape == "1x3"  # as fast as 1x2, and with one host more


def test_rerouting_is_taken_where_loading_would_last_longer() -> None:
    script, _ = rerouted_job()
    slow = {"latency_s": 0.0, "bytes_per_s": 1.0, "jitter_s": 0.0}  # 50 bytes must reach each worker
    assert script.state.calibration is not None
    calibration = {**script.state.calibration, "inter_vm": slow, "cut_bytes": [0], "grad_cut_bytes": [0]}
    script.state = script.state.changed(calibration={**calibration, "gradient_bytes": [0, 0]})
    shapes = [
        None if answer.plan is None else Plan.from_json(answer.plan).shape
        for answer in (planned(script, ends_s=seconds, risk=None) for seconds in (90.0, 100_000.0))
    ]
    assert shapes == ["2x2-1", "1x1"]  # alone, for sums over such a link take longer still


def test_what_was_weighed_is_told_in_the_answer_and_in_the_fact() -> None:
    script, _ = rerouted_job()
    answer = planned(script, ends_s=3600.0)
    best, other = answer.alternatives[:2]
    assert (best.name, best.shape, other.name, other.shape) == ("best", "1x3", "rerouted", "2x2-1")
    assert best.worth is not None
    assert other.worth is not None
    assert best.worth > other.worth
    assert other.begins_s == 0.0
    assert all(one.rejected is not None for one in answer.alternatives[2:])
    script.event(answer)
    fact = script.last(GenerationPlanned)
    assert fact.alternatives == answer.alternatives
    rows = [*alternatives_lines(fact.model_dump(mode="json"))]
    assert rows[0].startswith("best 1x3: a step ")
    assert rows[0].endswith(" samples/s")
    assert rows[1].startswith("rerouted 2x2-1: a step ")
    assert len(rows) == len(fact.alternatives)
    before = {key: value for key, value in fact.model_dump().items() if key != "alternatives"}
    assert GenerationPlanned.model_validate(before).alternatives == ()  # as earlier versions wrote it


def test_why_there_is_no_reroute_is_told() -> None:
    script, workers = rerouted_job()
    began_anew = script.state.changed(failed={workers[1]: 1})
    script.state = began_anew
    refused = [one for one in planned(script).alternatives if one.name == "rerouted"]
    assert [one.worth for one in refused] == [None]
    assert refused[0].rejected


def test_the_question_says_until_when_a_plan_is_expected_to_run() -> None:
    script, _ = rerouted_job()
    lasts_s = script.last(ComputePlan).lasts_s
    assert lasts_s is not None
    assert 0 < lasts_s < script.timing.between_losses_s


def test_a_reroute_that_lasts_longer_than_it_pays_is_reconsidered_once() -> None:
    script, _ = rerouted_job()
    before = script.count(ComputePlan)
    rerouted = planned(script, ends_s=0.0)  # nothing else would do any step in that time
    script.event(rerouted.model_copy(update={"best_until": script.now + 30.0}))
    assert script.last(GenerationPlanned).best_until == script.now + 30.0
    script.prepare()
    script.open()
    script.form()
    assert script.count(ComputePlan) == before
    for _ in range(40):
        script.wait(1.0)
        script.report()
    asked = script.last(ComputePlan)
    assert script.count(ComputePlan) == before + 1
    assert asked.reconsider
    again = planned(script)
    assert again.current_s is not None
    assert again.predicted_s is not None
    assert again.predicted_s < again.current_s
    script.event(again)
    assert script.last(GenerationPlanned).cause == "the plan has run for as long as it was chosen for"


def test_what_has_all_copies_is_not_weighed_as_if_it_ended_with_a_reroute_that_has_fewer() -> None:
    script, _ = rerouted_job()
    assert script.state.spec is not None
    resilience = script.state.spec.resilience.model_copy(update={"tolerated_failures": 1})
    script.state = script.state.changed(spec=script.state.spec.model_copy(update={"resilience": resilience}))
    refused, beside = (planned(script, fewer_copies_s=most_s, ends_s=3600.0) for most_s in (0.0, 60.0))
    assert [one.name for one in beside.alternatives[:2]] == ["best", "rerouted"]
    assert beside.alternatives[1].rejected is None
    assert beside.alternatives[0] == refused.alternatives[0]
