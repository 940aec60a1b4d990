"""One history of a manager at lying clouds, in virtual time: the real service, killed and started again.

What threads do elsewhere is done here on the event loop: a call is under way for a while, is carried out at
one instant, and is answered later. Before and after each of these, and around each transaction of the
journal, the manager may die (`Deaths`); what was under way then takes effect all the same, or never left.
After each change of what is billed, the truth is compared with the caps and the journal.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from core_script import MEMORY, spec
from deaths import Deaths
from in_service import FakeConnection
from lying_cloud import Habits, LyingCloud, Machine
from lying_provider import Later, LyingProvider
from makara.manager.config import ServerConfig
from makara.manager.core import Timing
from makara.manager.core.facts import AttemptMade, Resumption
from makara.manager.core.state import JobState
from makara.manager.providers import ResourceStatus
from makara.manager.service.runtime import Job
from makara.manager.service.service import Service
from makara.manager.service.tokens import TokenStore
from makara.manager.spec.job_spec import parse_spec
from makara.manager.threads import CallKind, Threads
from makara.protocol.messages import DeviceInfo, Phase, Profiling, Report, WorkerReport
from memory_journal import MemoryJournal

T = TypeVar("T")
F = TypeVar("F")
JOB = "j"
TIMING = Timing(vm_lease_s=60.0, start_wait_s=1e9, profile_wait_s=1e9, stop_timeout_s=5.0)
TICK_S = 5.0
_BEAT_S = 20.0
_CLOUD_CALLS = (CallKind.REQUEST_VM, CallKind.RELEASE_VM, CallKind.LIST_VMS, CallKind.OFFERS)
_CHANGING = (CallKind.REQUEST_VM, CallKind.RELEASE_VM)
Moment = Literal["before", "under way", "after"]


class Broken(AssertionError):
    """Something that must hold did not."""


class _Life(Threads):
    """One manager process; its threads."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self.history = history
        self.service: Service | None = None
        self.dead = False

    async def run(self, kind: CallKind, call: Callable[..., T], *values: Any, owner: str = "") -> T:
        return await self.history.carry_out(self, kind, partial(call, *values))


@dataclass
class Resources:
    """What the job may have."""

    max_nodes: int = 2
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def most_hourly(self) -> float | None:
        return self.changes.get("max_hourly_cost")

    @property
    def budget(self) -> float | None:
        return self.changes.get("budget")

    def fields(self) -> dict[str, Any]:
        return {"max_nodes": self.max_nodes, **self.changes}


