"""How the core has a model measured: newcomers, deaths in between, and when links are assumed."""

from __future__ import annotations

from typing import Any

from core_script import Script
from makara.manager.core.commands import StoreCalibration
from makara.manager.core.events import ManagerStarted, VmTerminated
from makara.manager.core.facts import (
    EndReason,
    GenerationClosed,
    GenerationOpened,
    GenerationPlanned,
    JobEnded,
    RecipeFixed,
    VmEnded,
    WorkerFailed,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import Status, vm_of
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import Phase, Profiling, WorkerReport
from makara.simulator import Measurements
from world_machines import GRAPH_HASH, WIRE, measured_profile


def idle(worker: str, incarnation: int = 1) -> WorkerReport:
    return WorkerReport(worker=worker, incarnation=incarnation, phase=Phase.IDLE, profiling=Profiling())


def begin(num_vms: int, num_ready: int = 1, **changes: dict[str, Any]) -> tuple[Script, list[str]]:
    """A job whose VMs are there, and whose first worker is to survey the model."""
    script = Script()
    script.submit(**{"resources": {"max_nodes": num_vms}, **changes})
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms][:num_vms]
    script.report(*(idle(worker) for worker in workers[:num_ready]))
    if num_ready:
        assert members(script) == workers[:1]
        assert script.state.status is Status.PROFILING
    return script, workers


def members(script: Script) -> list[str]:
    """Of the generation of kind `profile` that is planned or open."""
    assert script.state.profile is not None
    return [worker for worker, _ in script.state.profile.members]


def tell(script: Script, worker: str, *, phase: Phase = Phase.PROFILING, **changes: Any) -> None:
    before = script.workers[worker].profiling
    assert before is not None
    script.report(script.change(worker, phase=phase, profiling=before.model_copy(update=changes)))


def enter(script: Script, stage: str = "survey") -> list[str]:
    """All members get ready, as they are ordered, and go in, each as soon as it may."""
    names = members(script)
    for worker in names:
        order = orders(script.state, vm_of(worker)).generation
        assert order is not None
        assert (order.kind, order.phase, order.plan) == ("profile", "prepare", {})
        tell(script, worker, prepared=order.number, endpoint=f"10.0.0.1:{order.number}")
    for worker in names:
        order = orders(script.state, vm_of(worker)).generation
        assert order is not None
        assert (order.phase, order.endpoint) == ("go", f"10.0.0.1:{order.number}")
        script.report(script.change(worker, profile=None))
        tell(script, worker, generation=order.number, broken="", stage=stage)
    return names


def find(script: Script, *, links: bool) -> None:
    """The members have done all that there was to do."""
    first, *others = members(script)
    for worker in others:
        tell(script, worker, phase=Phase.IDLE)
    found = measured_profile(links=links)
    script.report(script.change(first, phase=Phase.IDLE, profile=found))


def pass_time(script: Script, seconds: float) -> None:
    """Everybody is heard of meanwhile."""
    for _ in range(int(seconds) + 1):
        script.wait(1.0)
        script.report()


def break_off(script: Script) -> None:
    for worker in members(script):
        tell(script, worker, phase=Phase.IDLE, broken="links were not measured")
    pass_time(script, script.timing.suspect_grace_s)


def test_the_first_worker_surveys_and_then_all_measure_together() -> None:
    script, workers = begin(3, 3)
    enter(script)
    script.wait(30.0)
    script.report()
    assert members(script) == workers[:1]  # one that traces the model is not joined
    tell(script, workers[0], stage="sections", total=6)
    assert members(script) == workers
    assert enter(script, "sections") == workers
    find(script, links=True)
    fixed = script.last(RecipeFixed)
    measured = Measurements.from_json(fixed.measurements or {})
    assert measured.sizes == (1, 2)
    assert [wire.source for wire in measured.wires] == ["workers"]
    assert fixed.calibration == measured.at(fixed.recipe.microbatch_size).to_json()
    assert script.count(StoreCalibration) == 1
    assert script.state.profile is None
    assert script.state.last_generation == 0  # generations that train are numbered by themselves


