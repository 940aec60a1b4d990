"""A wall clock that is set changes no bound: neither within a manager's life nor over its restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from core_script import Script
from makara.manager.clock import SteadyClock
from makara.manager.config import ServerConfig
from makara.manager.core import Observations
from makara.manager.core.commands import RequestVm
from makara.manager.core.events import ManagerStarted, StopRequested
from makara.manager.core.facts import EndReason, GenerationClosed, JobEnded, VmEnded, VmNoticed
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.service import Service
from makara.manager.service.tokens import Scope, TokenStore
from makara.protocol.messages import NoticeFile
from makara.worker.agent.notices.file import NOTICE_FILE, FileSource

HOUR_S = 3600.0


class Machine:
    """A wall clock, which can be set, and the time since the start, which cannot."""

    def __init__(self) -> None:
        self.uptime_s = 50.0
        self.wall_s = 1e9

    def pass_time(self, seconds: float) -> None:
        self.uptime_s += seconds
        self.wall_s += seconds


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_the_managers_clock_goes_on_evenly_when_the_wall_clock_is_set(jump_s: float) -> None:
    machine = Machine()
    clock = SteadyClock(lambda: machine.wall_s, lambda: machine.uptime_s)
    assert clock() == 1e9
    machine.wall_s += jump_s
    machine.pass_time(7.0)
    assert clock() == 1e9 + 7.0


def test_a_manager_counts_by_that_clock(tmp_path: Path) -> None:
    journal, tokens = SqliteJournal(tmp_path / "journal.sqlite3"), TokenStore(tmp_path / "tokens.sqlite3")
    try:
        assert isinstance(Service(ServerConfig(home=tmp_path), journal, tokens, {}).clock, SteadyClock)
    finally:
        tokens.close()
        journal.close()


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_notice_counts_down_evenly_when_the_wall_clock_is_set(tmp_path: Path, jump_s: float) -> None:
    machine = Machine()
    source = FileSource(tmp_path, lambda: machine.wall_s, lambda: machine.uptime_s)

    def left_s() -> float | None:
        notice = asyncio.run(source.read()).notice
        return notice.left_s if notice is not None else None

    assert left_s() is None
    notice = NoticeFile(deadline_s=30.0, written_at=machine.wall_s)
    (tmp_path / NOTICE_FILE).write_text(notice.model_dump_json())
    machine.pass_time(10.0)
    assert left_s() == 20.0
    machine.wall_s += jump_s
    machine.pass_time(5.0)
    assert left_s() == 15.0


def test_a_manager_that_starts_after_the_clock_was_set_refuses_no_vm(tmp_path: Path) -> None:
    machine = Machine()

    async def start() -> None:
        service = Service(ServerConfig(home=tmp_path), journal, tokens, {})
        await service.start()
        await service.close()

    journal = SqliteJournal(tmp_path / "journal.sqlite3")
    tokens = TokenStore(tmp_path / "tokens.sqlite3", lambda: machine.wall_s)
    try:
        token = tokens.issue(Scope.WORKER, job="j", vm="v", ttl_s=HOUR_S)
        machine.wall_s += 2 * HOUR_S
        asyncio.run(start())
        assert tokens.check(token, Scope.WORKER).vm == "v"
    finally:
        tokens.close()
        journal.close()


def restarted(script: Script, jump_s: float) -> Script:
    """The same job, led by a new manager, whose clock was set."""
    script.now += jump_s
    script.observations = Observations()
    script.event(ManagerStarted(now=script.now))
    return script


def pass_time(script: Script, seconds: int, *silent: str) -> None:
    for _ in range(seconds):
        script.wait(1.0)
        script.report(silent=silent)


both_ways = pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])


@both_ways
def test_a_vm_that_is_silent_after_a_restart_is_missed_after_its_lease(jump_s: float) -> None:
    script = Script(now=1e9)
    _, second = script.run(2)
    restarted(script, jump_s)
    pass_time(script, 14, second[:-2])
    assert script.state.running
    pass_time(script, 4, second[:-2])
    assert script.last(GenerationClosed).reason == f"{second} silent for 15 s"


@both_ways
def test_a_dead_vm_is_given_up_when_its_time_is_over(jump_s: float) -> None:
    script = Script(now=1e9)
    _, second = script.run(2)
    restarted(script, jump_s)
    pass_time(script, int(script.timing.given_up_after_s) - 1, second[:-2])
    assert script.count(VmEnded) == 0
    pass_time(script, 3, second[:-2])
    assert script.last(VmEnded).reason is EndReason.LEASE_EXPIRED


@both_ways
def test_a_stop_ends_in_its_time(jump_s: float) -> None:
    script = Script(now=1e9)
    script.run(2)
    script.event(StopRequested(now=script.now))
    restarted(script, jump_s)
    pass_time(script, 299)
    assert script.count(JobEnded) == 0
    pass_time(script, 3)
    assert script.last(JobEnded).status == "stopped"


@both_ways
def test_a_generation_that_is_not_prepared_is_given_up_in_its_time(jump_s: float) -> None:
    script = Script(now=1e9)
    script.start(2)
    restarted(script, jump_s)
    pass_time(script, 119)
    assert script.count(GenerationClosed) == 0
    pass_time(script, 3)
    assert "not prepared in 120 s" in script.last(GenerationClosed).reason


def test_refused_vms_are_asked_for_after_the_same_waits() -> None:
    script = Script(now=1e9)
    script.submit(resources={"max_nodes": 1})
    script.wait()
    script.refuse()
    restarted(script, -HOUR_S)
    for number, wait_s in enumerate((5, 10, 20), 1):
        assert script.count(RequestVm) == number
        pass_time(script, wait_s - 1)
        assert script.count(RequestVm) == number
        pass_time(script, 2)
        assert script.count(RequestVm) == number + 1
        script.refuse()


@both_ways
def test_a_notice_runs_out_when_its_vm_says_so(jump_s: float) -> None:
    script = Script(now=1e9)
    workers = script.run(2, resources={"max_nodes": 2, "min_nodes": 2})
    doomed = workers[1][:-2]
    script.extra[doomed] = {"notice_deadline_s": 60.0}
    script.report()
    assert script.count(VmNoticed) == 1
    restarted(script, jump_s)
    for left_s in range(60, 0, -1):
        script.wait(1.0)
        script.extra[doomed] = {"notice_deadline_s": float(left_s)}
        script.report()
    assert script.count(VmEnded) == 0
    pass_time(script, 14, doomed)
    assert script.count(VmEnded) == 0
    pass_time(script, 4, doomed)
    assert script.last(VmEnded).reason is EndReason.PREEMPTED