class History:
    """One job. `deaths`, `habits` and what follows from `seed` decide what happens to it."""

    def __init__(
        self,
        seed: int | str,
        home: Path,
        resources: Resources,
        *,
        deaths: Deaths | None = None,
        habits: Habits | None = None,
        clock_steps: bool = True,
        ends_alone: bool = False,
    ) -> None:
        self.rng = random.Random(f"{seed}: history")
        random.seed(f"{seed}: what the manager draws")
        self.loop = asyncio.get_running_loop()
        self.home, self.resources = home, resources
        self.deaths = deaths or Deaths(self.rng)
        self.cloud = LyingCloud(
            f"{seed}: cloud",
            clock=self.loop.time,
            after=self.loop.call_later,
            habits=habits,
            changed=self.check,
            made=self._boot,
            ending=self.hang_up,
        )
        self.journal = MemoryJournal()
        self.tokens = TokenStore(home / "tokens.sqlite3", clock=self.loop.time)
        self.life: _Life | None = None
        self.absences: list[float] = []  # what the next deaths last, seconds; else drawn
        self.away: list[tuple[float, float]] = []  # when there was no manager: from, until
        self.fault: Exception | None = None
        self.log: list[str] = []
        self._clock_steps = clock_steps
        self._ends_alone = ends_alone  # VMs end themselves where they see no manager, or do not join
        self._heard_at: dict[Machine, float] = {}
        self._main = asyncio.current_task()
        self._sequence = 0
        self._connections: dict[Machine, tuple[Service, FakeConnection]] = {}
        self._away_until: dict[Machine, float] = {}

    # ---- lives ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A manager starts, by a wall clock that somebody may have set meanwhile."""
        step_s = self.rng.choice((0.0, 0.0, 30.0, -30.0, 4000.0, -4000.0)) if self._clock_steps else 0.0
        life = self.life = _Life(self)
        providers = {name: LyingProvider(name, self.cloud) for name in ("aws", "azure")}
        config = ServerConfig(home=self.home, tick_s=TICK_S, rest_factor=0.0)
        life.service = Service(
            config,
            self.journal,
            self.tokens,
            providers,
            timing=TIMING,
            clock=lambda: self.loop.time() + step_s,
            threads=life,
        )
        self.note(f"a manager starts, its clock {step_s:+g} s")
        self._watched(self._live(life))

    async def _live(self, life: _Life) -> None:
        assert life.service is not None
        await life.service.start()
        if JOB not in self.journal.jobs():
            parsed = parse_spec(spec(resources=self.resources.fields()))
            await life.service.admission.submit(JOB, parsed, b"", {})
        await life.service.failed()

    def _watched(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fault = self.fault or Broken(f"the manager failed: {task.exception()!r}")

    def kill(self) -> None:
        """At once: nothing more of it happens."""
        life = self.life
        if life is None or life.dead:
            return
        life.dead, self.life = True, None
        self.loop.call_soon(self._bury)

    def _bury(self) -> None:
        for task in asyncio.all_tasks():
            if task is not self._main:
                task.cancel()
        absence_s = self.absences.pop(0) if self.absences else self.rng.choice((1.0, 20.0, 120.0))
        self.note(f"the manager is dead for {absence_s:g} s")
        self.away.append((self.loop.time(), self.loop.time() + absence_s))
        self.loop.call_later(absence_s, self.begin)

    # ---- effects -------------------------------------------------------------------------------------------

    async def carry_out(self, life: _Life, kind: CallKind, call: Callable[[], T]) -> T:
        if life.dead:
            await self.loop.create_future()
        if kind is CallKind.JOURNAL:
            await self._moment(life, f"before {kind}")
            result = call()
            await self._moment(life, f"after {kind}")
            return result
        if kind not in _CLOUD_CALLS:
            return call()
        return await self._ask(life, kind, call)

    async def _moment(self, life: _Life, what: str) -> None:
        if not life.dead and self.deaths.strikes(what):
            self.note(f"it dies {what}")
            self.kill()
        if life.dead:
            await self.loop.create_future()

    async def _ask(self, life: _Life, kind: CallKind, call: Callable[[], T]) -> T:
        changing = kind in _CHANGING
        if changing:  # what only reads is no effect: before and after it is the same moment
            await self._moment(life, f"before {kind}")
        answer: asyncio.Future[T] = self.loop.create_future()
        sent = self.loop.call_later(self.rng.uniform(0.05, 2.0), self._reach, life, kind, call, answer)
        if changing and self.deaths.strikes(f"with {kind} under way"):
            self.note(f"it dies with {kind} under way")
            sent.cancel()
            late_s = self.rng.uniform(0.1, 30.0)
            self.loop.call_later(late_s, self._reach, life, kind, call, answer)
            self.kill()
        result = await answer
        if changing:
            await self._moment(life, f"after {kind}")
        return result

    def _reach(
        self, life: _Life, kind: CallKind, call: Callable[[], object], answer: asyncio.Future[Any]
    ) -> None:
        """The call is carried out."""
        delay_s, result, error = self.rng.uniform(0.05, 2.0), None, None
        try:
            result = call()
        except Later as later:
            self.note(f"{kind}: answered in {later.after_s:.0f} s")
            self.loop.call_later(later.after_s, self._reach, life, kind, later.answer, answer)
            return
        except Exception as raised:
            error = raised
        if kind in _CHANGING and not life.dead:
            self.note(f"{kind}: {result!r} {error!r}")
        self.loop.call_later(delay_s, self._settle, life, answer, result, error)

    def _settle(self, life: _Life, answer: asyncio.Future[Any], result: Any, error: Any) -> None:
        if life.dead or answer.cancelled():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    # ---- VMs -----------------------------------------------------------------------------------------------

    def _boot(self, machine: Machine) -> None:
        self.note(f"{machine.id} of {machine.attempt.name} exists")
        if machine.joins_at is not None:
            self.loop.call_at(machine.joins_at, self._beat, machine)
        if self._ends_alone:
            self.loop.call_later(TIMING.request_timeout_s, self._end_unjoined, machine)

    def _end_unjoined(self, machine: Machine) -> None:
        if machine not in self._heard_at:
            self.cloud.end(machine)

    def _beat(self, machine: Machine) -> None:
        if machine.failed or machine.status not in (ResourceStatus.PENDING, ResourceStatus.RUNNING):
            return
        machine.status = ResourceStatus.RUNNING
        service = self.life.service if self.life is not None else None
        is_away = self.loop.time() < self._away_until.get(machine, 0.0)
        if service is not None and JOB in service.jobs and not is_away:
            known = service.jobs[JOB].state.vms.get(machine.attempt.vm)
            if known is not None and not known.live:
                if self.rng.random() < 0.5:  # else it does not hear
                    self.cloud.end(machine)
                    return
            else:
                self._connect(service, machine)
                self._watched_report(service, machine)
                self._heard_at[machine] = self.loop.time()
        leases = TIMING.leases
        alone_s = self.loop.time() - self._heard_at.get(machine, self.loop.time())
        if self._ends_alone and alone_s > leases.orphan_timeout_s + self.rng.uniform(
            0.0, leases.orphan_save_s
        ):
            self.cloud.end(machine)
            return
        self.loop.call_later(_BEAT_S, self._beat, machine)

    def _connect(self, service: Service, machine: Machine) -> None:
        if self._connections.get(machine, (None, None))[0] is not service:
            connection = FakeConnection()
            self._connections[machine] = service, connection
            service.agents.connect(JOB, machine.attempt.vm, connection)

    def hang_up(self, machine: Machine, away_s: float = 0.0) -> None:
        """Its agent's connection closes, as when its system shuts down. One that runs on is back at its first
        beat after `away_s`."""
        self._away_until[machine] = self.loop.time() + away_s
        service, connection = self._connections.pop(machine, (None, None))
        if service is None or connection is None or self.life is None or self.life.service is not service:
            return
        self.loop.call_later(0.5, self._disconnect, service, machine.attempt.vm, connection)

    def _disconnect(self, service: Service, vm: str, connection: FakeConnection) -> None:
        if self.life is not None and self.life.service is service:
            self._watched(service.agents.disconnect(JOB, vm, connection))

    def _watched_report(self, service: Service, machine: Machine) -> None:
        self._sequence += 1
        vm, left_s = machine.attempt.vm, None
        if machine.notice_at is not None:
            left_s = max(0.0, machine.notice_at - self.loop.time())
        report = Report(
            vm=vm,
            sequence=self._sequence,
            orders_version=0,
            address="10.0.0.1",
            devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=MEMORY)],
            workers=[WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling())],
            notice_deadline_s=left_s,
        )
        self._watched(service.agents.report(JOB, report))

    # ---- what must hold ------------------------------------------------------------------------------------

    @property
    def state(self) -> JobState:
        """What the present manager takes to be so; that of none before there is one."""
        service = self.life.service if self.life is not None else None
        return service.jobs[JOB].state if service is not None and JOB in service.jobs else JobState()

    def check(self) -> None:
        """At every instant in which something changes; the first fault is kept."""
        if self.fault is None:
            fault = next(self._faults(), None)
            if fault is not None:
                self.note(f"BROKEN: {fault}")
                self.fault = Broken(fault)

    def _faults(self) -> Iterator[str]:
        billed, wanted = self.cloud.billed(), self.resources
        if len(billed) > wanted.max_nodes:
            yield f"{[m.attempt.name for m in billed]} are billed, max_nodes is {wanted.max_nodes}"
        if wanted.most_hourly is not None and self.cloud.hourly() > wanted.most_hourly + 1e-9:
            yield f"{self.cloud.hourly()} USD an hour, max_hourly_cost is {wanted.most_hourly}"
        if wanted.budget is not None and self.cloud.spent() > wanted.budget + 1e-9:
            yield f"{self.cloud.spent()} USD are spent, the budget is {wanted.budget}"
        made = {f.attempt.name for f in self.journal.written.get(JOB, []) if isinstance(f, AttemptMade)}
        names = [machine.attempt.name for machine in billed]
        if len(set(names)) < len(names):
            yield f"two VMs of one attempt: {names}"
        for machine in billed:
            if machine.attempt.name not in made:
                yield f"{machine.attempt.name} is not in the journal"

    def note(self, what: str) -> None:
        self.log.append(f"{self.loop.time() - 1_000_000.0:8.1f} {what}")

    # ---- going on ------------------------------------------------------------------------------------------

    async def until(self, holds: Callable[[], object], limit_s: float, what: str) -> None:
        """Until it holds, looked at each second; `Broken` after `limit_s`, or as soon as anything is."""
        give_up_at = self.loop.time() + limit_s
        while not holds():
            await asyncio.sleep(1.0)
            self.check()
            if self.fault is not None:
                raise self.fault
            if self.loop.time() > give_up_at:
                raise Broken(f"not within {limit_s:g} s: {what}")

    async def wait(self, seconds: float) -> None:
        end_at = self.loop.time() + seconds
        await self.until(lambda: self.loop.time() >= end_at, seconds + 5.0, "time passes")

    def unseen(self, at: float, shown_s: float) -> bool:
        """Whether what happened then was shown for so long, and no manager was there to see it."""
        return any(begin <= at < until and until >= at + shown_s for begin, until in self.away)

    def joined(self) -> int:
        return sum(vm.joined for vm in self.state.live_vms)

    def is_over(self) -> bool:
        """Whether nothing of the job is left anywhere, and the manager knows it."""
        if self.cloud.left() or self.life is None or not self.state.job:
            return False
        return not self.state.counted_vms and not self.journal.pending_commands()

    async def resume(self) -> None:
        """A person has a job go on that waits."""
        service = self.life.service if self.life is not None else None
        if service is not None and self.state.waiting is not None:
            self._watched(service.resume(JOB, Resumption.AGAIN))

    async def stop(self) -> None:
        """A person has the job end, and asks again until it is so."""
        while JOB not in self.journal.jobs() or not self._ended_in_journal():
            service = self.life.service if self.life is not None else None
            if service is not None and JOB in service.jobs and self.state.spec is not None:
                self._watched(service.stop(JOB))
            await self.wait(TICK_S)

    def told(self, kind: type[F]) -> list[F]:
        """The facts of a kind, oldest first."""
        return [fact for fact in self.journal.written.get(JOB, []) if isinstance(fact, kind)]

    @property
    def job(self) -> Job:
        service = self.life.service if self.life is not None else None
        assert service is not None, "there is a manager"
        return service.jobs[JOB]

    def _ended_in_journal(self) -> bool:
        return any(fact.fact == "job_ended" for fact in self.journal.written[JOB])

    async def close(self) -> None:
        life, self.life = self.life, None
        if life is not None:
            life.dead = True
        for task in asyncio.all_tasks():
            if task is not self._main:
                task.cancel()
        await asyncio.sleep(0)
        self.tokens.close()


@contextmanager
def explained(history: History) -> Generator[None]:
    """With what happened, if something breaks."""
    try:
        yield
    except BaseException as error:
        error.add_note("\n".join(history.log[-150:]))
        raise
