"""A checkpoint that cannot be read is set aside with words, and counts among no others from then on."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script
from makara.manager.cli.progress import how_it_goes_on
from makara.manager.core.commands import DeleteCheckpoint, OpenHead
from makara.manager.core.events import ContinueRequested, HeadSeen, ResumeRequested, StopRequested
from makara.manager.core.facts import (
    CheckpointDamaged,
    CheckpointPublished,
    CheckpointRetired,
    GenerationFormed,
    GenerationOpened,
    PersonNeeded,
    Resumption,
    WorkerFailed,
)
from makara.manager.core.orders import orders
from makara.manager.core.state import Status
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import JobView, job_view
from makara.protocol.messages import (
    CheckpointRef,
    DamagedCheckpoint,
    Failure,
    Formed,
    Phase,
    WorkerReport,
)

WHY = "j/sections/35-g1/0.0.safetensors in file:///s: 1024 bytes, 4096 were written"
NONE = "none of the checkpoints of job j can be read: that of step 35: torn"


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def shown(script: Script) -> JobView:
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    return job_view(job, {}, 0.0)


def stopped(*steps: int, keep: int = 3) -> Script:
    """A job that was stopped after it published these steps."""
    script = Script()
    workers = script.run(2, checkpoint={"uri": "file:///s", "interval": 1, "keep_latest_k": keep})
    for step in steps:
        script.report(script.change(workers[0], step=step, published=ref(step)))
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, step=steps[-1], phase=Phase.HELD) for w in workers))
    assert script.state.status is Status.STOPPED
    return script


def resumed(script: Script) -> list[str]:
    """It goes on, and the head is open with all that it listed; returns its workers."""
    script.workers.clear()
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=2))
    listed = [*script.state.published, *(found.checkpoint for found in script.state.damaged)]
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    idle: dict[str, Any] = {"incarnation": 1, "phase": Phase.IDLE, "graph_hash": "5ec7"}
    script.report(*(WorkerReport(worker=w, **idle) for w in workers))
    script.answer(2, 1)
    script.prepare()
    script.open(*sorted(listed, key=lambda c: c.age_rank, reverse=True))
    return workers


def form(script: Script, step: int, *damaged: CheckpointRef) -> None:
    """The generation forms from the checkpoint of this step, after these could not be read."""
    current = script.state.current
    assert current is not None
    skipped = [DamagedCheckpoint(checkpoint=checkpoint, why=WHY) for checkpoint in damaged]
    formed = Formed(generation=current.number, step=step, rung="store", phases_s={}, skipped=skipped)
    running: dict[str, Any] = {
        "phase": Phase.RUNNING,
        "generation": current.number,
        "formed": formed,
        "step": step,
    }
    script.report(*(script.change(w, **running) for w, _ in current.incarnations))
    assert script.state.status is Status.RUNNING


def test_a_damaged_newest_checkpoint_is_an_event_and_a_note_and_the_step_is_the_true_one() -> None:
    script = stopped(31, 33, 35)
    resumed(script)
    form(script, 33, ref(35))
    told = script.last(CheckpointDamaged)
    assert (told.checkpoint, told.instead, told.why) == (ref(35), ref(33), WHY)
    assert script.last(GenerationFormed).lost_steps == 2
    view = shown(script)
    note = f"the checkpoint of step 35 is damaged, and training went on from that of step 33: {WHY}"
    assert note in view.notes
    assert [checkpoint.step for checkpoint in view.checkpoints] == [33, 31]
    assert script.state.base == ref(33)
    script.report()
    assert script.count(CheckpointDamaged) == 1


def test_two_damaged_checkpoints_are_told_each_and_what_was_read_is_named() -> None:
    script = stopped(31, 33, 35)
    resumed(script)
    form(script, 31, ref(35), ref(33))
    told = [fact for fact in script.facts if isinstance(fact, CheckpointDamaged)]
    assert [(fact.checkpoint.step, fact.instead.step) for fact in told] == [(35, 31), (33, 31)]
    assert script.state.published == (ref(31),)
    assert script.state.base == ref(31)


def test_a_damaged_checkpoint_is_never_offered_again_though_the_head_lists_it() -> None:
    script = stopped(33, 35)
    workers = resumed(script)
    form(script, 33, ref(35))
    published = script.count(CheckpointPublished)
    script.event(HeadSeen(now=script.now, generation=2, checkpoints=(ref(35), ref(33))))
    script.report(script.change(workers[0], published=ref(35)))
    assert script.count(CheckpointPublished) == published
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, step=33, phase=Phase.HELD) for w in workers))
    assert script.state.status is Status.STOPPED
    assert script.state.ended is not None
    assert "not saved" not in script.state.ended.reason
    assert how_it_goes_on(shown(script).model_dump()).startswith("goes on from step 33 of 100 with")
    resumed(script)
    assert script.last(OpenHead).checkpoints == (ref(33),)
    assert script.last(GenerationOpened).checkpoints == (ref(33),)


def test_steps_before_that_of_a_damaged_checkpoint_are_still_to_be_saved() -> None:
    script = stopped(33, 35)
    workers = resumed(script)
    form(script, 33, ref(35))
    script.report(*(script.change(w, step=34) for w in workers))
    assert script.state.saved_step == 33
    script.event(StopRequested(now=script.now))
    assert all(orders(script.state, w[:-2]).hold for w in workers)
    script.report(*(script.change(w, step=34, phase=Phase.HELD, published=ref(34, 2)) for w in workers))
    assert script.state.published == (ref(33), ref(34, 2))


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept() -> None:
    script = stopped(31, 33, 35, keep=2)
    assert script.state.published == (ref(33), ref(35))
    first, _ = resumed(script)
    form(script, 33, ref(35))
    script.report(script.change(first, step=34, published=ref(34, 2)))
    assert script.state.published == (ref(33), ref(34, 2))
    assert [found.checkpoint for found in script.state.damaged] == [ref(35)]
    script.report(script.change(first, step=36, published=ref(36, 2)))
    assert script.state.damaged == ()
    assert script.last(CheckpointRetired).checkpoint == ref(35)
    deleted = [command for command in script.commands if isinstance(command, DeleteCheckpoint)]
    assert ref(35) not in [command.checkpoint for command in deleted], "the head has it as its base: sweeps"
    assert not any("damaged" in note for note in shown(script).notes)


def test_nothing_is_retired_until_workers_have_read_what_a_generation_starts_from() -> None:
    """With `keep_latest_k: 1` the older one is all that is left where the newest turns out to be damaged."""
    script = Script()
    workers = script.run(2, checkpoint={"uri": "file:///s", "interval": 1, "keep_latest_k": 1})
    script.report(script.change(workers[0], step=33, published=ref(33)))
    script.event(StopRequested(now=script.now))
    script.report(*(script.change(w, step=33, phase=Phase.HELD) for w in workers))
    script.workers.clear()
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=2))
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    idle: dict[str, Any] = {"incarnation": 1, "phase": Phase.IDLE, "graph_hash": "5ec7"}
    script.report(*(WorkerReport(worker=w, **idle) for w in workers))
    script.answer(2, 1)
    script.prepare()
    script.open(ref(35), ref(33))  # the newest was published by a VM that had not heard of the end
    script.wait(1.0)
    assert script.state.published == (ref(33), ref(35))
    form(script, 33, ref(35))
    assert script.state.published == (ref(33),)
    assert script.count(DeleteCheckpoint) == 0


def fail(script: Script) -> None:
    failure = Failure(kind="unreadable", message=NONE)
    workers = list(script.workers)
    script.report(*(script.change(w, phase=Phase.EXITED, failure=failure) for w in workers))


@pytest.mark.parametrize("how", [Resumption.AGAIN, Resumption.RESTART])
def test_where_no_checkpoint_can_be_read_a_person_is_asked_and_nothing_is_lost_until_then(
    how: Resumption,
) -> None:
    script = stopped(33, 35)
    resumed(script)
    fail(script)
    assert script.state.status is Status.WAITING
    assert script.count(PersonNeeded) == 1
    assert script.last(PersonNeeded).reason == NONE
    assert script.last(WorkerFailed).kind == "unreadable"
    assert shown(script).reason == f"waits for a person: {NONE}"
    assert script.state.published == (ref(33), ref(35))
    script.event(ResumeRequested(now=script.now, how=how))
    assert script.state.status is not Status.WAITING
    assert script.state.restarting == (how is Resumption.RESTART)
    assert script.state.published == (() if script.state.restarting else (ref(33), ref(35)))


def test_nobody_is_asked_for_a_generation_that_another_has_followed() -> None:
    script = stopped(33, 35)
    first, _ = resumed(script)
    form(script, 33, ref(35))
    failure = Failure(kind="unreadable", message=NONE)
    script.report(script.change(first, generation=0, phase=Phase.EXITED, failure=failure))
    assert script.last(WorkerFailed).kind == "unreadable"
    assert script.count(PersonNeeded) == 0


def test_a_job_that_is_to_stop_ends_where_no_checkpoint_can_be_read() -> None:
    script = stopped(33, 35)
    resumed(script)
    script.event(StopRequested(now=script.now))
    fail(script)
    assert script.state.status is Status.STOPPED
    assert script.state.ended is not None
    assert NONE in script.state.ended.reason


def test_what_resume_says_holds_though_only_workers_read_the_newest_checkpoint() -> None:
    several, one = (shown(stopped(*steps)).model_dump() for steps in ((31, 33, 35), (35,)))
    assert how_it_goes_on(several).startswith(
        "goes on from step 35 of 100 (step 33 if that checkpoint is damaged) with up to 2 VMs"
    )
    assert how_it_goes_on(one).startswith("goes on from step 35 of 100 with up to 2 VMs")
