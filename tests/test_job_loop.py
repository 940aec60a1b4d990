"""What a thousand VMs report is gathered: few decisions, and each reporter is answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from in_service import Desk, desk
from makara.manager import core, job_loop
from makara.manager.events import Event, ReportReceived, Tick, Together
from makara.worker.messages import Phase

NUM_VMS = 60


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events that were decided on."""
    events: list[Event] = []

    def decide(state: Any, vitals: Any, event: Event, *rest: Any) -> Any:
        events.append(event)
        return core.decide(state, vitals, event, *rest)

    monkeypatch.setattr(job_loop, "decide", decide)
    return events


async def joined(here: Desk) -> list[str]:
    await here.submit("j", resources={"max_nodes": NUM_VMS})
    await here.tick()
    vms = here.vms("j")
    await asyncio.gather(*(here.report("j", vm, Phase.STARTING) for vm in vms))
    return vms


def test_reports_that_come_together_are_decided_on_together(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            assert all(vm.joined for vm in here.service.jobs["j"].state.live_vms)
            decided.clear()
            await asyncio.gather(*(here.report("j", vm) for vm in vms))
            (event,) = decided
            assert isinstance(event, Together)
            assert len(event.events) == NUM_VMS
            assert len(here.service.jobs["j"].vitals.pulses) == NUM_VMS

    asyncio.run(play())


def test_a_job_rests_after_a_decision_and_gathers_meanwhile(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path, rest_factor=1e9, longest_rest_s=3600.0) as here:
            await here.submit("j", resources={"max_nodes": 4})
            await here.tick()
            vms = here.vms("j")
            await here.report("j", vms[0])  # after a quiet time: at once
            waiting = []
            for vm in vms[1:]:
                waiting.append(asyncio.create_task(here.report("j", vm)))
                await asyncio.sleep(0)
            assert [vm.joined for vm in here.service.jobs["j"].state.live_vms] == [True, False, False, False]
            await here.service.stop("j")  # decided on at once, after what came before
            await asyncio.gather(*waiting)
            kinds = [type(event).__name__ for event in decided[-2:]]
            assert kinds == ["Together", "StopRequested"]

    asyncio.run(play())


def test_heartbeats_without_news_run_no_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            await here.tick()
            ran: list[Event] = []
            monkeypatch.setattr(core, "_RULES", (lambda turn: ran.append(turn.event),))
            await asyncio.gather(*(here.report("j", vm, Phase.STARTING) for vm in vms))
            assert ran == []
            pulses = here.service.jobs["j"].vitals.pulses
            assert {pulse.at for pulse in pulses.values()} == {here.clock.now}
            await asyncio.gather(*(here.report("j", vm) for vm in vms))
            assert [type(event) for event in ran] == [Together]

    asyncio.run(play())


def test_what_ended_vms_reported_is_forgotten(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            vms = await joined(here)
            for vm in vms:
                report = here.report_of(vm).model_copy(update={"leaving": "its time is over"})
                await here.service.report("j", report)
            job = here.service.jobs["j"]
            assert not any(vm in job.state.vms.live for vm in vms)
            await here.tick()
            assert not set(vms) & set(job.vitals.pulses)
            assert not set(vms) & set(job.reports)
            await here.report("j", vms[0])
            assert vms[0] not in job.reports

    asyncio.run(play())


def test_a_tick_is_an_event_like_any_other(tmp_path: Path, decided: list[Event]) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await here.submit("j")
            await here.tick()
            assert isinstance(decided[-1], Tick)
            await here.report("j", here.vms("j")[0])
            assert isinstance(decided[-1], ReportReceived)

    asyncio.run(play())
