"""What a thousand VMs report is gathered: few decisions, and each reporter is answered."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_service import Desk, desk
from makara.manager import core
from makara.manager.api.agents import AgentConnection
from makara.manager.core.events import (
    AttemptSucceeded,
    Batch,
    Event,
    ReportReceived,
    StopRequested,
    Tick,
)
from makara.manager.service import job_loop
from makara.protocol.messages import At, Beat, Phase, Progress, Report

NUM_VMS = 60


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events that were decided on."""
    events: list[Event] = []

    def decide(state: Any, observations: Any, event: Event, *rest: Any) -> Any:
        events.append(event)
        return core.decide(state, observations, event, *rest)

    monkeypatch.setattr(job_loop, "decide", decide)
    return events


async def joined(here: Desk) -> list[str]:
    await here.submit("j", resources={"max_nodes": NUM_VMS})
    await here.tick()
    vms = here.vms("j")
    await asyncio.gather(*(here.report("j", vm, Phase.STARTING) for vm in vms))
    return vms


async def answered(here: Desk, decided: list[Event], num_vms: int) -> None:
    """The provider has answered for all of them, so that no answer comes between what a test decides."""
    await here.until(lambda: sum(isinstance(event, AttemptSucceeded) for event in decided) == num_vms)


def _besides_answers(decided: list[Event]) -> list[Event]:
    """Without what the provider answers, at times of its own."""
    return [event for event in decided if not isinstance(event, AttemptSucceeded)]


