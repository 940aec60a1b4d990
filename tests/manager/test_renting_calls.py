"""What the calls that have VMs exist, and be gone, mean while their answers are lost. In virtual time."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from core_script import Script
from in_service import FakeProvider, desk
from makara.manager.core.commands import ReleaseVm, RequestVm
from makara.manager.core.events import (
    AttemptFailed,
    AttemptSucceeded,
    ConsoleRead,
    DrainRequested,
    Event,
    OffersSeen,
    ReleaseRefused,
    StopRequested,
    VmListed,
    VmTerminated,
)
from makara.manager.core.facts import RefusalKind
from makara.manager.core.strikes.table import Kind
from makara.manager.providers import (
    NoCapacity,
    NotAllowed,
    ProviderError,
    QuotaExceeded,
    Resource,
    ResourceStatus,
    Throttled,
    Unauthenticated,
)
from makara.manager.service.quarantine import Quarantined
from makara.manager.service.tokens import Scope, TokenStore
from makara.manager.service.vms.renting import (
    ABSENCE_S,
    CONSOLE_S,
    JOIN_TTL_S,
    SLOW_RELEASE_S,
    CommandAbandoned,
    Renting,
)
from makara.manager.spec.placement import Attempt, Market, Offer, Placement, Price
from makara.manager.threads import CallKind, Threads
from makara.protocol.messages import BootConfig
from virtual_time import run_virtually

T = TypeVar("T")
MEMORY_S = 60.0  # what is under way when its caller is gone takes effect within so long


class Cloud(FakeProvider):
    """Answers creations with these, one after the other; releases find nothing."""

    def __init__(self, *answers: str | Exception) -> None:
        super().__init__()
        self.answers = list(answers)
        self.wrote: str | Exception = "it boots"
        self.calls: list[str] = []
        self.boots: list[BootConfig] = []

    def release(self, vm: str, attempts: int = 1) -> bool:
        self.calls.append("release")
        return super().release(vm, attempts)

    def console(self, vm: str, attempts: int = 1) -> str:
        self.calls.append("console")
        if isinstance(self.wrote, Exception):
            raise self.wrote
        return self.wrote

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        self.boots.append(boot)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Inline(Threads):
    """Calls of kind `hanging` never return."""

    hanging: CallKind | None = None

    async def run(self, kind: CallKind, call: Callable[..., T], *values: Any, owner: str = "") -> T:
        if kind is self.hanging:
            await asyncio.get_running_loop().create_future()
        return call(*values)


async def _persist(
    job: str,
    command: object,
    call: Callable[[], T],
    *temporary: type[Exception],
    wanted: Callable[[], bool] | None = None,
    kind: Kind = Kind.COMMAND,
    alone: asyncio.Lock | None = None,
) -> T:
    while True:
        try:
            return call()
        except temporary:
            if wanted is not None and not wanted():
                raise CommandAbandoned from None
            await asyncio.sleep(1.0)


def _requested(now: float, num_gpus: int = 0) -> Script:
    """A job that has just asked for its first VM, which has so many GPUs."""
    script = Script(now=now, releasing=False)
    script.submit(resources={"provider": "aws", "instance_type": "small"})
    place = Placement(provider="aws", market=Market.SPOT, region="r", zone="a", instance_type="small")
    price = Price(hourly=1.0, ceiling=1.0, at=now, source="a test")
    script.event(OffersSeen(now=now, offers=(Offer(placement=place, price=price, num_gpus=num_gpus),)))
    script.wait()
    return script


class Desk:
    """A renting of a manager that begins now."""

    def __init__(self, home: Path, cloud: Cloud, script: Script | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.script = script or _requested(self.loop.time())
        self.command = self.script.last(RequestVm)
        self.tokens = TokenStore(home / "tokens.sqlite3", self.loop.time)
        self.threads = Inline()
        self.told: list[Event] = []
        self.is_set_aside = False
        self.renting = Renting(
            providers={"aws": cloud},
            tokens=self.tokens,
            threads=self.threads,
            manager_url=lambda: "https://m",
            manager_ca=lambda: None,
            join_secret=b"s",
            vm_directory=Path,
            state_of=lambda _: self.script.state,
            persist=_persist,
            emit=self.emit,
            clock=self.loop.time,
        )

    async def emit(self, job: str, event: Event) -> None:
        if self.is_set_aside:
            raise Quarantined("a fault")
        self.told.append(event)

    async def release(self, *, console: bool) -> Event:
        """Of a VM whose id is known."""
        self.script.event(AttemptSucceeded(now=self.script.now, vm=self.command.vm, number=1, id="i-1"))
        return await self.renting.release("j", ReleaseVm(key="r", vm=self.command.vm, console=console))

    def may_appear(self) -> bool:
        return self.renting.may_appear(self.script.state, self.script.state.vms[self.command.vm])


def _play(home: Path, cloud: Cloud, act: Callable[[Desk], Awaitable[T]]) -> T:
    async def run() -> T:
        desk = Desk(home, cloud)
        try:
            return await act(desk)
        finally:
            desk.tokens.close()

    return run_virtually(run())


@pytest.mark.parametrize("refusal", [NoCapacity("none"), QuotaExceeded("over"), NotAllowed("403")])
def test_a_plain_refusal_is_told_at_once(tmp_path: Path, refusal: ProviderError) -> None:
    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        assert isinstance(await desk.renting.request("j", desk.command), AttemptFailed)
        assert desk.loop.time() == began_at

    _play(tmp_path, Cloud(refusal), act)


def test_a_refusal_counts_only_once_a_call_whose_answer_was_lost_can_take_effect_no_more(
    tmp_path: Path,
) -> None:
    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptSucceeded)
        assert desk.loop.time() >= began_at + MEMORY_S

    _play(tmp_path, Cloud(ProviderError("timed out"), NoCapacity("none"), "i-1"), act)


def test_what_nobody_foresaw_is_tried_again_as_a_call_whose_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: a token file that was locked for once ended the job."""
    locked = [sqlite3.OperationalError("database is locked")]
    issue = TokenStore.issue_join

    def issued(*given: Any, **named: Any) -> str:
        if locked:
            raise locked.pop()
        return issue(*given, **named)

    monkeypatch.setattr(TokenStore, "issue_join", issued)

    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptSucceeded)
        assert not locked
        assert desk.loop.time() >= began_at + MEMORY_S, "the call that failed may take effect"

    _play(tmp_path, Cloud(KeyError("Instances"), NoCapacity("none"), "i-1"), act)


