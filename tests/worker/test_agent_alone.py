"""What ends a VM and what does not: proxies, other managers, other versions, frames that cannot be read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from http import HTTPStatus
from pathlib import Path

import psutil
import pytest
from makara.protocol.bounds import MOST_DEATHS
from makara.protocol.frames import Malformed, Misfit, read_report, read_report_or_beat, read_to_agent
from makara.protocol.messages import (
    PROTOCOL,
    At,
    Beat,
    BootConfig,
    DeviceInfo,
    Failure,
    Orders,
    Phase,
    Progress,
    Report,
    ReportAck,
    Stacks,
    StepMetrics,
    Welcome,
    WorkerReport,
)
from makara.worker.agent.connection import ManagerConnection
from makara.worker.agent.reports import as_beat, deaths_backlog, encode, metrics_backlog
from scripted_manager import Manager, ends, play, plays, response, running

__all__ = ["play"]  # the fixture

Agent = asyncio.Task[None]


async def trains_on(manager: Manager) -> None:
    """It comes back, and its trainer is the same and was not told to hold."""
    manager.answer = None
    await manager.until(lambda: manager.connection is not None)
    version = await manager.order("train")
    found = await manager.worker(lambda worker: worker.step == version)
    assert (found.phase, found.incarnation) == (Phase.RUNNING, 1)
    assert not (manager.folder / "held").exists()


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403, 404, 502])
@plays()
async def test_a_proxys_answer_is_no_refusal(manager: Manager, status: int) -> None:
    await running(manager)
    manager.answer = response(HTTPStatus(status), b"404 page not found\n")
    shown = len(manager.tokens)
    await manager.drop()
    await manager.until(lambda: len(manager.tokens) >= shown + 3)
    await trains_on(manager)


@plays()
async def test_a_refusal_of_another_manager_is_none(manager: Manager) -> None:
    """Somebody started a manager with a home of its own at the address that the VM knows."""

    await running(manager)
    manager.refuse("manager-2")
    shown = len(manager.tokens)
    await manager.drop()
    await manager.until(lambda: len(manager.tokens) >= shown + 2)
    await trains_on(manager)


@plays()
async def test_a_vm_that_its_manager_refuses_saves_and_ends(manager: Manager, agent: Agent) -> None:
    await running(manager)
    manager.refuse()
    await manager.drop()
    await ends(agent)
    assert (manager.folder / "held").exists()


@plays()
async def test_a_vm_that_was_never_let_in_ends_when_it_is_refused(manager: Manager, agent: Agent) -> None:
    manager.refuse("whichever")
    await ends(agent)
    assert manager.connection is None


@plays()
async def test_a_close_by_whoever_it_is_does_not_end_the_vm(manager: Manager) -> None:
    await running(manager)
    for code in (1008, 4001, 4002, 4003):
        await manager.until(lambda: manager.connection is not None)
        connection, manager.connection = manager.connection, None
        assert connection is not None
        await connection.close(code, "refused")
    await trains_on(manager)


@plays()
async def test_a_proxys_answer_instead_of_code_or_secrets_is_asked_for_again(manager: Manager) -> None:
    page = response(HTTPStatus.OK, b"<html>back soon</html>")
    manager.job_answers = [response(HTTPStatus.FORBIDDEN, b""), page]
    await running(manager)
    assert manager.job_answers == []


# ---- the manager away --------------------------------------------------------------------------------------


@plays()
async def test_a_manager_that_only_answers_errors_is_not_seen(manager: Manager, agent: Agent) -> None:
    await running(manager)
    await manager.order("train", orphan_timeout_s=1.0)
    manager.answer = response(HTTPStatus.BAD_GATEWAY, b"")
    await manager.drop()
    await ends(agent)
    assert (manager.folder / "held").exists()


@plays(mode="saves long")
async def test_an_orphan_whose_manager_returns_while_it_saves_goes_on(manager: Manager) -> None:
    await running(manager)
    await manager.order("train", orphan_timeout_s=0.5)
    await manager.close()
    await manager.until_file("held")
    await manager.open()
    version = await manager.order("train")  # at once also in what the trainer is told
    found = await manager.worker(lambda worker: worker.step == version)
    assert (found.phase, found.incarnation) == (Phase.RUNNING, 1)


# ---- versions ----------------------------------------------------------------------------------------------


@plays()
async def test_what_a_newer_manager_adds_is_passed_over(manager: Manager) -> None:
    await running(manager)
    await manager.send_text('{"type": "weather", "sunny": true}')
    added = {**json.loads(manager.sent), "version": 7, "colour": "red"}
    added["job"] = {**added["job"], "flavour": {"sweet": 1}}
    await manager.send_text(json.dumps(added))
    found = await manager.worker(lambda worker: worker.step == 7)
    assert (found.phase, found.incarnation) == (Phase.RUNNING, 1)
    assert len(manager.tokens) == 1  # on the same connection


@pytest.mark.parametrize("frame", ["", "[]", '{"type": "orders"}', '{"type": "orders", "version": "x"}'])
@plays()
async def test_a_frame_that_cannot_be_read_costs_a_connection_and_no_vm(manager: Manager, frame: str) -> None:
    await running(manager)
    connection = manager.connection
    await manager.send_text(frame)
    await manager.until(lambda: manager.connection not in (None, connection))
    await trains_on(manager)


@plays()
async def test_a_vm_that_does_not_understand_its_manager_saves_holds_and_says_so(
    manager: Manager, agent: Agent
) -> None:
    await running(manager)
    manager.protocol = PROTOCOL + 1
    await manager.drop()
    held = await manager.worker(lambda worker: worker.phase is Phase.HELD)
    assert held.incarnation == 1
    assert manager.reports[-1].protocol == PROTOCOL
    assert manager.reports[-1].makara
    await manager.send_text('{"type": "orders", "version": 99, "action": "shutdown"}')  # of that protocol
    manager.protocol = PROTOCOL  # the older manager is back
    await manager.drop()
    version = await manager.order("train")
    await manager.worker(lambda worker: worker.step == version and worker.phase is Phase.RUNNING)
    assert not agent.done()


@plays()
async def test_orders_that_the_agent_does_not_know_have_it_save_hold_and_say_so(manager: Manager) -> None:
    """Found: they were malformed; the agent stepped on, deaf, until it was an orphan."""

    await running(manager)
    await manager.send_text(json.dumps({**json.loads(manager.sent), "version": 7, "action": "levitate"}))
    held = await manager.report(lambda report: report.workers[0].phase is Phase.HELD)
    assert held.workers[0].incarnation == 1
    assert (held.holding or "").endswith("action: Input should be 'idle', 'profile', 'train' or 'shutdown'")
    (manager.folder / "held").unlink()
    await manager.order("train", version=8)
    found = await manager.report(lambda report: report.workers[0].step == 8)
    assert (found.workers[0].phase, found.workers[0].incarnation) == (Phase.RUNNING, 1)
    await manager.report(lambda report: report.sequence >= found.sequence and report.holding is None)
    assert len(manager.tokens) == 1  # on the same connection
    assert not (manager.folder / "held").exists()


@plays()
async def test_a_vm_waits_for_orders_that_it_knows_no_longer_than_an_orphan(
    manager: Manager, agent: Agent
) -> None:
    await running(manager)
    await manager.order("train", orphan_timeout_s=1.0)
    await manager.send_text(json.dumps({**json.loads(manager.sent), "version": 7, "action": "levitate"}))
    acknowledging = asyncio.create_task(manager.acknowledge_all())  # it is there, and that is not enough
    await ends(agent)
    acknowledging.cancel()
    assert (manager.folder / "held").exists()


@plays(mode="newer")
async def test_a_trainer_of_a_newer_version_is_not_ended_for_what_it_tells(manager: Manager) -> None:
    """Found: trainers are started from the disk, and the agent before an upgrade killed each of them."""

    version = await manager.order("train")
    found = await manager.report(lambda report: report.workers[0].step == version)
    assert (found.workers[0].phase, found.workers[0].incarnation) == (Phase.OTHER, 1)
    manager.heartbeat_s = 0.05
    await manager.drop()
    await manager.report(lambda report: report.progress[0].at is At.OTHER)
    assert manager.reports[-1].workers[0].incarnation == 1


def a_report() -> Report:
    device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1)
    return Report(vm="v", sequence=1, orders_version=0, address="10.0.0.1", devices=[device], workers=[])


def test_reports_of_newer_agents_are_read_without_what_they_add() -> None:
    value = {**a_report().model_dump(mode="json"), "colour": "red"}
    assert read_report(json.dumps(value)) == a_report()


def test_another_protocol_is_told_apart_from_a_frame_that_cannot_be_read() -> None:
    value = {"vm": 7, "protocol": PROTOCOL + 1, "makara": "3.0", "all": "else"}
    with pytest.raises(Misfit, match=f"3.0.*protocol {PROTOCOL + 1}"):
        read_report(json.dumps(value))
    welcome = Welcome(heartbeat_s=1.0, server_time=0.0, protocol=PROTOCOL + 1).model_dump_json()
    for text in (welcome, json.dumps({"type": "welcome", "protocol": PROTOCOL + 1})):
        with pytest.raises(Misfit):
            read_to_agent(text)
    for text in ("{", "[]", '{"vm": 7}'):
        with pytest.raises(Malformed):
            read_report(text)


def test_a_beat_stands_for_what_has_no_news_but_progress() -> None:
    told = a_report()
    later = told.model_copy(update={"sequence": 2, "progress": [Progress(count=3, at=At.COMPUTING)]})
    frame = as_beat(later, told)
    assert frame is not None
    assert read_report_or_beat(frame) == Beat(sequence=2, progress=later.progress)
    assert read_report_or_beat(frame[:-1] + ',"colour":"red"}') == read_report_or_beat(frame)
    with pytest.raises(Malformed):
        read_report_or_beat('{"type":"beat","sequence":-1}')
    assert read_report_or_beat(told.model_dump_json()) == told
    stacks = Stacks(worker="v.0", number=1, text="here")
    for news in (
        {"workers": [WorkerReport(worker="v.0", phase=Phase.IDLE)]},
        {"orders_version": 1},
        {"leaving": "its time is over"},
        {"metrics": steps(range(1))},
        {"stacks": [stacks]},
        {"notice_deadline_s": 30.0},
    ):
        assert as_beat(later.model_copy(update=news), told) is None
        changed = told.model_copy(update=news)
        assert as_beat(changed, None) is None


class Listener:
    """Obeys nothing, and keeps what it was told."""

    def __init__(self) -> None:
        self.orders: list[Orders] = []

    def obey(self, orders: Orders) -> None:
        self.orders.append(orders)

    def acknowledge(self, sequence: int) -> None: ...

    def report(self, limit_bytes: int, *, is_first: bool, may_beat: bool) -> tuple[str, bool]:
        return a_report().model_dump_json(), True


class Wire:
    """A connection that keeps what it sends."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, text: str) -> None:
        self.sent.append(text)