def test_reports_that_come_together_are_decided_on_together(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            assert all(vm.joined for vm in here.service.jobs["j"].state.live_vms)
            decided.clear()
            await asyncio.gather(*(here.report("j", vm) for vm in vms))
            (event,) = _besides_answers(decided)
            assert isinstance(event, Batch)
            assert len(event.events) == NUM_VMS
            assert len(here.service.jobs["j"].observations.last_reports) == NUM_VMS

    asyncio.run(play())


def test_a_job_rests_after_a_decision_and_gathers_meanwhile(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path, rest_factor=1e9, longest_rest_s=3600.0) as here:
            await here.submit("j", resources={"max_nodes": 4})
            await here.tick()
            vms = here.vms("j")
            await answered(here, decided, 4)
            await here.report("j", vms[0])  # after a quiet time: at once
            waiting = []
            for vm in vms[1:]:
                waiting.append(asyncio.create_task(here.report("j", vm)))
                await asyncio.sleep(0)
            assert [vm.joined for vm in here.service.jobs["j"].state.live_vms] == [True, False, False, False]
            await here.service.stop("j")  # decided on at once, after what came before
            await asyncio.gather(*waiting)
            kinds = [type(event) for event in _besides_answers(decided)]
            assert kinds[-2:] == [Batch, StopRequested]

    asyncio.run(play())


def test_heartbeats_without_news_run_no_rule(
    tmp_path: Path, decided: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            await answered(here, decided, NUM_VMS)
            await here.tick()
            ran: list[Event] = []
            monkeypatch.setattr(core, "_RULES", (lambda turn: ran.append(turn.event),))
            await asyncio.gather(*(here.report("j", vm, Phase.STARTING) for vm in vms))
            assert ran == []
            last_reports = here.service.jobs["j"].observations.last_reports
            assert {last_report.at for last_report in last_reports.values()} == {here.clock.now}
            await asyncio.gather(*(here.report("j", vm) for vm in vms))
            assert [type(event) for event in ran] == [Batch]

    asyncio.run(play())


class Socket:
    """An agent's end of a WebSocket, in memory."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[str] = asyncio.Queue()
        self.sent: list[str] = []

    async def receive_text(self) -> str:
        text = await self.incoming.get()
        self.incoming.task_done()
        return text

    async def send_text(self, text: str) -> None:
        self.sent.append(text)

    def count(self, kind: str) -> int:
        return sum(text.startswith(f'{{"type":"{kind}"') for text in self.sent)


def test_a_beat_shows_that_a_vm_lives_and_gets_on(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 2})
            await here.tick()
            vm, _ = here.vms("j")
            await answered(here, decided, 2)
            socket: Any = Socket()
            serving = asyncio.create_task(AgentConnection(here.service, socket, "j", vm).serve())

            async def says(message: Report | Beat) -> None:
                before = len(decided)
                socket.incoming.put_nowait(message.model_dump_json())
                await here.until(lambda: socket.incoming.empty() and len(decided) > before)

            async def beats(count: int) -> None:
                here.sequence += 1
                beat = Beat(sequence=here.sequence, progress=[Progress(count=count, at=At.COMPUTING)])
                socket.incoming.put_nowait(beat.model_dump_json())
                await socket.incoming.join()
                await asyncio.sleep(0)

            await beats(7)  # it refers to nothing
            await says(here.report_of(vm, Phase.RUNNING).model_copy(update={"progress": [Progress(count=1)]}))
            await here.until(lambda: socket.count("ack") == 1)
            observations = here.service.jobs["j"].observations
            assert observations.last_reports[vm].report.progress == [Progress(count=1)]
            num_decided, began = len(decided), here.clock.now
            for count in (1, 2, 2, 2):
                here.clock.now += 10.0
                await beats(count)
                assert len(decided) == num_decided, "a beat waits for the next tick"
                await here.tick()
                num_decided = len(decided)
                observations = here.service.jobs["j"].observations
                assert observations.last_reports[vm].at == here.clock.now
                assert vm not in observations.unheard
            assert observations.last_reports[vm].moved == (began + 20.0,)
            assert observations.at_of(f"{vm}.0") is At.COMPUTING
            assert socket.count("ack") == 1, "an agent need not hear of each"
            here.service.leases = replace(here.service.leases, orphan_timeout_s=0.0)
            await beats(3)
            await here.until(lambda: socket.count("ack") == 2)
            serving.cancel()

    asyncio.run(play())


def test_beats_of_a_job_that_is_set_aside_harm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("cannot decide")

    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j", resources={"max_nodes": 2})
            await here.tick()
            vm = here.vms("j")[0]
            await here.report("j", vm)
            with monkeypatch.context() as patch:
                patch.setattr(job_loop, "decide", fails)
                here.service.agents.beat("j", here.report_of(vm))
                await here.tick()
                assert here.service.jobs["j"].set_aside
                here.service.agents.beat("j", here.report_of(vm))
                await here.tick(1.0)
            await here.tick(100.0)
            here.service.agents.beat("j", here.report_of(vm))
            await here.tick()
            job = here.service.jobs["j"]
            assert not job.set_aside
            assert job.observations.last_reports[vm].report.sequence == here.sequence

    asyncio.run(play())


def test_what_ended_vms_reported_is_forgotten(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            for vm in vms:
                report = here.report_of(vm).model_copy(update={"leaving": "its time is over"})
                await here.service.agents.report("j", report)
            job = here.service.jobs["j"]
            assert not any(vm in job.state.vms.live for vm in vms)
            await here.tick()
            assert not set(vms) & set(job.observations.last_reports)
            assert not set(vms) & set(job.reports)
            await here.report("j", vms[0])
            assert vms[0] not in job.reports

    asyncio.run(play())


def test_a_tick_is_an_event_like_any_other(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            await here.tick()
            assert isinstance(_besides_answers(decided)[-1], Tick)
            await here.report("j", here.vms("j")[0])
            assert isinstance(_besides_answers(decided)[-1], ReportReceived)

    asyncio.run(play())


def test_a_tick_without_news_leaves_a_job_as_it_is(tmp_path: Path) -> None:
    """Found: each tick made every job dirty, and so its whole view for whoever watches it."""

    async def play() -> None:
        async with desk(tmp_path) as here:
            await joined(here)
            await here.tick(0.25)
            job = here.service.jobs["j"]
            before, job.dirty = job.observations, False
            await here.tick(0.25)
            assert not job.dirty
            assert job.observations.unheard is before.unheard

    asyncio.run(play())
