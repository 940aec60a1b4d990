"""VMs that are lost while they train, again and again at one step: pauses grow, then a person is asked."""

from __future__ import annotations

import pytest
from core_script import RECIPE, Script
from makara.manager.core.events import ConnectionClosed, ResumeRequested, VmTerminated
from makara.manager.core.facts import EndReason, PersonNeeded, Resumption
from makara.manager.core.state import vm_of
from makara.manager.core.strikes.table import Kind
from makara.protocol.messages import Phase, WorkerReport


def train_on(script: Script, worker: str, step: int = 0) -> None:
    """A generation forms on this worker alone, and commits `step` steps."""
    ready = WorkerReport(worker=worker, incarnation=1, phase=Phase.IDLE, graph_hash=RECIPE.graph_hash)
    script.report(ready)
    if script.state.planned is None:
        script.wait(5.0)
    script.answer(1, 1)
    script.prepare()
    script.open()
    script.form()
    script.report(script.change(worker, step=step))


def lose(script: Script, *vms: str) -> None:
    """Their provider says that they are gone, and does not say why."""
    for vm in vms:
        script.event(VmTerminated(now=script.now, vm=vm))
        script.workers = {name: it for name, it in script.workers.items() if vm_of(name) != vm}


def pauses_until_a_person_is_asked(
    script: Script, worker: str, *, steps: tuple[int, ...] = ()
) -> list[float]:
    """How long after each loss the next VM is asked for; in each life the job comes as far as `steps`."""
    pauses = list[float]()
    for number in range(20):
        lose(script, vm_of(worker))
        lost_at, before = script.now, set(script.state.vms)
        while script.state.waiting is None and set(script.state.vms) == before:
            script.wait(1.0)
        if script.state.waiting is not None:
            break
        pauses.append(script.now - lost_at)
        worker = f"{next(vm for vm in script.state.vms if vm not in before)}.0"
        train_on(script, worker, steps[number] if number < len(steps) else 0)
    return pauses


def test_a_sample_that_ends_its_machine_has_pauses_grow_and_then_a_person_asked() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker)
    assert pauses == [1.0, 5.0, 10.0, 20.0, 40.0]
    asked = script.last(PersonNeeded)
    assert "lost 6 times in a row before step 1 was committed" in asked.reason
    assert asked.offers == (Resumption.AGAIN,)
    assert not script.state.live_vms  # waiting costs nothing
    script.wait(100_000.0)
    assert not script.state.live_vms


def test_a_person_who_has_it_go_on_begins_the_count_anew() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses_until_a_person_is_asked(script, worker)
    before = set(script.state.vms)
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    script.wait(1.0)
    (vm,) = set(script.state.vms) - before
    train_on(script, f"{vm}.0")
    assert len(pauses_until_a_person_is_asked(script, f"{vm}.0")) == 5


def test_steps_that_were_done_before_are_no_progress_of_lost_vms() -> None:
    """It goes on from an older checkpoint, and comes to the same step each time."""
    script = Script()
    worker = script.run(1)[0]
    script.report(script.change(worker, step=7))
    assert pauses_until_a_person_is_asked(script, worker, steps=(7, 7, 7, 7, 7)) == [
        1.0,
        5.0,
        10.0,
        20.0,
        40.0,
    ]
    assert "before step 8 was committed" in script.last(PersonNeeded).reason


def test_losses_with_new_steps_in_between_are_free() -> None:
    script = Script()
    worker = script.run(1)[0]
    pauses = pauses_until_a_person_is_asked(script, worker, steps=tuple(range(1, 11)))
    assert pauses[:11] == [1.0] * 11
    assert pauses[11:] == [5.0, 10.0, 20.0, 40.0]


def test_vms_that_are_lost_together_are_lost_once() -> None:
    script = Script()
    workers = script.run(4)
    for worker in workers:
        script.wait(5.0)
        lose(script, vm_of(worker))
    assert script.state.strikes.count(Kind.LOST_VM) == 1
    assert script.state.waiting is None


@pytest.mark.parametrize("end", ["left", "lease"])
def test_however_a_machine_ends_it_counts(end: str) -> None:
    script = Script()
    worker = script.run(1)[0]
    if end == "left":
        script.extra[vm_of(worker)] = {"leaving": "its agent was told to end"}
        script.report()
    else:
        script.event(ConnectionClosed(now=script.now, vm=vm_of(worker)))
        for _ in range(int(script.timing.given_up_after_s / 5.0) + 4):
            script.wait(5.0)
    assert script.state.vms[vm_of(worker)].reason in (EndReason.LEFT, EndReason.LEASE_EXPIRED)
    assert script.state.strikes.count(Kind.LOST_VM) == 1


def test_a_notice_that_a_machine_gives_itself_explains_nothing() -> None:
    """A job's code can tell its agent to end."""
    script = Script()
    worker = script.run(1)[0]
    script.extra[vm_of(worker)] = {"notice_deadline_s": 30.0}
    script.report()
    lose(script, vm_of(worker))
    assert script.state.strikes.count(Kind.LOST_VM) == 1