def _forbidden() -> Cloud:
    """The first answer is lost; then creations are not allowed any more."""
    return Cloud(ProviderError("timed out"), *[NotAllowed("403")] * 200)


def test_what_a_lost_call_made_is_found_though_the_right_to_make_vms_is_gone_since(tmp_path: Path) -> None:
    cloud = _forbidden()

    async def act(desk: Desk) -> None:
        asyncio.get_running_loop().call_later(
            150.0, cloud.vms.update, {desk.command.vm: ResourceStatus.RUNNING}
        )
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptSucceeded)
        assert answer.id == desk.command.vm
        assert cloud.vms

    _play(tmp_path, cloud, act)


def test_what_a_lost_call_made_and_has_ended_since_is_no_refusal(tmp_path: Path) -> None:
    cloud = _forbidden()

    async def act(desk: Desk) -> None:
        cloud.vms[desk.command.vm] = ResourceStatus.ENDING
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptFailed)
        assert answer.kind is RefusalKind.ENDED

    _play(tmp_path, cloud, act)


def test_after_a_lost_answer_a_refusal_for_lack_of_rights_counts_once_nothing_is_listed_for_long(
    tmp_path: Path,
) -> None:
    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptFailed)
        assert answer.kind is RefusalKind.NOT_ALLOWED
        assert desk.loop.time() >= began_at + ABSENCE_S

    _play(tmp_path, _forbidden(), act)


def test_while_nobody_may_look_the_outcome_of_an_earlier_call_stays_unknown(tmp_path: Path) -> None:
    cloud = _forbidden()

    def look(vm: str, attempts: int = 1) -> list[Resource]:
        raise NotAllowed("403")

    async def act(desk: Desk) -> None:
        cloud.look = look
        asking = asyncio.ensure_future(desk.renting.request("j", desk.command))
        await asyncio.sleep(2 * ABSENCE_S)
        assert not asking.done()
        desk.script.event(StopRequested(now=desk.script.now))
        with pytest.raises(CommandAbandoned):
            await asking

    _play(tmp_path, cloud, act)


def test_a_sign_in_that_failed_is_told_at_once(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptFailed)
        assert answer.kind is RefusalKind.CREDENTIALS

    _play(tmp_path, Cloud(Unauthenticated("expired")), act)


