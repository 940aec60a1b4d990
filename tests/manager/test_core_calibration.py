"""How the core has a model measured: shares, links, deaths in between, and what becomes of the pieces."""

from __future__ import annotations

from typing import Any

from cluster_trainers import GRAPH_HASH, SURVEY, WIRE, row
from core_script import Script
from makara.manager.core.commands import StoreCalibration
from makara.manager.core.events import ManagerStarted, VmTerminated
from makara.manager.core.facts import (
    JobEnded,
    ProbeDealt,
    ProbeEnded,
    ProfilerChosen,
    RecipeFixed,
    SectionsMeasured,
    ShareDealt,
    Surveyed,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import Status, vm_of
from makara.protocol.messages import Phase, ProbeReport, WorkerReport
from makara.simulator import Measurements


def begin(num_vms: int, **changes: dict[str, Any]) -> tuple[Script, list[str]]:
    """A job whose VMs are there, and whose first worker has surveyed the model."""
    script = Script()
    script.submit(**{"resources": {"max_nodes": num_vms}, **changes})
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms][:num_vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    assert script.last(ProfilerChosen).worker == workers[0]
    assert script.state.status is Status.PROFILING
    script.report(script.change(workers[0], survey=SURVEY))
    return script, workers


def measure(script: Script, *workers: str) -> None:
    """These do all that they are ordered to."""
    for worker in workers:
        wanted = orders(script.state, vm_of(worker)).measure
        rows = [row(o.layout.microbatch_size, s) for o in wanted for s in o.sections if o.worker == worker]
        script.report(script.change(worker, rows=[*script.workers[worker].rows, *rows]))


def answer_probe(script: Script, first: str, **found: Any) -> None:
    number = script.last(ProbeDealt).number
    script.report(script.change(first, probe=ProbeReport(number=number, endpoint="10.0.0.1:7")))
    order = orders(script.state, vm_of(first)).probe
    assert order is not None
    assert order.endpoint == "10.0.0.1:7"
    script.report(script.change(first, probe=ProbeReport(number=number, done=True, **found)))


def pass_time(script: Script, seconds: float) -> None:
    """Everybody is heard of meanwhile."""
    for _ in range(int(seconds) + 1):
        script.wait(1.0)
        script.report()


def dealt(script: Script) -> dict[str, list[tuple[int, int]]]:
    """(m, section) by worker."""
    found: dict[str, list[tuple[int, int]]] = {}
    for fact in script.facts:
        if isinstance(fact, ShareDealt):
            parts = [(fact.share.microbatch_size, section) for section in fact.share.sections]
            found.setdefault(fact.worker, []).extend(parts)
    return found


def test_what_a_survey_leaves_is_dealt_to_all_workers_and_then_they_measure_links() -> None:
    script, workers = begin(3)
    assert script.last(Surveyed).worker == workers[0]
    parts = [part for own in dealt(script).values() for part in own]
    assert sorted(parts) == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 2)]
    assert len(dealt(script)) == 3
    measure(script, *workers)
    assert not any(orders(script.state, vm_of(worker)).measure for worker in workers)
    assert [worker for worker, _ in script.last(ProbeDealt).members] == workers
    answer_probe(script, workers[0], wires=[WIRE])
    fixed = script.last(RecipeFixed)
    measured = Measurements.from_json(fixed.measurements or {})
    assert measured.sizes == (1, 2)
    assert [wire.source for wire in measured.wires] == ["workers"]
    assert fixed.calibration == measured.at(fixed.recipe.microbatch_size).to_json()
    assert script.count(StoreCalibration) == 1
    assert script.state.measuring is None


def test_one_worker_alone_measures_everything_and_links_are_assumed() -> None:
    script, (worker,) = begin(1)
    while script.state.recipe is None:
        before = script.count(SectionsMeasured)
        measure(script, worker)
        script.wait(0.1)
        assert script.count(SectionsMeasured) > before or script.state.recipe is not None
    measured = Measurements.from_json(script.last(RecipeFixed).measurements or {})
    assert [wire.source for wire in measured.wires] == ["loopback"]
    assert not script.count(ProbeDealt)


