"""A VM runs its job's code, and may report any step: only steps that can have been committed are stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core_script import Script
from in_service import FakeProvider, desk
from makara.manager.api.agents import AgentConnection
from makara.manager.service.believed_steps import STEPS_PER_S, Pace, believed
from makara.protocol.messages import Phase, Report, StepMetrics
from test_many_vms import Socket

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
            socket = Socket(*[text] * 1000)
            connection = AgentConnection(here.service, socket, "j", vm)  # type: ignore[arg-type]
            serving = asyncio.create_task(connection.serve())
            await here.until(lambda: any('"type":"ack"' in sent for sent in socket.sent))
            assert socket._incoming.qsize() >= 998
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert here.service.journal.metrics("j") == []

    asyncio.run(play())