def test_while_nobody_can_sign_in_the_outcome_of_an_earlier_call_stays_unknown(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptSucceeded)

    away = [Unauthenticated("expired")] * 200
    _play(tmp_path, Cloud(ProviderError("timed out"), *away, "i-1"), act)


def test_a_refusal_counts_only_once_the_call_of_a_manager_that_died_can_take_effect_no_more(
    tmp_path: Path,
) -> None:
    async def act(desk: Desk) -> None:
        desk.renting.inherit(desk.command)
        answer = await desk.renting.request("j", desk.command)
        assert isinstance(answer, AttemptSucceeded)

    _play(tmp_path, Cloud(NoCapacity("none"), "i-1"), act)


def test_what_was_refused_twice_is_refused(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        desk.renting.inherit(desk.command)
        assert isinstance(await desk.renting.request("j", desk.command), AttemptFailed)

    _play(tmp_path, Cloud(NoCapacity("none"), NoCapacity("none")), act)


def test_an_attempt_whose_success_is_in_the_journal_is_not_made_again(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        succeeded = await desk.renting.request("j", desk.command)
        assert succeeded is not None
        desk.script.event(succeeded)
        assert await desk.renting.request("j", desk.command) is None

    _play(tmp_path, Cloud("i-1"), act)


def test_a_request_that_waits_long_for_a_thread_gives_its_vm_a_good_join_token(tmp_path: Path) -> None:
    cloud = Cloud("i-1")

    async def act(desk: Desk) -> None:
        async def persist_late(*values: Any, **named: Any) -> Any:
            await asyncio.sleep(JOIN_TTL_S + 1.0)
            return await _persist(*values, **named)

        desk.renting.persist = persist_late
        await desk.renting.request("j", desk.command)
        (boot,) = cloud.boots
        assert desk.tokens.check(boot.join_token, Scope.JOIN).vm == desk.command.vm

    _play(tmp_path, cloud, act)


@pytest.mark.parametrize(("num_gpus", "kind"), [(0, "auto"), (2, "cuda")])
def test_a_vm_that_is_sold_with_gpus_does_not_join_without(tmp_path: Path, num_gpus: int, kind: str) -> None:
    cloud = Cloud("i-1")

    async def run() -> None:
        now = asyncio.get_running_loop().time()
        desk = Desk(tmp_path, cloud, _requested(now, num_gpus))
        await desk.renting.request("j", desk.command)
        desk.tokens.close()

    run_virtually(run())
    assert [boot.device_kind for boot in cloud.boots] == [kind]


def test_absence_means_nothing_for_a_while_after_the_last_call_and_not_after_the_first(
    tmp_path: Path,
) -> None:
    async def act(desk: Desk) -> None:
        await desk.renting.request("j", desk.command)  # throttled for long
        assert desk.loop.time() - desk.script.now > ABSENCE_S
        assert desk.may_appear()
        await asyncio.sleep(ABSENCE_S + 1.0)
        assert not desk.may_appear()

    _play(tmp_path, Cloud(*[Throttled("slowly")] * int(ABSENCE_S + 60.0), "i-1"), act)


@pytest.mark.parametrize("step_s", [-4000.0, 0.0, 4000.0])
def test_absence_means_nothing_for_a_while_after_a_manager_began_whatever_its_clock_says(
    tmp_path: Path, step_s: float
) -> None:
    async def act(desk: Desk) -> None:
        desk.script = _requested(desk.loop.time() + step_s)
        desk.command = desk.script.last(RequestVm)
        assert desk.may_appear()
        await asyncio.sleep(ABSENCE_S + 1.0)
        assert not desk.may_appear()

    _play(tmp_path, Cloud(), act)


def test_a_vm_that_may_appear_is_released_until_it_cannot(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        event = await desk.renting.release("j", ReleaseVm(key="r", vm=desk.command.vm))
        assert isinstance(event, VmTerminated)
        assert desk.loop.time() >= began_at + ABSENCE_S

    _play(tmp_path, Cloud(), act)


def test_what_is_left_of_a_vm_that_nobody_has_is_released(tmp_path: Path) -> None:
    async def act() -> None:
        cloud = FakeProvider({"j-vm7": ResourceStatus.ENDING, "j-vm8": ResourceStatus.GONE})
        async with desk(tmp_path, cloud) as at:
            await at.service.watches["local"].look()
            await at.until(lambda: "j-vm7" not in cloud.vms)
            assert "j-vm8" in cloud.vms

    asyncio.run(act())


def test_what_a_vm_wrote_is_read_before_it_is_released(tmp_path: Path) -> None:
    cloud = Cloud()

    async def act(desk: Desk) -> None:
        assert isinstance(await desk.release(console=True), VmTerminated)
        (told,) = desk.told
        assert isinstance(told, ConsoleRead)
        assert (told.vm, told.text) == (desk.command.vm, "it boots")

    _play(tmp_path, cloud, act)
    assert cloud.calls == ["console", "release"]


def test_what_a_vm_wrote_is_not_read_where_nobody_asks(tmp_path: Path) -> None:
    cloud = Cloud()

    async def act(desk: Desk) -> None:
        await desk.release(console=False)
        assert not desk.told

    _play(tmp_path, cloud, act)
    assert cloud.calls == ["release"]


@pytest.mark.parametrize("fault", [ProviderError("503"), Throttled("too often"), KeyError("Output")])
def test_a_vm_whose_console_cannot_be_read_is_released_at_once(tmp_path: Path, fault: Exception) -> None:
    cloud = Cloud()
    cloud.wrote = fault

    async def act(desk: Desk) -> None:
        began_at = desk.loop.time()
        assert isinstance(await desk.release(console=True), VmTerminated)
        assert desk.loop.time() == began_at
        assert [event.text for event in desk.told if isinstance(event, ConsoleRead)] == [""]

    _play(tmp_path, cloud, act)


def test_a_vm_whose_console_hangs_is_released_soon(tmp_path: Path) -> None:
    async def act(desk: Desk) -> None:
        desk.threads.hanging = CallKind.CONSOLE
        began_at = desk.loop.time()
        assert isinstance(await desk.release(console=True), VmTerminated)
        assert desk.loop.time() == began_at + CONSOLE_S
        assert [event.text for event in desk.told if isinstance(event, ConsoleRead)] == [""]

    _play(tmp_path, Cloud(), act)


def test_a_vm_of_a_job_that_is_set_aside_is_released_all_the_same(tmp_path: Path) -> None:
    cloud = Cloud()

    async def act(desk: Desk) -> None:
        desk.is_set_aside = True
        assert isinstance(await desk.release(console=True), VmTerminated)

    _play(tmp_path, cloud, act)
    assert cloud.calls == ["console", "release"]


def test_a_vm_that_is_not_gone_long_after_its_release_is_told(tmp_path: Path) -> None:
    cloud = Cloud()
    answers = [False] * 40 + [True]
    cloud.release = lambda vm, attempts=1: answers.pop(0)  # type: ignore[method-assign]

    async def act(desk: Desk) -> None:
        desk.script.event(AttemptSucceeded(now=desk.script.now, vm=desk.command.vm, number=1, id="i-1"))
        desk.script.event(StopRequested(now=desk.script.now))
        began_at = desk.loop.time()
        await desk.renting.release("j", ReleaseVm(key="r", vm=desk.command.vm))
        first, *_ = desk.told
        assert isinstance(first, ReleaseRefused)
        assert first.vm == desk.command.vm
        assert SLOW_RELEASE_S < first.now - began_at < SLOW_RELEASE_S + 20.0
        told = len(desk.told)
        desk.script.event(first)
        await desk.renting.not_released("j", desk.command.vm, "once more")
        assert len(desk.told) == told

    _play(tmp_path, cloud, act)


class Broken(FakeProvider):
    """Its releases fail, a few times, as nothing that speaks to a cloud should; or its requests."""

    def __init__(self, *faults: Exception, requests: Sequence[Exception] = ()) -> None:
        super().__init__()
        self.faults = list(faults)
        self.requests = list(requests)

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        if self.requests:
            raise self.requests.pop(0)
        return super().create(attempt, boot)

    def release(self, vm: str, attempts: int = 1) -> bool:
        if self.faults:
            raise self.faults.pop(0)
        return super().release(vm, attempts)


def test_a_release_that_raises_anything_is_made_again_and_the_job_goes_on(tmp_path: Path) -> None:
    async def act() -> None:
        cloud = Broken(KeyError("makara:vm"), ValueError("no JSON"), AssertionError("a fault of ours"))
        async with desk(tmp_path, cloud) as at:
            await at.submit("j")
            await at.tick()
            await at.until(lambda: len(cloud.vms) == 2)
            vm, other = at.vms("j")
            await at.service.handle("j", DrainRequested(now=at.clock(), vm=vm))
            trouble = at.service.effects.trouble
            await at.until(lambda: any("KeyError" in told for told in trouble.get("j", {}).values()))
            state = at.service.jobs["j"].state
            assert state.ended is None
            await at.until(lambda: vm not in cloud.vms and vm not in at.service.jobs["j"].state.leaving)
            assert not cloud.faults
            assert at.service.jobs["j"].state.ended is None
            assert other in at.vms("j")
            assert f"{vm}/release" not in trouble["j"]

    asyncio.run(act())


def test_a_request_that_raises_anything_is_made_again_and_the_job_goes_on(tmp_path: Path) -> None:
    async def act() -> None:
        cloud = Broken(requests=[KeyError("makara:vm"), OSError("no space left on device")])
        async with desk(tmp_path, cloud) as at:
            await at.submit("j")
            await at.tick()
            await at.until(lambda: len(cloud.vms) == 2)
            assert not cloud.requests
            assert at.service.jobs["j"].state.ended is None

    asyncio.run(act())


class Slow(FakeProvider):
    """Makes VMs only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.asked: list[str] = []

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        self.asked.append(attempt.vm)
        assert self.may.wait(60.0)
        return super().create(attempt, boot)


def test_what_waits_to_be_requested_when_its_job_is_stopped_is_not_requested(tmp_path: Path) -> None:
    async def act() -> None:
        cloud, at_once = Slow(), CallKind.REQUEST_VM.most
        async with desk(tmp_path, cloud) as at:
            await at.submit("j", resources={"max_nodes": at_once + 3})
            await at.tick()
            await at.until(lambda: len(cloud.asked) == at_once)
            assert len(at.vms("j")) == at_once + 3
            await at.service.handle("j", StopRequested(now=at.clock()))
            await at.tick()
            assert at.vms("j") == []
            cloud.may.set()
            await at.until(lambda: at.service.jobs["j"].state.ended is not None)
            await at.until(lambda: not at.service.effects._tasks)
            assert len(cloud.asked) == at_once
            assert not cloud.vms

    asyncio.run(act())


def test_what_nobody_has_is_released_again_whatever_its_release_raises(tmp_path: Path) -> None:
    async def act() -> None:
        cloud = Broken(KeyError("makara:vm"))
        cloud.vms["j-vm7"] = ResourceStatus.RUNNING
        async with desk(tmp_path, cloud) as at:
            watch = at.service.watches["local"]
            await watch.look()
            await at.until(lambda: not watch._releasing)
            assert "j-vm7" in cloud.vms
            await watch.look()
            await at.until(lambda: "j-vm7" not in cloud.vms)

    asyncio.run(act())


class Shown(Cloud):
    """Shows these when it is asked for a VM by name."""

    shown: Sequence[Resource] = ()

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        return self.shown


def test_a_vm_that_is_gone_is_asked_about_once_more_since_its_cloud_may_tell_for_how_long_it_ran(
    tmp_path: Path,
) -> None:
    cloud = Shown()

    async def act(desk: Desk) -> None:
        vm = desk.command.vm
        desk.script.event(AttemptSucceeded(now=desk.script.now, vm=vm, number=1, id="i-1"))
        desk.script.event(DrainRequested(now=desk.script.now, vm=vm))
        gone = Resource(vm=vm, attempt=1, id="i-1", status=ResourceStatus.GONE, ran_s=77.0)
        cloud.shown = (gone,)
        told = await desk.renting.release("j", ReleaseVm(key="r", vm=vm))
        assert isinstance(told, VmTerminated)
        assert told.ran_s == 77.0
        assert not desk.told, "that it existed was known"

    _play(tmp_path, cloud, act)


@pytest.mark.parametrize("status", [ResourceStatus.ENDING, ResourceStatus.GONE])
def test_a_release_that_finds_what_no_list_had_shown_says_so(tmp_path: Path, status: ResourceStatus) -> None:
    cloud = Shown()

    async def act(desk: Desk) -> None:
        vm = desk.command.vm
        desk.script.event(DrainRequested(now=desk.script.now, vm=vm))
        cloud.shown = (Resource(vm=vm, attempt=1, id="i-1", status=status),)
        await desk.renting.release("j", ReleaseVm(key="r", vm=vm))
        assert isinstance(desk.told[0], VmListed)
        assert (desk.told[0].vm, desk.told[0].lives) == (vm, status is ResourceStatus.ENDING)

    _play(tmp_path, cloud, act)