def test_one_worker_alone_measures_everything_and_links_are_assumed() -> None:
    script, _ = begin(1)
    enter(script)
    find(script, links=False)
    measured = Measurements.from_json(script.last(RecipeFixed).measurements or {})
    assert [wire.source for wire in measured.wires] == ["loopback"]
    assert script.count(GenerationPlanned) == 1


def test_a_member_that_dies_is_replaced_by_the_next_generation() -> None:
    script, workers = begin(3, 2)
    enter(script, "sections")
    assert members(script) == workers[:2]
    enter(script, "sections")
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    assert script.last(GenerationClosed).reason == f"lost {workers[1]}"
    assert members(script) == workers[:1]
    enter(script, "sections")
    script.report(idle(workers[2]))
    assert members(script) == [workers[0], workers[2]]
    enter(script, "sections")
    find(script, links=True)
    assert script.state.recipe is not None


def test_a_newcomer_does_not_end_what_is_under_way_before_it_is_ready() -> None:
    script, workers = begin(2)
    enter(script, "sections")
    script.report(idle(workers[1]))
    assert members(script) == workers
    first = orders(script.state, vm_of(workers[0])).generation
    assert first is not None
    assert (first.number, first.phase) == (2, "prepare")
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    assert "while it was prepared" in script.last(GenerationClosed).reason
    enter(script, "sections")
    find(script, links=False)
    pass_time(script, script.timing.settle_s)
    assert script.state.recipe is not None


def test_links_are_not_begun_anew_for_a_newcomer() -> None:
    script, workers = begin(3, 2)
    enter(script, "sections")
    enter(script, "links")
    script.report(idle(workers[2]))
    assert members(script) == workers[:2]


def test_a_new_manager_goes_on_where_the_last_one_was() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    enter(script, "sections")
    before = script.state.profile
    script.event(ManagerStarted(now=script.now))
    script.report()
    assert script.state.profile == before
    assert members(script) == workers
    find(script, links=True)
    assert script.state.recipe is not None
    assert script.count(GenerationOpened) == 2


def test_generations_that_break_twice_leave_links_assumed_and_unshared() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    for number in (1, 2):
        assert enter(script, "links") == workers
        break_off(script)
        assert script.last(GenerationClosed).reason.endswith(": links were not measured")
        assert script.state.strikes.count(Kind.PROFILE) == number
    assert enter(script, "sections") == workers[:1]
    find(script, links=False)
    measured = Measurements.from_json(script.last(RecipeFixed).measurements or {})
    assert [wire.source for wire in measured.wires] == ["loopback"]
    assert not script.count(StoreCalibration)


def test_a_break_is_known_as_a_death_if_one_is_told_in_time() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    enter(script, "links")
    tell(script, workers[0], phase=Phase.IDLE, broken="lost ranks [1]")
    assert not script.count(GenerationClosed)
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[1])))
    assert script.last(GenerationClosed).reason == f"lost {workers[1]}"


def test_what_nobody_can_read_is_no_calibration_and_its_worker_unfit() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    enter(script, "links")
    found = measured_profile(links=True)
    assert found.measurements is not None
    bad = {**found.measurements, "wires": [{**WIRE, "bytes_per_s": 3}]}
    script.report(script.change(workers[0], profile=found.model_copy(update={"measurements": bad})))
    assert script.state.recipe is None
    assert "what it measured cannot be read" in script.last(WorkerFailed).message
    script.wait()
    assert script.last(VmEnded).reason is EndReason.UNFIT
    assert members(script) == workers[1:]