def test_the_share_of_a_worker_that_dies_goes_to_another() -> None:
    script, (first, second) = begin(2)
    lost = dealt(script)[second]
    script.event(VmTerminated(now=script.now, vm=vm_of(second)))
    measure(script, first)  # its own share; then the dead one's
    script.wait()
    assert set(lost) <= set(dealt(script)[first])
    for _ in range(3):
        measure(script, first)
        script.wait(0.1)
    script.wait(5.0)
    assert script.state.recipe is not None


def test_a_new_manager_goes_on_where_the_last_one_was() -> None:
    script, workers = begin(2)
    measure(script, workers[0])
    done = script.state.measuring
    assert done is not None
    script.event(ManagerStarted(now=script.now))
    assert script.state.measuring == done
    measure(script, *workers)
    for _ in range(3):
        measure(script, *workers)
        script.wait(0.1)
    script.event(ManagerStarted(now=script.now))
    script.report()
    answer_probe(script, workers[0], wires=[WIRE])
    assert script.state.recipe is not None
    assert script.count(Surveyed) == 1


def test_an_m_that_can_be_missed_is_not_waited_for() -> None:
    script, workers = begin(2)
    likely = [w for w, parts in dealt(script).items() if any(m == 2 for m, _ in parts)]
    measure(script, *likely)
    for worker in likely:
        script.report(script.change(worker, rows=[row(2, 0), row(2, 2)]))
    pass_time(script, script.timing.measuring_s)
    answer_probe(script, workers[0], wires=[WIRE])
    assert 2 in Measurements.from_json(script.last(RecipeFixed).measurements or {}).sizes


def test_a_probe_that_fails_twice_leaves_links_assumed_and_unshared() -> None:
    script, workers = begin(2)
    for _ in range(3):
        measure(script, *workers)
        script.wait(0.1)
    answer_probe(script, workers[0], failure="it lost a peer")
    assert script.count(ProbeDealt) == 2
    pass_time(script, script.timing.probe_s)
    assert script.last(ProbeEnded).failure == f"not over in {script.timing.probe_s:g} s"
    measured = Measurements.from_json(script.last(RecipeFixed).measurements or {})
    assert [wire.source for wire in measured.wires] == ["loopback"]
    assert not script.count(StoreCalibration)


def test_links_that_nobody_can_read_are_none() -> None:
    script, workers = begin(2)
    for _ in range(3):
        measure(script, *workers)
        script.wait(0.1)
    answer_probe(script, workers[0], wires=[{**WIRE, "bytes_per_s": 3}])
    assert "bytes_per_s: expected an object" in script.last(ProbeEnded).failure


def test_newcomers_take_part_in_the_links_if_they_are_about_to_come() -> None:
    script = Script()
    script.submit(resources={"max_nodes": 2})
    script.wait()
    first, second = (f"{vm}.0" for vm in script.state.vms)
    whole = SURVEY.model_copy(update={"rows": [row(m, s) for m in (1, 2) for s in range(3)]})
    script.report(WorkerReport(worker=first, incarnation=1, phase=Phase.IDLE))
    script.report(script.change(first, survey=whole))
    assert script.state.recipe is None
    script.report(WorkerReport(worker=second, incarnation=1, phase=Phase.IDLE))
    assert len(script.last(ProbeDealt).members) == 2


def test_trainers_meet_the_recipe_that_was_measured() -> None:
    script, workers = begin(2)
    for _ in range(3):
        measure(script, *workers)
        script.wait(0.1)
    answer_probe(script, workers[0], wires=[WIRE])
    script.report(*(script.change(w, graph_hash=GRAPH_HASH, rows=[], survey=None) for w in workers))
    script.wait(5.0)
    assert script.vitals.planning is not None


def test_a_job_that_wants_more_stages_than_the_model_has_sections_ends_and_holds_no_vm() -> None:
    script, _ = begin(4, parallelism={"pipeline_parallel_degree": 4})
    ended = script.last(JobEnded)
    assert ended.status == "failed"
    assert ended.reason.startswith(
        "parallelism.pipeline_parallel_degree: 4, but the model is cut into 3 sections; lower it, or cut"
    )
    assert "Training.cuts" in ended.reason
    assert not list(script.state.live_vms)


def test_as_many_stages_as_sections_are_measured() -> None:
    script, _ = begin(4, parallelism={"pipeline_parallel_degree": 3})
    assert not script.count(JobEnded)
    assert script.count(ShareDealt)
