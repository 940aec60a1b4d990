"""A VM runs its job's code, and may report any step: only steps that can have been committed are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from core_script import Script
from in_service import FakeProvider, desk
from makara.manager.api.agents import AgentConnection
from makara.manager.core.events import StopRequested, VmTerminated
from makara.manager.core.state import vm_of
from makara.manager.service.believed_steps import STEPS_PER_S, Pace, believed
from makara.protocol.messages import CheckpointRef, Failure, Phase, Report, StepMetrics
from test_job_loop import Socket

NOW = 1000.0


def rows(steps: Iterable[int], generation: int = 1) -> list[StepMetrics]:
    numbers: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "seconds": 0.1, "samples": 8}
    return [StepMetrics(step=step, generation=generation, **numbers) for step in steps]


def training(steps: int = 100) -> Script:
    script = Script()
    script.run(2, training={"global_batch_size": 8, "steps": steps})
    return script


def said(script: Script, metrics: list[StepMetrics], committed: int, vm: str | None = None) -> Report:
    """The report of a VM whose worker says that it has committed so many steps."""
    name = vm or sorted(script.state.vms)[0]
    report = script._report(name)
    workers = [w.model_copy(update={"phase": Phase.RUNNING, "step": committed}) for w in report.workers]
    return report.model_copy(update={"workers": workers, "metrics": metrics})


def accepted(script: Script, report: Report, pace: Pace | None = None, now: float = NOW) -> list[int]:
    return [row.step for row in believed(script.state, report, pace or Pace(), now)]


def test_steps_that_the_vm_itself_has_committed_are_accepted() -> None:
    script = training()
    assert accepted(script, said(script, rows(range(1, 6)), committed=5)) == [1, 2, 3, 4, 5]


def test_steps_beyond_those_that_the_vm_has_committed_are_refused() -> None:
    script = training()
    assert accepted(script, said(script, rows([1, 2, 3, 50]), committed=2)) == [1, 2]
    nobody = said(script, rows([1, 2, 3]), committed=2).model_copy(update={"workers": []})
    assert accepted(script, nobody) == []


def test_steps_beyond_the_last_of_the_job_are_refused() -> None:
    script = training(steps=100)
    assert accepted(script, said(script, rows([99, 100, 101, 10**6]), committed=10**6)) == [99, 100]


def test_steps_of_a_generation_that_the_vm_is_no_member_of_are_refused() -> None:
    script = training()
    assert accepted(script, said(script, rows([1], generation=7), committed=5)) == []
    report = said(script, rows([1]), committed=5)
    assert accepted(script, report.model_copy(update={"vm": "another-vm0"})) == []


def reformed(script: Script, step: int, opened_only: bool = False) -> None:
    """One of two VMs is lost, and the other goes on from this step."""
    for worker in list(script.workers):
        script.report(script.change(worker, step=40))
    lost, left = sorted(script.workers)
    del script.workers[lost]
    script.event(VmTerminated(now=script.now, vm=vm_of(lost)))
    script.report(script.change(left, phase=Phase.IDLE))
    while script.observations.planning is None:
        script.wait(1.0)
    script.answer(1, 1)
    script.prepare()
    script.open()
    if not opened_only:
        script.form(step=step)


def of_the_other(script: Script, metrics: list[StepMetrics]) -> Report:
    [worker] = script.workers
    return script._report(vm_of(worker)).model_copy(update={"metrics": metrics})


def test_steps_of_a_closed_generation_end_where_a_later_one_went_on() -> None:
    """Found: a VM added thousands of steps to a generation that had ended at step 40."""
    script = training(steps=10**7)
    reformed(script, step=40)
    late = of_the_other(script, rows([*range(30, 50), 10**6]))
    assert accepted(script, late) == [*range(30, 41)]
    hour = of_the_other(script, rows([10**6, 1_800_000]))
    assert accepted(script, hour, Pace(step=40, at=NOW), NOW + 3600) == []


def test_steps_that_were_lost_are_refused_once_a_later_generation_makes_them_again() -> None:
    script = training()
    reformed(script, step=20)
    assert accepted(script, of_the_other(script, rows(range(15, 30)))) == [*range(15, 21)]


def test_steps_of_a_closed_generation_are_accepted_until_another_has_formed() -> None:
    """Its last rows come with or after the word that it broke."""
    script = training()
    reformed(script, step=40, opened_only=True)
    assert script.state.current is not None
    [worker] = script.workers
    script.workers[worker] = script.workers[worker].model_copy(update={"generation": 1, "step": 41})
    assert accepted(script, of_the_other(script, rows(range(38, 45)))) == [38, 39, 40, 41]


def test_steps_before_the_one_that_a_generation_began_from_are_not_its_own() -> None:
    script = training()
    reformed(script, step=40)
    script.report(*(script.change(w, step=43) for w in script.workers))
    assert accepted(script, of_the_other(script, rows(range(38, 45), generation=2))) == [41, 42, 43]


def test_a_generation_that_was_not_opened_has_no_steps() -> None:
    script = training()
    reformed(script, step=40)
    assert script.state.current is not None
    planned = replace(script.state.current, number=3, opened_at=None, formed=None)
    state = script.state.changed(planned=planned, history=(*script.state.history, replace(planned, number=4)))
    report = of_the_other(script, rows([41], generation=3) + rows([41], generation=4))
    assert believed(state, report, Pace(), NOW) == []


def test_the_time_that_a_slow_step_takes_is_not_saved_up() -> None:
    pace, now = Pace(), NOW
    for step in range(1, 100):
        now += 60.0
        assert pace.accept(step, 0, now)
    assert not pace.accept(99 + 2_100, 0, now)
    assert pace.accept(99 + 50_000, 0, now + 100.0), "rows that a trainer dropped"


def test_no_worker_is_believed_to_be_beyond_the_last_step_of_its_job() -> None:
    """Found: status, and the reason of a job's end, named step 10^12."""
    script = training(steps=100)
    worker, *_ = sorted(script.workers)
    beyond = CheckpointRef(generation=1, step=10**12)
    far = script.change(worker, step=10**12, published=beyond)
    script.report(far)
    assert script.observations.newest_step == 100
    killed = {"phase": Phase.EXITED, "failure": Failure(kind="killed", message="gone")}
    script.report(far.model_copy(update=killed))
    assert script.state.progress_step == 100
    assert script.state.published == ()
    assert all(getattr(fact, "step", 0) <= 100 for fact in script.facts)
    script.event(StopRequested(now=script.now))
    script.wait(700.0)
    script.wait(1.0)
    assert script.state.ended is not None
    assert str(10**12) not in script.state.ended.reason


