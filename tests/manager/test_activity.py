"""What a job is at before its steps, between them and after, as `status`, `follow` and the page say it."""

from __future__ import annotations

from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core.events import StopRequested, VmTerminated
from makara.manager.core.pools.shares import Share
from makara.manager.core.state import Status, vm_of
from makara.manager.service.runtime import Job
from makara.manager.service.views.activity import activity
from makara.manager.service.views.morphs import morphs
from makara.protocol.messages import CheckpointRef, Phase, Profile, WorkerReport
from test_core_calibration import begin, enter, tell


def at(script: Script) -> str:
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    return activity(job)


def test_each_wait_from_the_submission_to_the_first_step_has_words() -> None:
    """Found: `follow` stood still for up to a minute without saying why."""
    script = Script()
    script.submit()
    assert at(script) == "VMs boot: 0 of 2 have joined"
    script.wait()
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    script.report(WorkerReport(worker=workers[0], incarnation=1, phase=Phase.STARTING))
    assert at(script) == "VMs boot: 1 of 2 have joined"
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.STARTING) for w in workers))
    assert at(script) == "trainers start: 0 of 2 are ready"
    script.report(script.change(workers[0], phase=Phase.IDLE))
    assert at(script) == "one worker traces the model and cuts it into sections"
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile), script.change(workers[1], phase=Phase.IDLE))
    assert at(script) == "workers trace the model: 0 of 2 have"
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))
    assert at(script) == "planning for 2 workers"
    script.answer(2, 1)
    assert at(script) == "2x1: 0 of 2 members are ready for it"
    script.prepare()
    assert at(script) == "2x1: its head is opened in the store"
    script.open()
    assert at(script) == "2x1: weights are loaded, 0 of 2 members have theirs"
    script.form()
    assert at(script) == ""
    script.event(StopRequested(now=script.now))
    assert at(script) == "workers publish a checkpoint"
    script.report(*(script.change(w, phase=Phase.HELD) for w in workers))
    assert at(script) == ""


def test_a_job_that_queues_says_so_and_not_that_it_boots_or_profiles() -> None:
    """Found: without a VM, a job said that VMs boot, or that a worker traces the model."""
    script = Script()
    script.submit(resources={"max_nodes": 2, "min_nodes": 2})
    script.wait()
    for vm in script.state.live_vms:
        script.report(WorkerReport(worker=f"{vm.vm}.0", incarnation=1, phase=Phase.IDLE))
    assert script.state.status is Status.PROFILING
    script.share = Share(most={"local": 0}, why="it is first in the queue")
    for vm in script.state.live_vms:
        script.event(VmTerminated(now=script.now, vm=vm.vm))
    script.wait(1.0)
    assert script.state.status is Status.PENDING
    assert at(script) == "waits for VMs: it is first in the queue"


def test_trainers_that_start_are_waited_for_though_no_more_vms_are_requested() -> None:
    script = Script(share=Share(most={"local": 1}, why="others wait"))
    script.submit(resources={"max_nodes": 2})
    script.wait()
    (vm,) = script.state.live_vms
    script.report(WorkerReport(worker=f"{vm.vm}.0", incarnation=1, phase=Phase.STARTING))
    script.wait(1.0)
    assert script.observations.why_no_vm
    assert at(script) == "trainers start: 0 of 1 are ready"


def test_a_plan_that_steps_until_the_next_can_is_said_to_step() -> None:
    """Found: a job in a planned switch seemed to stand still, and the step under way counted as forming."""
    script = Script()
    workers = script.run(4)
    script.extra[vm_of(workers[3])] = {
        "notice_deadline_s": 30.0,
        "notice": "terminate",
        "notices_known": True,
    }
    script.report()
    script.answer(2, 1)
    assert at(script) == "2x1: 0 of 4 members are ready for it; 2x2 steps on"
    script.prepare()
    script.open()
    script.report(*(script.change(w, phase=Phase.RUNNING, generation=1) for w in workers))
    assert at(script) == "2x1: 4 of 4 workers have to end their step first"
    script.wait(10.0)
    script.form(load_s=0.5)
    first, switched = morphs(script.state, {})
    assert "finish" not in first.phases_s
    assert switched.phases_s["form"] == 0.5
    assert switched.phases_s["finish"] >= 9.5


def test_a_calibration_counts_its_sections() -> None:
    script, workers = begin(2, 2)
    enter(script, "survey")
    assert at(script) == "one worker traces the model and cuts it into sections"
    tell(script, workers[0], stage="sections", done=1, total=6)
    assert at(script) == "profiling: 1 of 6 sections measured"
    enter(script, "sections")
    tell(script, workers[1], done=2, total=6)
    assert at(script) == "profiling: 3 of 6 sections measured"
    tell(script, workers[0], stage="links")
    assert at(script) == "profiling: the links between 2 workers"


def test_a_trained_job_exports() -> None:
    script = Script()
    first, _ = script.run(2)
    published = CheckpointRef(step=100, generation=1)
    script.report(script.change(first, step=100, phase=Phase.FINISHED, published=published))
    assert at(script) == "the weights are exported"