def begin_older() -> tuple[Script, str]:
    """The one worker that is there knows nothing of such generations, and is to be started anew for that."""
    script, (older, _) = begin(2, 1)
    script.report(script.change(older, profiling=None))
    pass_time(script, script.timing.prepare_timeout_s)
    assert script.last(WorkerFailed).kind == "outdated"
    assert orders(script.state, vm_of(older)).given_up == {older: 1}
    return script, older


def test_a_trainer_that_is_too_old_to_measure_is_started_anew_and_measures() -> None:
    """Found: it counted as unfit at once, and its VM was replaced, though a newer trainer lay on its disk."""
    script, older = begin_older()
    script.report(idle(older, incarnation=2))
    script.wait()
    assert not script.state.unfit
    assert members(script) == [older]
    enter(script)
    find(script, links=False)
    pass_time(script, script.timing.settle_s)
    assert script.state.recipe is not None
    assert not script.count(VmEnded)


def test_trainers_of_a_version_that_has_no_such_generations_are_replaced() -> None:
    script, older = begin_older()
    script.report(idle(older, incarnation=2).model_copy(update={"profiling": None}))
    pass_time(script, script.timing.prepare_timeout_s)
    assert script.last(WorkerFailed).kind == "recipe"
    assert "measures models in another way" in script.last(WorkerFailed).message
    script.wait()
    assert script.last(VmEnded).vm == vm_of(older)


def test_older_trainers_that_wait_while_others_measure_are_started_anew_and_taken_in() -> None:
    """Found: they waited until the job trained, and others measured without them."""
    script, (newer, older) = begin(2, 0)
    script.report(idle(newer).model_copy(update={"trainer_protocol": 3}))
    enter(script, "sections")
    script.report(idle(older).model_copy(update={"trainer_protocol": 2}))
    script.wait()
    assert script.last(WorkerFailed).kind == "outdated"
    assert orders(script.state, vm_of(older)).given_up == {older: 1}
    script.report(idle(older, incarnation=2).model_copy(update={"trainer_protocol": 3}))
    assert members(script) == [newer, older]


def test_rank_0_stays_who_it_was_when_others_join() -> None:
    script, (first, second, third) = begin(3, 0)
    script.report(idle(second))
    for newcomer, together in ((first, [second, first]), (third, [second, first, third])):
        enter(script, "sections")
        script.report(idle(newcomer))
        assert members(script) == together


def test_a_break_is_given_time_though_the_generation_before_broke_too() -> None:
    script, workers = begin(3, 2)
    enter(script, "sections")
    enter(script, "sections")
    tell(script, workers[1], phase=Phase.IDLE, broken="lost ranks [0]")
    script.report(idle(workers[2]))
    enter(script, "links")
    script.wait(script.timing.suspect_grace_s)
    script.report()
    closed = script.count(GenerationClosed)
    tell(script, workers[1], phase=Phase.IDLE, broken="lost ranks [2]")
    script.report()
    assert script.count(GenerationClosed) == closed
    script.event(VmTerminated(now=script.now, vm=vm_of(workers[2])))
    assert script.last(GenerationClosed).reason == f"lost {workers[2]}"


def test_trainers_of_a_version_that_has_no_such_generations_keep_nobody_waiting() -> None:
    script, (first, old, new) = begin(3)
    enter(script)
    script.report(idle(old).model_copy(update={"profiling": None}), idle(new))
    script.event(VmTerminated(now=script.now, vm=vm_of(first)))
    assert members(script) == [new]


def test_newcomers_take_part_in_the_links_if_they_are_about_to_come() -> None:
    script, (first, second) = begin(2)
    enter(script)
    find(script, links=False)
    assert script.state.recipe is None
    script.report(idle(second))
    assert members(script) == [first, second]


def test_newcomers_that_do_not_come_soon_are_not_waited_for() -> None:
    script, _ = begin(2)
    enter(script)
    find(script, links=False)
    pass_time(script, script.timing.settle_s)
    assert script.state.recipe is not None
    assert not script.count(StoreCalibration)


