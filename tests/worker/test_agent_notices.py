"""An agent under notice: what it tells its manager, and when it lets its cloud go ahead."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from makara.protocol.messages import NoticeSource
from metadata import AwsMetadata, AzureMetadata, serving
from scripted_manager import TIMEOUT_S, Manager, ends, play, plays, running

__all__ = ["play"]  # the fixture

Agent = asyncio.Task[None]


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    async with asyncio.timeout(TIMEOUT_S):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_notice_of_aws_is_reported_and_so_is_its_end(play: Callable[..., None]) -> None:
    service = AwsMetadata()

    async def scenario(manager: Manager, agent: Agent) -> None:
        await manager.order("train")
        await manager.report(lambda report: report.notices_known and report.notice_deadline_s is None)
        service.interrupt("terminate", 100.0)
        noticed = await manager.report(lambda report: report.notice == "terminate")
        assert noticed.notice_deadline_s is not None
        assert 0.0 < noticed.notice_deadline_s <= 100.0
        service.action = None
        manager.reports.clear()
        gone = await manager.report(lambda report: report.notice_deadline_s is None)
        assert gone.notices_known
        assert not agent.done()

    with serving(service):
        play(scenario, notices=NoticeSource(kind="aws", metadata_url=service.url))


def test_a_rebalance_recommendation_is_reported_as_a_risk(play: Callable[..., None]) -> None:
    service = AwsMetadata()

    async def scenario(manager: Manager, _agent: Agent) -> None:
        await manager.order("train")
        await manager.report(lambda report: report.notices_known and not report.at_risk)
        service.rebalance = {"noticeTime": "2026-01-01T00:00:00Z"}
        found = await manager.report(lambda report: report.at_risk)
        assert found.notice_deadline_s is None

    with serving(service):
        play(scenario, notices=NoticeSource(kind="aws", metadata_url=service.url))


@plays(notices=NoticeSource(kind="azure", metadata_url="http://127.0.0.1:1"))
async def test_a_cloud_that_cannot_be_asked_disturbs_nothing(manager: Manager, agent: Agent) -> None:
    await running(manager)
    assert not any(report.notices_known for report in manager.reports)
    assert not agent.done()


def test_an_eviction_is_acknowledged_once_the_trainers_have_handed_over(play: Callable[..., None]) -> None:
    service = AzureMetadata()

    async def scenario(manager: Manager, _agent: Agent) -> None:
        await running(manager)
        service.announce("Preempt")
        await manager.report(lambda report: report.notice == "Preempt")
        asked = service.num_asked
        await until(lambda: service.num_asked > asked + 1)
        assert service.started == []
        await manager.order("idle")
        await until(lambda: service.started == ["e-1"])

    with serving(service):
        play(scenario, mode="leaver", notices=NoticeSource(kind="azure", metadata_url=service.url))


def test_an_eviction_is_acknowledged_when_the_manager_releases_the_vm(play: Callable[..., None]) -> None:
    service = AzureMetadata()

    async def scenario(manager: Manager, agent: Agent) -> None:
        await manager.order("train")
        service.announce("Preempt")
        await manager.report(lambda report: report.notice == "Preempt")
        await manager.order("shutdown")
        await ends(agent)
        assert service.started == ["e-1"]

    with serving(service):
        play(scenario, notices=NoticeSource(kind="azure", metadata_url=service.url))


@plays(notices=NoticeSource(kind="none", sigterm_s=3600.0))
async def test_sigterm_is_a_notice_where_the_boot_file_says_so(manager: Manager, agent: Agent) -> None:
    await running(manager)
    os.kill(os.getpid(), signal.SIGTERM)
    noticed = await manager.report(lambda report: report.notice == "SIGTERM")
    assert noticed.notice_deadline_s is not None
    assert not agent.done()
    await manager.order("shutdown")
    await ends(agent)


@plays(notices=NoticeSource(kind="none", sigterm_s=0.3))
async def test_a_vm_that_nobody_releases_ends_when_its_sigterm_runs_out(
    manager: Manager, agent: Agent
) -> None:
    await manager.order("train")
    os.kill(os.getpid(), signal.SIGTERM)
    await ends(agent)


@plays()
async def test_sigterm_ends_an_agent_at_once_where_the_boot_file_does_not(
    manager: Manager, agent: Agent
) -> None:
    await running(manager)
    os.kill(os.getpid(), signal.SIGTERM)
    await ends(agent)
    assert not any(report.notice for report in manager.reports)
