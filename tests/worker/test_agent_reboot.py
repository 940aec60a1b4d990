"""A VM that reboots: its agent is started again in the same folder, and nothing of before runs any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from core_script import Script
from makara.manager.core.events import ReportReceived
from makara.manager.core.facts import EndReason, GenerationClosed, VmEnded, WorkerFailed
from makara.protocol.messages import INCARNATIONS, DeviceInfo, Failure, Phase, Report, WorkerReport
from makara.worker.agent.agent import Agent
from makara.worker.agent.starts import REPORTS, count_start, last_of
from scripted_manager import Manager, ends, play, plays

__all__ = ["play"]  # the fixture


@plays()
async def test_its_reports_and_trainers_are_numbered_above_those_before_and_the_deaths_are_told(
    manager: Manager, agent: asyncio.Task[None]
) -> None:
    await manager.order("train")
    before = await manager.report(lambda report: report.workers[0].phase is Phase.RUNNING)
    assert (before.workers[0].incarnation, before.deaths) == (1, [])
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    await manager.until(lambda: manager.connection is None)  # nothing of it is still on its way
    newest = manager.reports[-1].sequence
    manager.reports.clear()
    again = asyncio.create_task(Agent(manager.boot()).run())
    first = await manager.report(lambda _: True)
    assert first.sequence > newest
    assert [(death.worker, death.phase) for death in first.deaths] == [("v1.0", Phase.EXITED)]
    assert before.workers[0].incarnation < first.deaths[0].incarnation < first.workers[0].incarnation
    await manager.order("train")
    running = await manager.worker(lambda worker: worker.phase is Phase.RUNNING)
    assert running.incarnation == INCARNATIONS + 1
    await manager.order("shutdown")
    await ends(again)


def test_the_job_goes_on_with_it(tmp_path: Path) -> None:
    script = Script()
    worker, other = script.run(2)
    script.report(silent=(script.workers[other].worker.rpartition(".")[0],))
    vm = worker.rpartition(".")[0]
    assert count_start(tmp_path) == 0
    earlier = count_start(tmp_path)
    report = Report(
        vm=vm,
        sequence=earlier * REPORTS + 1,
        orders_version=0,
        address="10.0.0.1",
        devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 30)],
        workers=[WorkerReport(worker=worker, incarnation=earlier * INCARNATIONS, phase=Phase.STARTING)],
        deaths=[last_of(worker, earlier)],
    )
    script.event(ReportReceived(now=script.now, report=report))
    assert script.last(WorkerFailed).message == "its VM was started anew"
    assert script.last(GenerationClosed).reason == f"lost {worker}"
    up = script.change(worker, incarnation=earlier * INCARNATIONS + 1, phase=Phase.IDLE, graph_hash="5ec7")
    report = report.model_copy(update={"sequence": report.sequence + 1, "workers": [up], "deaths": []})
    script.event(ReportReceived(now=script.now, report=report))
    assert (worker, up.incarnation) in script.observations.usable
    assert not script.count(VmEnded)


def test_a_setup_that_fails_after_a_reboot_ends_the_vm() -> None:
    script = Script()
    script.submit()
    script.wait()
    vm = next(iter(script.state.vms))
    failure = Failure(kind="user", message="setup: the command 'x' ended with status 1")
    broken = WorkerReport(worker=f"{vm}.0", incarnation=INCARNATIONS, phase=Phase.EXITED, failure=failure)
    script.report(broken)
    assert script.last(VmEnded).reason is EndReason.LEFT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_an_agent_that_cannot_be_counted_begins_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "agent.starts").symlink_to("/dev/full")
    assert count_start(tmp_path) == 0
