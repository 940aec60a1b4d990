"""The agent against a manager that a test scripts, with trainers that only pretend."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import tarfile
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from makara.protocol.archives import BundleBounds
from makara.protocol.bounds import MOST_METRICS
from makara.protocol.log_tail import tail
from makara.protocol.messages import At, Credential, Phase, Progress, Report, ReportAck, StepMetrics
from makara.worker.agent.backoff import Backoff
from makara.worker.agent.reports import metrics_backlog
from managers import archive
from scripted_manager import TIMEOUT_S, Manager, ends, play, plays, running

__all__ = ["play"]  # the fixture


@plays()
async def test_it_joins_with_its_secret_and_comes_back_with_the_token_that_it_was_given(
    manager: Manager,
) -> None:
    await manager.send(Credential(token="mine", valid_for_s=60.0))
    await manager.order()
    await manager.worker(lambda worker: worker.phase is Phase.IDLE)
    assert manager.connection is not None
    await manager.connection.close(1012)
    await manager.until(lambda: len(manager.tokens) == 2)
    assert manager.tokens == ["join-me", "mine"]
    assert (manager.folder / "worker.token").stat().st_mode & 0o777 == 0o600


@plays()
async def test_it_comes_back_however_closely_a_change_precedes_the_end_of_its_connection(
    manager: Manager,
) -> None:
    for hops in range(16):  # of the event loop, that the agent and this manager share
        await manager.order()
        connection, manager.connection = manager.connection, None
        assert connection is not None
        for _ in range(hops):
            await asyncio.sleep(0)
        connection.transport.abort()


@plays()
async def test_a_change_is_reported_at_once_and_old_orders_are_passed_over(manager: Manager) -> None:
    await manager.order()
    await manager.order("train")
    found = await manager.worker(lambda worker: worker.phase is Phase.RUNNING)
    assert (found.worker, found.incarnation, found.step) == ("v1.0", 1, 2)
    await manager.order("idle", version=1)
    await manager.order("train")
    await manager.worker(lambda worker: worker.step == 4)
    steps = [report.workers[0].step for report in manager.reports]
    assert steps == sorted(steps)
    assert manager.reports[-1].orders_version == 4


def test_metrics_are_sent_once_on_a_connection_and_on_the_next_until_the_manager_has_them(
    play: Callable[..., None],
) -> None:
    def steps(report: Report) -> list[int]:
        return [metrics.step for metrics in report.metrics]

    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order()
        first = await manager.report(lambda report: steps(report) == [1])
        await manager.order()
        await manager.report(lambda report: steps(report) == [2])
        await manager.send(ReportAck(sequence=first.sequence))
        await manager.order()
        await manager.report(lambda report: steps(report) == [3])
        assert manager.connection is not None
        last = max(report.sequence for report in manager.reports)
        await manager.connection.close(1012)
        again = await manager.report(lambda report: report.sequence > last)
        assert steps(again) == [2, 3]

    play(scenario)


def test_an_acknowledgement_says_nothing_of_what_was_not_sent_yet() -> None:
    backlog, step = metrics_backlog(), metrics(24)
    assert backlog.take(1, 1 << 20) == []
    backlog.add(step)
    backlog.acknowledge(1)
    assert backlog.take(2, 1 << 20) == [step]


def test_metrics_of_a_long_time_without_a_manager_go_in_several_reports() -> None:
    backlog, steps = metrics_backlog(), [metrics(n) for n in range(MOST_METRICS + 2)]
    for step in steps:
        backlog.add(step)
    assert backlog.take(1, 1 << 24) == steps[:MOST_METRICS]
    backlog.acknowledge(1)
    assert backlog.take(2, 1 << 24) == steps[MOST_METRICS:]


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, generation=7, loss=1.0, grad_norm=1.0, seconds=1.0, samples=1)


@plays()
async def test_beats_tell_how_far_a_trainer_has_got(manager: Manager) -> None:
    await manager.drop()
    manager.heartbeat_s = 0.05  # a trainer's beat alone is no news
    await manager.order()
    found = await manager.report(lambda report: report.progress != [Progress()] and bool(report.progress))
    assert found.progress == [Progress(count=found.workers[0].step, at=At.DATA)]


@plays()
async def test_without_news_only_beats_are_sent_and_each_connection_begins_with_a_report(
    manager: Manager,
) -> None:
    await manager.drop()  # the agent joins anew
    manager.heartbeat_s, manager.takes_beats = 0.02, True
    acknowledging = asyncio.create_task(manager.acknowledge_all())
    version = await manager.order("train")
    await manager.worker(lambda worker: worker.step == version)
    await manager.until(lambda: bool(manager.beats) and manager.beats[-1].progress[0].count == version)
    version = await manager.order("train")
    await manager.worker(lambda worker: worker.step == version)  # news come as a report
    await manager.until(lambda: manager.beats[-1].progress[0].count == version)
    told, beats = len(manager.reports), len(manager.beats)
    await manager.until(lambda: len(manager.beats) >= beats + 20)
    assert len(manager.reports) == told
    numbers = [message.sequence for message in manager.beats]
    assert numbers == sorted(numbers)
    assert manager.beats[beats].sequence > manager.reports[-1].sequence
    await manager.drop()
    await manager.until(lambda: len(manager.reports) > told)
    assert manager.reports[-1].workers[0].step == version
    acknowledging.cancel()


@plays()
async def test_a_manager_that_knows_no_beats_gets_reports(manager: Manager) -> None:
    await manager.drop()
    manager.heartbeat_s = 0.02
    await manager.until(lambda: len(manager.reports) > 20)
    assert not manager.beats


@pytest.mark.parametrize("mode", ["plain", "holding"])
def test_stacks_are_shown_when_asked_for_until_the_manager_has_them(
    play: Callable[..., None], mode: str
) -> None:
    """Also those of a trainer that lets no other thread of it run."""

    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order()
        await manager.worker(lambda worker: worker.step == 1)
        await running(manager)
        assert not manager.reports[-1].stacks
        await manager.order("train", stacks=3)
        shown = await manager.report(lambda report: bool(report.stacks))
        (stacks,) = shown.stacks
        assert (stacks.worker, stacks.number) == ("v1.0", 3)
        where, _, threads = stacks.text.partition("\n\n")
        assert re.fullmatch(r"in \w+, .*\.py line \d+", where)
        assert "fake_trainer.py" in threads
        assert threads in (manager.folder / "v1.0.log").read_text()
        await manager.send(ReportAck(sequence=shown.sequence))
        await manager.order("train", stacks=3)
        version = manager.reports[-1].orders_version
        await manager.report(lambda report: report.orders_version > version and not report.stacks)

    play(scenario, mode=mode)


@plays()
async def test_a_trainer_that_the_manager_gave_up_is_ended_and_the_next_is_not(manager: Manager) -> None:
    await manager.order()
    await manager.worker(lambda worker: worker.step == 1)
    await manager.order(given_up={"v1.0": 1})
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert (dead.incarnation, dead.failure.kind) == (1, "stuck")
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.step == 2)
    await manager.order(given_up={"v1.0": 1})
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.step == 3)


@plays()
async def test_an_order_to_shut_down_ends_it(manager: Manager, agent: asyncio.Task[None]) -> None:
    await manager.order()
    await manager.worker(lambda worker: worker.phase is Phase.IDLE)
    await manager.order("shutdown")
    await ends(agent)


@plays()
async def test_an_orphan_has_its_trainers_hold_before_it_ends(
    manager: Manager, agent: asyncio.Task[None]
) -> None:
    await running(manager)
    await manager.order("train", orphan_timeout_s=1.0)
    await manager.close()
    await ends(agent)
    assert (manager.folder / "held").exists()


@pytest.mark.parametrize("lease_s", [0.3, 0.6])
@plays(mode="silent")
async def test_a_trainer_without_beats_is_killed_and_replaced(manager: Manager, lease_s: float) -> None:
    """Found: with a lease as short as 0.3 s, an agent took itself for suspended each time that it looked."""

    await manager.order(lease_s=lease_s)
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert (dead.incarnation, dead.failure.kind) == (1, "lease")
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)


@plays(mode="late")
async def test_a_trainer_that_takes_long_to_start_is_left_alone(manager: Manager) -> None:
    manager.heartbeat_s = 0.05
    await manager.order(lease_s=0.1)
    await manager.until(lambda: len(manager.reports) > 20)  # many leases later
    await manager.order()
    await manager.worker(lambda worker: worker.phase is Phase.IDLE)
    assert {report.workers[0].incarnation for report in manager.reports} <= {0, 1}


@plays(mode="survived")
async def test_a_death_is_seen_although_a_child_keeps_the_socket(manager: Manager) -> None:
    await manager.order()
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert dead.failure.exit_code == 3
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)


@pytest.mark.parametrize("mode", ["parent", "silent parent"])
def test_what_a_trainers_code_started_ends_with_it(play: Callable[..., None], mode: str) -> None:
    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        await manager.order(lease_s=20.0)
        for name in ("plain", "daemon", "clean"):
            await manager.until_file(f"{name}.pid")
        pids = [int((manager.folder / f"{name}.pid").read_text()) for name in ("plain", "daemon", "clean")]
        assert all(alive(pid) for pid in pids)
        await manager.order("train", lease_s=1.0 if mode == "silent parent" else 20.0)
        await manager.worker(lambda worker: worker.incarnation == 2)
        assert not any(alive(pid) for pid in pids)

    play(scenario, mode=mode)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@plays(mode="noisy")
async def test_a_trainers_log_is_bounded_and_its_end_is_kept(manager: Manager) -> None:
    path, version = manager.folder / "v1.0.log", 0
    for _ in range(8):
        version = await manager.order("train", log_bytes=3 << 20)
        await manager.worker(lambda worker, version=version: worker.step == version)
    async with asyncio.timeout(TIMEOUT_S):
        while path.stat().st_size > 3 << 20:  # noqa: ASYNC110  (the agent looks now and then)
            await asyncio.sleep(0.01)
    assert (manager.folder / "v1.0.log.1").stat().st_size <= 3 << 20
    assert f"orders {version} x" in tail(path, (1 << 20) + 100)


@plays()
async def test_a_setup_command_that_fails_is_the_users_error(manager: Manager) -> None:
    await manager.order(setup="echo $KEY is not enough; exit 4")
    broken = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert broken.failure is not None
    assert broken.failure.kind == "user"
    assert "ended with status 4" in broken.failure.message
    assert broken.failure.traceback == "value is not enough\n"
    assert broken.incarnation == 0


@pytest.mark.parametrize(
    ("bundle", "said"),
    [
        (b"no archive", "not a tar.gz archive"),
        (archive({"../f": b""}), "no plain file inside the bundle"),
    ],
    ids=["junk", "a parent's file"],
)
@plays()
async def test_a_bundle_that_cannot_be_unpacked_is_reported(
    manager: Manager, bundle: bytes, said: str
) -> None:
    """A VM whose trainers were never started must not look healthy."""

    manager.bundle = bundle
    await manager.order()
    broken = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert broken.failure is not None
    assert said in broken.failure.message
    assert [path.name for path in (manager.folder / "bundles").glob("*") if path.suffix != ".new"] == []


@plays()
async def test_a_bundle_of_any_size_that_the_manager_accepted_is_unpacked(manager: Manager) -> None:
    """It may have judged by other bounds: a job that runs must not fail on each VM that replaces one."""

    manager.bundle = archive({f"f{n}": b"" for n in range(BundleBounds().members + 1)})
    await manager.order()
    await manager.worker(lambda worker: worker.phase is Phase.IDLE)


def test_a_full_disk_is_no_fault_of_the_jobs_code(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is tried again."""
    extract, tries = tarfile.TarFile.extractall, itertools.count(1)

    def first_full(self: tarfile.TarFile, *args: Any, **options: Any) -> None:
        if next(tries) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        extract(self, *args, **options)

    async def scenario(manager: Manager, _agent: asyncio.Task[None]) -> None:
        monkeypatch.setattr(tarfile.TarFile, "extractall", first_full)
        await manager.order()
        found = await manager.worker(lambda w: w.phase in (Phase.IDLE, Phase.EXITED))
        assert found.phase is Phase.IDLE

    play(scenario)


@plays()
async def test_orders_count_anew_with_each_connection(manager: Manager, agent: asyncio.Task[None]) -> None:
    """A manager whose journal was restored from a backup has smaller numbers than the one before."""

    await manager.order("train", version=500, stacks=9)
    await manager.worker(lambda worker: worker.step == 500)
    await manager.drop()
    await manager.order("train", version=120)
    await manager.worker(lambda worker: worker.step == 120)  # its trainer obeys as well
    await manager.order("train", version=121, stacks=1)
    await manager.report(lambda report: bool(report.stacks))
    await manager.order("shutdown", version=122)
    await ends(agent)


@plays(mode="killed")
async def test_a_trainer_that_is_killed_leaves_what_is_known_of_its_memory(manager: Manager) -> None:
    await manager.order()
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert (dead.failure.kind, dead.failure.exit_code) == ("killed", -9)
    assert dead.failure.message.startswith("ended by SIGKILL; ")
    assert "want of memory" in dead.failure.message
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)


def test_a_trainer_that_dies_without_a_new_step_is_started_again_ever_later() -> None:
    backoff = Backoff(0.5, 30.0)
    delays_s = [backoff.next_s() for _ in range(9)]  # the first time it may be chance
    assert delays_s == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [0.5, 1.0]
