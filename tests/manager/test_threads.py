"""What blocks keeps a thread of its own kind, and holds up nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from in_service import Desk, FakeProvider, desk
from makara.checkpoint import HeadMissing
from makara.manager.core.commands import ComputeGrowth, ComputePlan, OpenHead, ReleaseVm
from makara.manager.core.events import PlanComputed
from makara.manager.core.state import JobState
from makara.manager.providers import Resource
from makara.manager.service import planner, store_commands
from makara.manager.threads import CallKind, CallQueue, Threads, told_when_slow


class Gate:
    """Calls wait here until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        assert self.opened.wait(60)
        with self._lock:
            self.inside -= 1


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


class SlowProvider(FakeProvider):
    """`release` waits at the gate for VMs of job `a`; `list` does once it is told to."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.lists_hang = False

    def release(self, vm: str, attempts: int = 1) -> bool:
        if vm.startswith("a-"):
            self.gate()
        return super().release(vm, attempts)

    def list(self) -> Sequence[Resource]:
        if self.lists_hang:
            self.gate()
        return super().list()


# ---- lanes -------------------------------------------------------------------------------------------------


def test_a_lane_keeps_its_bound_and_the_order(gate: Gate) -> None:
    async def play() -> None:
        lane, order = CallQueue("few", 2), []
        waiting = [asyncio.create_task(lane.run(gate)) for _ in range(10)]
        while gate.inside < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        last = [asyncio.create_task(lane.run(lambda n=n: order.append(n))) for n in range(5)]
        gate.opened.set()
        await asyncio.gather(*waiting, *last)
        assert (gate.most, sorted(order)) == (2, [0, 1, 2, 3, 4])

    asyncio.run(play())


def test_calls_of_one_thread_come_in_order_and_errors_reach_the_caller() -> None:
    async def play() -> None:
        threads, names = Threads(), set()

        def number(n: int) -> int:
            names.add(threading.current_thread().name)
            return n

        calls = [threads.run(CallKind.JOURNAL, number, n) for n in range(100)]
        assert await asyncio.gather(*calls) == list(range(100))
        assert names == {"journal"}
        with pytest.raises(ZeroDivisionError):
            await threads.run(CallKind.JOURNAL, lambda: 1 // 0)

    asyncio.run(play())


def test_kinds_and_owners_do_not_wait_for_each_other(gate: Gate) -> None:
    async def play() -> None:
        threads = Threads()
        calls = [threads.run(CallKind.STORE, gate, owner="a") for _ in range(CallKind.STORE.most)]
        hanging = asyncio.gather(*calls)
        queued = asyncio.create_task(threads.run(CallKind.STORE, lambda: 1, owner="a"))
        assert await threads.run(CallKind.STORE, lambda: 2, owner="b") == 2
        assert await threads.run(CallKind.JOURNAL, lambda: 3) == 3
        queued.cancel()
        gate.opened.set()
        await hanging
        assert await threads.run(CallKind.STORE, lambda: 4, owner="a") == 4

    asyncio.run(play())


def test_a_slow_call_is_told_and_still_answers(gate: Gate) -> None:
    async def play() -> None:
        told: list[str] = []
        call = told_when_slow(Threads().run(CallKind.FILES, gate), 0.0, lambda: told.append("slow"))
        task = asyncio.create_task(call)
        while not told:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        gate.opened.set()
        await task

    asyncio.run(play())


def test_a_process_ends_though_a_call_hangs() -> None:
    program = (
        "import asyncio, threading\n"
        "from makara.manager.threads import CallKind, Threads\n"
        "async def main():\n"
        "    task = asyncio.create_task(Threads().run(CallKind.STORE, threading.Event().wait))\n"
        "    await asyncio.sleep(0.1)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
        "print('ended')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "ended\n", ended.stderr


# ---- the manager -------------------------------------------------------------------------------------------


async def two_jobs(here: Desk, num_vms: int = 2) -> None:
    for job in ("a", "b"):
        await here.submit(job, resources={"max_nodes": num_vms})
    await here.tick()
    await here.until(lambda: len(here.provider.list()) == 2 * num_vms and not here.service.effects._tasks)


def test_forty_releases_in_one_job_do_not_delay_the_journal_of_another(tmp_path: Path, gate: Gate) -> None:
    async def play() -> None:
        async with desk(tmp_path, SlowProvider(gate)) as here:
            await two_jobs(here, 40)
            await here.service.stop("a")
            await here.until(lambda: gate.inside > 0)
            for vm in here.vms("b"):
                await here.report("b", vm)
            assert all(vm.joined for vm in here.service.jobs["b"].state.live_vms)
            assert gate.most <= CallKind.RELEASE_VM.most
            gate.opened.set()
            await here.until(lambda: not here.service.effects._tasks)
            assert len(here.provider.list()) == 40

    asyncio.run(play())


def test_a_hung_store_holds_up_its_own_job_and_shows_as_trouble(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_generation(_store: object, job: str, _generation: int, **_: object) -> object:
        if job == "a":
            gate()
        opened.append(job)
        raise HeadMissing("no head.json")

    monkeypatch.setattr(store_commands, "open_generation", open_generation)

    async def play() -> None:
        async with desk(tmp_path, slow_call_s=0.01) as here:
            await two_jobs(here)
            for number in range(20):
                here.service.effects.start("a", OpenHead(key=f"a/head/{number}", generation=number))
            await here.until(lambda: here.service.effects.trouble.get("a"))
            assert "open_head: not done after" in next(iter(here.service.effects.trouble["a"].values()))
            here.service.effects.start("b", OpenHead(key="b/head/1", generation=1))
            await here.until(lambda: opened == ["b"])
            await here.report("b", here.vms("b")[0])
            assert here.service.jobs["b"].state.live_vms[0].joined
            here.service.effects.start("b", ReleaseVm(key="b-vm1/release", vm="b-vm1"))
            await here.until(lambda: "b-vm1" not in here.provider.vms)

    asyncio.run(play())


GROWTH: dict[str, Any] = {"workers": (), "more": (), "most": 1, "least_gain": 0.01}


class Chooser:
    """In the planner's place: it notes the keys of its questions, and those of job `a` wait at the gate."""

    def __init__(self, gate: Gate) -> None:
        self.asked: list[str] = []
        self._gate = gate

    def __call__(self, state: JobState, command: ComputePlan, _clock: object) -> PlanComputed:
        self.asked.append(command.key)
        if state.job == "a":
            self._gate()
        return PlanComputed(
            now=0.0, generation=command.generation, asked=command.asked, plan=None, reason="none wanted"
        )


