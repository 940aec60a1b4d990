"""What the clouds' metadata services say, and what a VM makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from http_answers import Answer
from makara.worker.agent.notices.aws import AwsSource
from makara.worker.agent.notices.azure import AzureSource
from makara.worker.agent.notices.notice import Notice, Reading, Source, Unanswered
from makara.worker.agent.notices.watcher import NoticeWatcher
from metadata import AwsMetadata, AzureMetadata, serving


@pytest.fixture
def aws() -> Iterator[AwsMetadata]:
    service = AwsMetadata()
    with serving(service):
        yield service


@pytest.fixture
def azure() -> Iterator[AzureMetadata]:
    service = AzureMetadata()
    with serving(service):
        yield service


def read(source: Source) -> Reading:
    async def once() -> Reading:
        try:
            return await source.read()
        finally:
            await source.close()

    return asyncio.run(once())


def notice_of(source: Source) -> Notice:
    notice = read(source).notice
    assert notice is not None
    return notice


# ---- AWS ---------------------------------------------------------------------------------------------------


def test_aws_says_nothing_until_it_takes_the_vm(aws: AwsMetadata) -> None:
    assert read(AwsSource(aws.url)) == Reading()


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_says_what_it_will_do_and_when(aws: AwsMetadata, action: str) -> None:
    aws.action = {"action": action, "time": "2017-09-18T08:22:00Z"}
    before = 1505722920.0 - 90.0
    notice = notice_of(AwsSource(aws.url, wall=lambda: before))
    assert notice.action == action
    assert notice.left_s == pytest.approx(90.0, abs=5.0)


def test_a_time_without_its_zone_is_utc(aws: AwsMetadata) -> None:
    aws.action = {"action": "stop", "time": "2017-09-18T08:22:00"}
    left_s = notice_of(AwsSource(aws.url, wall=lambda: 1505722920.0 - 90.0, steady=lambda: 0.0)).left_s
    assert left_s == 90.0


@pytest.mark.parametrize(("wrong_s", "left_s"), [(-3600.0, 120.0), (3600.0, 0.0)])
def test_a_wall_clock_that_is_wrong_makes_no_long_notice(
    aws: AwsMetadata, wrong_s: float, left_s: float
) -> None:
    aws.action = {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    wall = 1505722920.0 - 100.0 + wrong_s
    assert notice_of(AwsSource(aws.url, wall=lambda: wall, steady=lambda: 0.0)).left_s == left_s


def test_a_rebalance_recommendation_is_a_risk_and_no_notice(aws: AwsMetadata) -> None:
    aws.rebalance = {"noticeTime": "2026-01-01T00:00:00Z"}
    assert read(AwsSource(aws.url)) == Reading(notice=None, at_risk=True)


@pytest.mark.parametrize("fails", [Answer(503, "no"), Answer(200, "<html>", "text/html")])
def test_what_aws_will_do_is_told_though_the_risk_cannot_be_asked(aws: AwsMetadata, fails: Answer) -> None:
    """Found: an interruption that was just read was dropped with it."""

    async def run() -> list[Reading]:
        source, found = AwsSource(aws.url, wall=lambda: 1505722920.0, steady=lambda: 0.0), list[Reading]()
        aws.rebalance = {"noticeTime": "2017-09-18T08:20:00Z"}
        for action, broken in ((None, None), (None, fails), ("terminate", fails), (None, fails)):
            aws.action = {"action": action, "time": "2017-09-18T08:22:00Z"} if action is not None else None
            aws.broken_rebalance = broken
            found.append(await source.read())
        await source.close()
        return found

    notice = Notice("terminate", 0.0, "2017-09-18T08:22:00Z")
    quiet = Reading(notice=None, at_risk=True)
    assert asyncio.run(run()) == [quiet, quiet, Reading(notice, at_risk=True), quiet]


def test_one_token_serves_many_readings_and_is_renewed_when_it_has_run_out(aws: AwsMetadata) -> None:
    now = [0.0]

    async def run() -> list[int]:
        source, counts = AwsSource(aws.url, steady=lambda: now[0]), list[int]()
        for prepare in (lambda: None, lambda: None, aws.expire, lambda: now.append(now.pop() + 11_000)):
            prepare()
            await source.read()
            counts.append(aws.paths.count("/latest/api/token"))
        await source.close()
        return counts

    assert asyncio.run(run()) == [1, 1, 2, 3]


@pytest.mark.parametrize(
    "broken",
    [
        Answer(403),
        Answer(500, "no"),
        Answer(200, "<html>", "text/html"),
        Answer(200, "[]", "application/json"),
        Answer(200, '{"action":"terminate"}', "application/json"),
        Answer(200, '{"action":"terminate","time":"soon"}', "application/json"),
    ],
)
def test_an_answer_of_aws_that_cannot_be_read_is_none(aws: AwsMetadata, broken: Answer) -> None:
    aws.broken = broken
    with pytest.raises(Unanswered):
        read(AwsSource(aws.url))


def test_a_service_that_is_not_there_is_no_notice() -> None:
    for source in (AwsSource("http://127.0.0.1:1"), AzureSource("http://127.0.0.1:1")):
        with pytest.raises(Unanswered):
            read(source)


def test_a_proxy_is_not_asked(aws: AwsMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert read(AwsSource(aws.url)) == Reading()


# ---- Azure -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_says_what_it_will_do_and_when(azure: AzureMetadata, kind: str) -> None:
    azure.announce(kind, 60.0)
    notice = notice_of(AzureSource(azure.url))
    assert (notice.action, notice.id) == (kind, "e-1")
    assert 0.0 < notice.left_s <= 60.0


def test_a_freeze_is_no_notice(azure: AzureMetadata) -> None:
    azure.announce("Freeze")
    assert read(AzureSource(azure.url)) == Reading()


def test_events_of_other_vms_are_passed_over(azure: AzureMetadata) -> None:
    azure.announce("Preempt", resources=("vm-2", "vm-10"))
    assert read(AzureSource(azure.url)) == Reading()


def test_a_vm_is_known_by_its_name_in_whichever_case(azure: AzureMetadata) -> None:
    azure.announce("Preempt", resources=("vm-2", "VM-1"))
    assert notice_of(AzureSource(azure.url)).action == "Preempt"


def test_an_event_that_has_begun_leaves_no_time(azure: AzureMetadata) -> None:
    azure.announce("Preempt", None)
    assert notice_of(AzureSource(azure.url)).left_s == 0.0


@pytest.mark.parametrize(
    ("kind", "in_s", "longest_s"),
    [("Preempt", 30.0, 120.0), ("Terminate", 900.0, 900.0), ("Redeploy", 86_400.0, 90_000.0)],
)
def test_a_wall_clock_that_is_behind_makes_no_long_notice_of_what_azure_tells_shortly_ahead(
    azure: AzureMetadata, kind: str, in_s: float, longest_s: float
) -> None:
    """A host that may fail is told days ahead."""
    azure.announce(kind, in_s)
    source = AzureSource(azure.url, wall=lambda: time.time() - 3600.0, steady=lambda: 0.0)
    assert notice_of(source).left_s == pytest.approx(longest_s, abs=60.0)


def test_of_several_events_the_first_one_counts(azure: AzureMetadata) -> None:
    azure.announce("Redeploy", 86_400.0, event="later")
    azure.announce("Preempt", 30.0, event="sooner")
    assert notice_of(AzureSource(azure.url)).id == "sooner"


@pytest.mark.parametrize(
    "broken",
    [
        Answer(410),
        Answer(200, '{"name":""}', "application/json"),
        Answer(200, '{"name":"vm-1"}', "application/json"),
        Answer(200, '{"name":"vm-1","Events":[7]}', "application/json"),
        Answer(200, '{"name":"vm-1","Events":[{"EventId":1}]}', "application/json"),
    ],
)
def test_an_answer_of_azure_that_cannot_be_read_is_none(azure: AzureMetadata, broken: Answer) -> None:
    azure.broken = broken
    with pytest.raises(Unanswered):
        read(AzureSource(azure.url))


def acknowledge(source: Source) -> None:
    async def run() -> None:
        reading = await source.read()
        assert reading.notice is not None
        await source.acknowledge(reading.notice)
        await source.close()

    asyncio.run(run())


def test_an_event_of_this_vm_alone_is_acknowledged(azure: AzureMetadata) -> None:
    azure.announce("Preempt")
    acknowledge(AzureSource(azure.url))
    assert azure.started == ["e-1"]


def test_an_event_that_takes_other_vms_too_is_left_to_its_time(azure: AzureMetadata) -> None:
    """An acknowledgement would start it for those that have not handed over."""
    azure.announce("Preempt", resources=("vm-1", "vm-2"))
    acknowledge(AzureSource(azure.url))
    assert azure.started == []


# ---- the watcher -------------------------------------------------------------------------------------------


class Scripted:
    """A source that answers with `said`, or not at all."""

    period_s = 0.0

    def __init__(self) -> None:
        self.said: Reading | None = Reading()
        self.num_read = 0
        self.acknowledged: list[str] = []
        self.refusals = 0

    async def read(self) -> Reading:
        self.num_read += 1
        if self.said is None:
            raise Unanswered("away")
        return self.said

    async def acknowledge(self, notice: Notice) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Unanswered("not now")
        self.acknowledged.append(notice.id)

    async def close(self) -> None:
        """Nothing is open."""

    async def two_readings(self) -> None:
        goal = self.num_read + 2
        while self.num_read < goal:  # noqa: ASYNC110
            await asyncio.sleep(0)


def watched(*, handed_over: bool = False) -> tuple[Scripted, NoticeWatcher, list[float], list[str]]:
    source, now, told = Scripted(), [0.0], list[str]()
    watcher = NoticeWatcher(source, lambda: told.append("changed"), lambda: handed_over, lambda: now[0])
    return source, watcher, now, told


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """A watcher that is played twice belongs to one loop."""
    with asyncio.Runner() as runner:
        yield runner


def play(runner: asyncio.Runner, source: Scripted, watcher: NoticeWatcher, *said: Reading | None) -> None:
    async def run() -> None:
        running = asyncio.create_task(watcher.run())
        for each in said:
            source.said = each
            await source.two_readings()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    runner.run(run())


TAKEN = Reading(Notice("Preempt", 60.0, "e-1"))


def test_a_notice_is_told_when_it_comes_and_when_it_goes(runner: asyncio.Runner) -> None:
    source, watcher, _, told = watched()
    assert not watcher.known
    play(runner, source, watcher, Reading(), TAKEN)
    assert watcher.notice == TAKEN.notice
    play(runner, source, watcher, Reading())
    assert watcher.known
    assert watcher.notice is None
    assert len(told) == 3


def test_a_source_that_does_not_answer_withdraws_nothing(runner: asyncio.Runner) -> None:
    source, watcher, now, told = watched()
    play(runner, source, watcher, TAKEN, None)
    now[0] = 20.0
    assert watcher.notice == Notice("Preempt", 40.0, "e-1")
    assert told == ["changed"]


def test_a_source_that_never_answered_is_not_known(runner: asyncio.Runner) -> None:
    source, watcher, _, _ = watched()
    play(runner, source, watcher, None)
    assert not watcher.known


def test_a_vm_at_risk_has_no_notice(runner: asyncio.Runner) -> None:
    source, watcher, _, told = watched()
    play(runner, source, watcher, Reading(), Reading(at_risk=True))
    assert watcher.at_risk
    assert watcher.notice is None
    assert len(told) == 2


def test_a_sigterm_is_a_notice_that_nothing_withdraws(runner: asyncio.Runner) -> None:
    source, watcher, now, _ = watched()
    watcher.terminate(10.0)
    play(runner, source, watcher, TAKEN, Reading())
    now[0] = 4.0
    watcher.terminate(10.0)
    assert watcher.notice == Notice("SIGTERM", 6.0)


def test_a_notice_is_acknowledged_once_and_only_after_the_hand_over(runner: asyncio.Runner) -> None:
    source, watcher, _, _ = watched()
    play(runner, source, watcher, TAKEN)
    assert source.acknowledged == []
    source, watcher, _, _ = watched(handed_over=True)
    source.refusals = 1
    play(runner, source, watcher, TAKEN, TAKEN)
    assert source.acknowledged == ["e-1"]


def test_a_vm_that_hands_over_between_two_readings_tells_its_cloud_at_once() -> None:
    source, handed_over = Scripted(), [False]
    source.period_s = 1e6
    source.said = TAKEN
    watcher = NoticeWatcher(source, lambda: None, lambda: handed_over[0])

    async def run() -> None:
        running = asyncio.create_task(watcher.run())
        while watcher.notice is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        watcher.look()
        handed_over[0] = True
        watcher.look()
        while not source.acknowledged:  # noqa: ASYNC110
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert source.acknowledged == ["e-1"]


@pytest.mark.parametrize("turns", range(4))
def test_a_watcher_that_is_ended_while_it_hears_of_a_hand_over_ends(turns: int) -> None:
    source, watcher, _, _ = watched(handed_over=True)
    source.period_s = 1e6
    source.said, source.refusals = TAKEN, 2

    async def run() -> None:
        running = asyncio.create_task(watcher.run())
        while watcher.notice is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # now it waits
        watcher.look()
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=10.0)
        assert running.cancelled()
        running.cancel()  # of one that goes on

    asyncio.run(run())
