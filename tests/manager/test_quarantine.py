"""A job that the manager cannot decide about is set aside: not the manager, and no other job."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_service import Desk, FakeConnection, desk
from makara.manager import core
from makara.manager.api.app import create_app
from makara.manager.core.commands import ReleaseVm
from makara.manager.core.events import Batch, ContinueRequested, DrainRequested, Event, ReportReceived
from makara.manager.core.facts import VmNoticed
from makara.manager.service import job_loop
from makara.manager.service.views.job import JobView, job_view
from makara.protocol.messages import Phase

BAD, GOOD = "bad", "good"


class Fault:
    """While it is there, whatever is decided about job `bad` after a report raises."""

    def __init__(self) -> None:
        self.there = True
        self.raised = 0

    def __call__(self, state: Any, observations: Any, event: Event, *rest: Any) -> Any:
        told = isinstance(event, ReportReceived) or (isinstance(event, Batch) and event.events)
        if self.there and state.job == BAD and (told or observations.last_reports):
            self.raised += 1
            raise IndexError("no such device")
        return core.decide(state, observations, event, *rest)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    fault = Fault()
    monkeypatch.setattr(job_loop, "decide", fault)
    return fault


def view(here: Desk, job: str = BAD) -> JobView:
    return job_view(here.service.jobs[job], {}, 0.0)


async def two_jobs(here: Desk) -> None:
    """Both have asked for their two VMs; a VM of `bad` reports what makes deciding fail."""
    for job in (BAD, GOOD):
        await here.submit(job)
    await here.tick()
    await here.until(lambda: len(here.provider.list()) == 4)
    for job in (BAD, GOOD):
        await here.report(job, here.vms(job)[0])


def test_a_fault_sets_one_job_aside_with_its_traceback_and_the_others_go_on(
    tmp_path: Path, fault: Fault
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            shown = view(here)
            assert shown.status == "quarantined"
            assert shown.traceback is not None
            assert "IndexError: no such device" in shown.traceback
            assert "makara stop" in (shown.reason or "")
            await here.tick(1.0)
            await here.report(GOOD, here.vms(GOOD)[1])
            assert [vm.joined for vm in here.service.jobs[GOOD].state.live_vms] == [True, True]
            assert not here.service._has_failed.is_set()
            assert view(here, GOOD).status == "profiling"

    asyncio.run(play())


def test_it_is_taken_up_again_after_a_wait_that_doubles(tmp_path: Path, fault: Fault) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            assert fault.raised == 1
            for wait_s in (10.0, 20.0, 40.0):
                before = fault.raised
                await here.tick(wait_s - 1.0)
                assert fault.raised == before
                await here.tick(1.5)
                assert fault.raised == before + 1
            fault.there = False
            await here.tick(81.0)
            assert view(here).status == "profiling"
            first, second = here.service.jobs[BAD].state.live_vms
            assert (first.joined, second.joined) == (True, False), "what it reported meanwhile counts"

    asyncio.run(play())


def test_results_of_commands_are_held_until_it_is_taken_up(tmp_path: Path, fault: Fault) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            effects, vm = here.service.effects, here.vms(BAD)[0]
            effects.start(BAD, ReleaseVm(key="r", vm=vm))
            await here.until(lambda: not effects._tasks)
            assert here.vms(BAD)[0] == vm, "its termination was not decided on"
            fault.there = False
            await here.tick(11.0)
            await here.until(lambda: vm not in here.vms(BAD))

    asyncio.run(play())


def test_a_stop_has_its_workers_hold_and_then_releases_its_vms(tmp_path: Path, fault: Fault) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            vm, connection = here.vms(BAD)[0], FakeConnection()
            here.service.agents.connect(BAD, vm, connection)
            await here.report(BAD, vm, Phase.RUNNING, generation=1)
            await here.service.stop(BAD)
            assert connection.orders[-1].hold
            await here.tick(1.0)
            assert here.service.jobs[BAD].state.ended is None
            await here.report(BAD, vm, Phase.HELD, generation=1)
            await here.tick(1.0)
            assert view(here).status == "stopped"
            assert "set aside" in (view(here).reason or "")
            assert connection.orders[-1].action == "shutdown"
            await here.until(lambda: len(here.provider.list()) == 2)

    asyncio.run(play())


def test_a_stop_ends_it_after_the_bound_or_at_the_second_word(tmp_path: Path, fault: Fault) -> None:
    async def play(again: bool, name: str) -> None:
        async with desk(tmp_path / name) as here:
            await two_jobs(here)
            await here.report(BAD, here.vms(BAD)[0], Phase.RUNNING, generation=1)
            await here.service.stop(BAD)
            if again:
                await here.service.stop(BAD)
            else:
                await here.tick(299.0)
                assert here.service.jobs[BAD].state.ended is None
                await here.tick(2.0)
            assert view(here).status == "stopped"

    asyncio.run(play(again=True, name="again"))
    asyncio.run(play(again=False, name="late"))


def damage(home: Path, change: str, where: str) -> None:
    with sqlite3.connect(home / "journal.sqlite3") as database:
        assert database.execute(f"UPDATE facts SET fact = {change} WHERE {where}").rowcount == 1
    database.close()


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_journal_with_an_unreadable_fact_of_one_job_starts_the_others(
    tmp_path: Path, sequence: int
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            for job in (BAD, GOOD):
                await here.submit(job)
            await here.tick()
            await here.until(lambda: len(here.provider.list()) == 4 and not here.service.effects._tasks)
            provider = here.provider
        damage(tmp_path, "'{}'", f"job = '{BAD}' AND sequence = {sequence}")
        async with desk(tmp_path, provider) as here:
            assert view(here).status == "quarantined"
            assert f"fact {sequence} of its journal" in (view(here).traceback or "")
            connection = FakeConnection()
            for vm in (f"{BAD}-vm0", f"{BAD}-vm1"):
                here.service.agents.connect(BAD, vm, connection)
                await here.report(BAD, vm)
            assert connection.orders == [], "nobody knows what it was told"
            await here.report(GOOD, here.vms(GOOD)[0])
            await here.tick(1.0)
            await here.service.watches["local"].compare(provider.list())
            assert len(provider.list()) == 4, "a VM may be one of those that cannot be read of"
            assert view(here, GOOD).status != "quarantined"
            await here.service.stop(BAD)
            assert connection.orders[-1].action == "shutdown"
            await here.until(lambda: not here.service.effects._tasks)
            await here.service.watches["local"].compare(provider.list())
            await here.until(lambda: not any(vm.startswith(BAD) for vm in provider.vms))
        async with desk(tmp_path, provider) as here:
            assert view(here).status == "stopped"

    asyncio.run(play())


def test_a_fact_that_would_not_read_back_sets_its_job_aside_and_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(state: Any, observations: Any, event: Event, *rest: Any) -> Any:
        decision = core.decide(state, observations, event, *rest)
        if state.job != BAD or not isinstance(event, ReportReceived):
            return decision
        worse = VmNoticed.model_construct(fact="vm_noticed", at=event.now, vm="v", deadline=float("inf"))
        return core.Decision(
            (*decision.facts, worse), decision.commands, decision.observations, decision.state
        )

    monkeypatch.setattr(job_loop, "decide", infinite)

    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            stored = [entry.fact.fact for entry in here.service.journal.facts(BAD)]
            assert view(here).status == "quarantined"
            assert "vm_joined" not in stored
            assert "vm_joined" in [entry.fact.fact for entry in here.service.journal.facts(GOOD)]
        async with desk(tmp_path) as here:
            assert view(here).status != "quarantined"

    asyncio.run(play())


# ---- what users are answered -------------------------------------------------------------------------------


async def posted(here: Desk, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """The API's answer to the administrator."""
    token = here.service.tokens.ensure_admin(here.service.config.admin_token_file)
    transport = httpx.ASGITransport(create_app(here.service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/api/v1") as client:
        return await client.post(path, json=body, headers={"Authorization": f"Bearer {token}"})


def says_why(answer: httpx.Response, error: str) -> bool:
    assert answer.status_code == 409, answer.text
    told: str = answer.json()["detail"]
    return error in told and "tries again by itself" in told


def test_what_is_asked_of_a_job_that_is_set_aside_is_refused_with_the_reason(
    tmp_path: Path, fault: Fault
) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            assert says_why(await posted(here, f"/vms/{here.vms(BAD)[0]}/drain"), "no such device")

    asyncio.run(play())


def test_what_sets_a_job_aside_as_it_is_asked_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(state: Any, observations: Any, event: Event, *rest: Any) -> Any:
        if isinstance(event, ContinueRequested | DrainRequested):
            raise IndexError("no such device")
        return core.decide(state, observations, event, *rest)

    monkeypatch.setattr(job_loop, "decide", decide)

    async def play() -> None:
        async with desk(tmp_path) as here:
            store = (tmp_path / "store").as_uri()
            await here.submit(BAD, checkpoint={"uri": store})
            await here.tick()
            assert says_why(await posted(here, f"/vms/{here.vms(BAD)[0]}/drain"), "no such device")
            await here.service.stop(BAD)
            while here.service.jobs[BAD].state.ended is None:
                await here.until(lambda: not here.service.effects._tasks)
                await here.tick(1.0)
            assert says_why(await posted(here, f"/jobs/{BAD}/resume", {}), "no such device")

    asyncio.run(play())