@pytest.fixture
def chooser(gate: Gate) -> Chooser:
    return Chooser(gate)


def test_questions_of_one_job_leave_a_planner_to_others_and_the_last_one_alone_is_computed(
    tmp_path: Path, gate: Gate, chooser: Chooser
) -> None:
    async def play() -> None:
        async with desk(tmp_path, choose_plan=chooser) as here:
            await two_jobs(here)
            effects = here.service.effects
            effects.start("a", ComputePlan(key="a/plan/0", generation=1, workers=()))
            await here.until(lambda: gate.inside > 0)
            for number in range(1, 5):
                effects.start("a", ComputePlan(key=f"a/plan/{number}", generation=1, workers=()))
            effects.start("b", ComputePlan(key="b/plan/0", generation=1, workers=()))
            await here.until(lambda: chooser.asked == ["a/plan/0", "b/plan/0"])
            gate.opened.set()
            await here.until(lambda: not effects._tasks)
            assert chooser.asked == ["a/plan/0", "b/plan/0", "a/plan/4"]
            assert not here.service.journal.pending_commands()

    asyncio.run(play())


def test_a_question_that_nobody_waits_for_when_a_thread_is_free_is_not_computed(
    tmp_path: Path, gate: Gate, chooser: Chooser
) -> None:
    async def play() -> None:
        async with desk(tmp_path, choose_plan=chooser) as here:
            await two_jobs(here)
            effects, threads = here.service.effects, here.service.threads
            others = [asyncio.create_task(threads.run(CallKind.PLANNING, gate)) for _ in range(2)]
            await here.until(lambda: gate.inside == 2)
            for job in ("a", "b"):
                effects.start(job, ComputePlan(key=f"{job}/plan/0", generation=1, workers=()))
            await here.service.stop("b")
            await here.until(lambda: here.service.jobs["b"].state.ended is not None)
            effects.start("a", ComputePlan(key="a/plan/1", generation=1, workers=()))
            await asyncio.sleep(0)
            gate.opened.set()
            await asyncio.gather(*others)
            await here.until(lambda: not effects._tasks)
            assert chooser.asked == ["a/plan/1"]

    asyncio.run(play())