def test_trainers_meet_the_recipe_that_was_measured() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    enter(script, "links")
    find(script, links=True)
    script.report(*(script.change(w, graph_hash=GRAPH_HASH, profiling=None, profile=None) for w in workers))
    script.wait(5.0)
    assert script.observations.planning is not None


def test_who_waits_for_other_members_is_not_replaced_before_them() -> None:
    script, workers = begin(2, 2)
    enter(script, "sections")
    enter(script, "sections")
    waiting = {"progress": [{"count": 1, "at": "waiting for all members"}]}
    script.extra[vm_of(workers[1])] = waiting
    pass_time(script, script.timing.profile_wait_s)
    assert [f.worker for f in script.facts if isinstance(f, WorkerFailed)] == workers[:1]


def test_a_job_that_wants_more_stages_than_the_model_has_sections_ends_and_holds_no_vm() -> None:
    script, _ = begin(4, parallelism={"pipeline_parallel_degree": 4})
    enter(script)
    find(script, links=False)
    pass_time(script, script.timing.settle_s)
    ended = script.last(JobEnded)
    assert ended.status == "failed"
    assert ended.reason.startswith(
        "parallelism.pipeline_parallel_degree: 4, but the model is cut into 3 sections; lower it, or cut"
    )
    assert "Training.cuts" in ended.reason
    assert not list(script.state.live_vms)


def test_as_many_stages_as_sections_are_measured() -> None:
    script, _ = begin(4, parallelism={"pipeline_parallel_degree": 3})
    enter(script)
    find(script, links=False)
    pass_time(script, script.timing.settle_s)
    assert not script.count(JobEnded)
    assert script.count(RecipeFixed)


def with_several_workers(num_vms: int, each: int) -> tuple[Script, dict[str, list[str]]]:
    """A job with that many workers on each VM; those of the first measure the sections."""
    script = Script()
    script.submit(resources={"max_nodes": num_vms, "workers_per_node": each})
    script.wait()
    workers = {vm: [f"{vm}.{n}" for n in range(each)] for vm in script.state.vms}
    script.report(*(idle(worker) for worker in next(iter(workers.values()))))
    enter(script)
    tell(script, members(script)[0], stage="sections", total=6)
    return script, workers


def test_newcomers_push_out_nobody_who_measures() -> None:
    """Found: with each VM that joined there was room for fewer of the first one, and their rows were lost."""
    script, workers = with_several_workers(4, 4)
    first, *others = workers.values()
    assert members(script) == first
    script.report(*(idle(worker) for vm in others for worker in vm))
    assert members(script)[:4] == first
    assert members(script) == [*first, *others[0][:2]]


def test_trainers_of_another_protocol_do_not_replace_rank_0() -> None:
    script, workers = begin(2, 0)
    script.report(idle(workers[1]).model_copy(update={"trainer_protocol": 3}))
    enter(script)
    tell(script, workers[1], stage="sections", total=6)
    script.report(idle(workers[0]).model_copy(update={"trainer_protocol": 2}))
    assert members(script) == [workers[1]]


def test_after_two_breaks_a_worker_that_has_measured_goes_on_alone() -> None:
    script, workers = begin(3, 0)
    script.report(idle(workers[1]))
    script.report(idle(workers[2]))
    enter(script, "sections")
    for _ in range(2):
        assert enter(script, "links") == workers[1:]
        tell(script, workers[1], phase=Phase.IDLE, broken="links were not measured")
        tell(script, workers[2], phase=Phase.IDLE, broken="links were not measured")
        if (
            script.state.strikes.count(Kind.PROFILE) == 1
        ):  # the VM that was asked for first comes last, and knows nothing
            script.report(idle(workers[0]))
        pass_time(script, script.timing.suspect_grace_s)
    assert script.state.strikes.count(Kind.PROFILE) == 2
    assert members(script) == workers[1:2]