def test_news_wait_until_the_manager_has_taken_in_the_report_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: each step was a report that repeated those on their way, and a busy manager fell behind."""
    monkeypatch.setattr("makara.worker.agent.connection._GATHERED_S", 3600.0)

    async def scenario() -> list[int]:
        boot = BootConfig(vm="v", job="j", manager_url="http://m", join_token="t", directory=str(tmp_path))
        connection, wire, found = ManagerConnection(boot, Listener()), Wire(), list[int]()
        connection._welcome(Welcome(heartbeat_s=3600.0, server_time=0.0))
        sending = asyncio.create_task(connection._send(wire))  # pyright: ignore[reportArgumentType]
        for _ in range(3):
            connection.changed()
            for _ in range(10):
                await asyncio.sleep(0)
            found.append(len(wire.sent))
        connection._hear(ReportAck(sequence=1))
        for _ in range(10):
            await asyncio.sleep(0)
        sending.cancel()
        return [*found, len(wire.sent)]

    assert asyncio.run(scenario()) == [1, 1, 1, 2]


def test_a_malformed_frames_values_are_not_told() -> None:
    with pytest.raises(Malformed) as told:
        read_to_agent('{"type": "token", "token": {"a": "s3cret"}, "valid_for_s": 1}')
    assert "s3cret" not in str(told.value)


def pid_of_trainer() -> int:
    """Of the one that the agent has, which is this process."""
    children = psutil.Process(os.getpid()).children()
    [pid] = [child.pid for child in children if any("fake_trainer" in part for part in child.cmdline())]
    return pid


@plays(mode="diary")
async def test_deaths_that_no_manager_saw_are_told_when_it_is_back(manager: Manager) -> None:
    """The next incarnations report long before."""

    await running(manager)
    manager.answer = response(HTTPStatus.BAD_GATEWAY, b"")
    await manager.drop()
    for incarnation in (1, 2):
        (manager.folder / "began").unlink(missing_ok=True)
        os.kill(pid_of_trainer(), signal.SIGKILL)
        await manager.until_file("began")
        assert int((manager.folder / "began").read_text()) == incarnation + 1
    manager.answer = None
    told = await manager.report(lambda report: len(report.deaths) == 2)
    assert [(dead.worker, dead.incarnation) for dead in told.deaths] == [("v1.0", 1), ("v1.0", 2)]
    assert all(dead.failure and dead.failure.message.startswith("ended by SIGKILL") for dead in told.deaths)
    await manager.drop()
    again = await manager.report(lambda report: report.sequence > told.sequence)
    assert again.deaths == told.deaths  # it was not acknowledged
    await manager.send(ReportAck(sequence=again.sequence))
    await manager.order("train")
    await manager.report(lambda report: report.sequence > again.sequence and not report.deaths)


def test_the_oldest_deaths_of_too_many_are_forgotten() -> None:
    backlog = deaths_backlog()
    for incarnation in range(MOST_DEATHS + 5):
        backlog.add(WorkerReport(worker="v.0", incarnation=incarnation, phase=Phase.EXITED))
    told = [dead.incarnation for dead in backlog.take(1, 1 << 24)]
    assert told == list(range(5, MOST_DEATHS + 5))
    backlog.add(WorkerReport(worker="v.0", incarnation=500, phase=Phase.EXITED))
    backlog.send_again()
    assert len(backlog.take(2, 1 << 24)) == MOST_DEATHS


def test_deaths_that_have_no_room_wait_before_a_worker_fails() -> None:
    failure = Failure(kind="internal", message="z" * 7_000)
    dead = [WorkerReport(worker="v.0", incarnation=n, phase=Phase.EXITED, failure=failure) for n in range(20)]
    report = full_report(8, 0).model_copy(update={"deaths": dead})
    encoded = encode(report, 1 << 16)
    assert (len(encoded.text) <= 1 << 16, encoded.failed) == (True, {})
    assert [d.incarnation for d in read_report(encoded.text).deaths] == list(range(encoded.num_deaths))
    assert encoded.num_deaths == 5


# ---- large reports -----------------------------------------------------------------------------------------


def steps(numbers: range) -> list[StepMetrics]:
    return [
        StepMetrics(step=n, generation=1, loss=1 / 3, grad_norm=1 / 3, seconds=1 / 3, samples=2**20)
        for n in numbers
    ]


def test_what_was_not_acknowledged_goes_out_in_pieces_and_none_is_lost() -> None:
    backlog = metrics_backlog()
    for step in steps(range(5000)):
        backlog.add(step)
    told: dict[int, StepMetrics] = {}
    sequence = 0
    while backlog.waits or not told:
        sequence += 1
        sent = backlog.take(sequence, 1 << (24 if sequence % 3 else 17))  # a smaller frame now and then
        lost = sequence % 2 == 0
        if lost:
            backlog.send_again()
        else:
            told |= {step.step: step for step in sent}
            backlog.acknowledge(sequence)
    assert sorted(told) == list(range(5000))


def full_report(num_workers: int, stacks_chars: int, num_metrics: int = 0, detail: str = "") -> Report:
    device = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1)
    names = [f"v.{n}" for n in range(num_workers)]
    failure = Failure(kind="user", message=detail) if detail else None
    return Report(
        vm="v",
        sequence=1,
        orders_version=1,
        address="10.0.0.1",
        devices=[device],
        workers=[WorkerReport(worker=name, phase=Phase.RUNNING, failure=failure) for name in names],
        stacks=[Stacks(worker=name, number=1, text="x" * stacks_chars + "end") for name in names],
        metrics=steps(range(num_metrics)),
    )


def test_stacks_are_shortened_before_anything_else_is_left_out() -> None:
    encoded = encode(full_report(8, 16_000, 40), 1 << 16)
    assert (len(encoded.text) <= 1 << 16, encoded.failed, encoded.num_metrics) == (True, {}, 40)
    shown = read_report(encoded.text).stacks
    assert len(shown) == 8
    assert all(stacks.text.endswith("end") for stacks in shown)  # where the compute thread is
    assert encoded.has_stacks


def test_stacks_and_metrics_wait_before_a_worker_fails() -> None:
    encoded = encode(full_report(8, 16_000, 100, detail="y" * 7_000), 1 << 16)
    assert (len(encoded.text) <= 1 << 16, encoded.failed, encoded.has_stacks) == (True, {}, False)
    assert 0 < encoded.num_metrics < 100
    told = [metrics.step for metrics in read_report(encoded.text).metrics]
    assert told == list(range(encoded.num_metrics))


def test_metrics_that_had_no_room_go_into_a_later_report() -> None:
    backlog = metrics_backlog()
    for step in steps(range(10)):
        backlog.add(step)
    assert len(backlog.take(1, 1 << 17)) == 10
    backlog.put_back(4)
    assert backlog.waits
    backlog.acknowledge(1)
    assert [metrics.step for metrics in backlog.take(2, 1 << 17)] == [4, 5, 6, 7, 8, 9]


@plays(mode="talkative")
async def test_reports_fit_what_the_manager_takes(manager: Manager) -> None:
    acknowledging = asyncio.create_task(manager.acknowledge_all())
    manager.max_report_bytes = 1 << 17
    await manager.drop()
    version = await manager.order("train")
    wanted = {version + n * 1000 for n in range(3000)}
    await manager.until(lambda: wanted <= {m.step for r in manager.reports for m in r.metrics})
    acknowledging.cancel()
    assert max(manager.sizes) <= 1 << 17


@plays(mode="huge")
async def test_a_worker_whose_report_fits_nowhere_fails_with_the_reason(
    manager: Manager, agent: Agent
) -> None:
    await manager.order("train")
    dead = await manager.worker(lambda worker: worker.failure is not None)
    assert dead.failure is not None
    assert "the manager takes" in dead.failure.message
    assert not agent.done()
    await manager.worker(lambda worker: worker.incarnation == 2)