def test_whether_more_vms_would_pay_holds_up_no_plan(
    tmp_path: Path, gate: Gate, chooser: Chooser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "compute_growth", lambda *_: gate())

    async def play() -> None:
        async with desk(tmp_path, choose_plan=chooser) as here:
            await two_jobs(here)
            effects = here.service.effects
            for job in ("a", "b"):
                effects.start(job, ComputeGrowth(key=f"{job}/growth/0", **GROWTH))
            await here.until(lambda: gate.inside == 1)
            effects.start("b", ComputePlan(key="b/plan/0", generation=1, workers=()))
            await here.until(lambda: chooser.asked == ["b/plan/0"])
            gate.opened.set()
            await here.until(lambda: not effects._tasks)

    asyncio.run(play())


def test_a_fault_while_the_planner_is_asked_about_more_vms_ends_no_job(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(planner, "compute_growth", fail)

    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            effects = here.service.effects
            effects.start("b", ComputeGrowth(key="b/growth/0", **GROWTH))
            await here.until(lambda: not effects._tasks)
            assert here.service.jobs["b"].state.ended is None
            assert not here.service.journal.pending_commands()

    asyncio.run(play())


def test_a_hung_list_shows_as_trouble_and_the_manager_closes_all_the_same(tmp_path: Path, gate: Gate) -> None:
    async def play() -> None:
        provider = SlowProvider(gate)
        async with desk(tmp_path, provider, slow_call_s=0.01) as here:
            await two_jobs(here)
            provider.lists_hang = True
            look = asyncio.create_task(here.service.watches["local"].look())
            await here.until(lambda: here.service.effects.trouble.get("b"))
            assert here.service.effects.trouble["b"] == {"list/local": "list_vms: no answer for 0.01 s"}
            await here.report("b", here.vms("b")[0])
            assert here.service.jobs["b"].state.live_vms[0].joined
            look.cancel()
        assert not gate.opened.is_set(), "the manager closed while the call hung"

    asyncio.run(play())


def test_whoever_reads_a_long_history_holds_up_nobody_who_writes(tmp_path: Path) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            await two_jobs(here)
            with here.service.journal._reading:  # pyright: ignore
                await here.report("b", here.vms("b")[0])
            assert here.service.jobs["b"].state.live_vms[0].joined

    asyncio.run(play())


def test_a_submission_whose_caller_is_cancelled_keeps_its_files(tmp_path: Path, gate: Gate) -> None:
    async def play() -> None:
        async with desk(tmp_path) as here:
            service = here.service
            append = service.journal.append

            def slow_append(*values: Any) -> int:
                gate()
                return append(*values)

            service.journal.append = slow_append  # pyright: ignore
            task = asyncio.create_task(here.submit("a"))
            await here.until(lambda: gate.inside == 1)
            task.cancel()  # as the server does with its requests when it ends
            await asyncio.wait({task}, timeout=0.2)
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            await here.settled()
            await here.until(lambda: service.jobs["a"].state.spec is not None)
            assert service.journal.facts("a")
            assert service.files.bundle("a").exists()

    asyncio.run(play())