def test_a_generation_that_forms_beyond_the_last_step_of_its_job_forms_at_that() -> None:
    script = training(steps=100)
    reformed(script, step=10**12)
    assert script.state.progress_step == script.observations.newest_step == 100


def test_a_vm_that_says_that_it_has_committed_all_steps_adds_them_at_a_bounded_rate() -> None:
    script, pace = training(steps=10**6), Pace()
    number, now = 0, NOW
    for _ in range(15 * 20):  # 20 reports a second, for 15 s
        report = said(script, rows(range(number + 1, number + 1001)), committed=10**6)
        number = max([number, *accepted(script, report, pace, now)])
        now += 0.05
    assert number <= 2000 + 16 * STEPS_PER_S


def test_what_agents_have_kept_while_the_manager_was_away_is_accepted() -> None:
    """In order, a thousand rows in a report, each of which takes the manager a while."""
    script, pace = training(steps=10**6), Pace()
    now, number = NOW, 0
    while number < 50_000:
        report = said(script, rows(range(number + 1, number + 1001)), committed=50_000)
        found = accepted(script, report, pace, now)
        assert len(found) == 1000
        number, now = found[-1], now + 1000 / STEPS_PER_S


def test_an_agent_that_sends_frames_without_end_is_read_at_a_bounded_rate(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path, FakeProvider()) as here:
            await here.submit("j", resources={"max_nodes": 1})
            await here.tick()
            [vm] = here.vms("j")
            text = here.report_of(vm).model_copy(update={"metrics": rows(range(1, 1001))}).model_dump_json()
            socket = Socket()
            for _ in range(1000):
                socket.incoming.put_nowait(text)
            connection = AgentConnection(here.service, socket, "j", vm)  # type: ignore[arg-type]
            serving = asyncio.create_task(connection.serve())
            await here.until(lambda: any('"type":"ack"' in sent for sent in socket.sent))
            assert socket.incoming.qsize() >= 998
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert here.service.journal.metrics("j") == []

    asyncio.run(play())
