"""What a job of up to 2,000 VMs, ten thousand ever, costs the manager's process.

The agents of all VMs are connected from another process (`manager_agents`), and beat as often as the manager
tells them to; the journal is a real one. What is counted is processor time, which a busy machine makes up to
twice as long, since others use the same caches: the load is told beside it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makara.manager.api.prometheus import exposition
from makara.manager.config import ServerConfig
from makara.manager.core import fold
from makara.manager.core.facts import (
    EndReason,
    Fact,
    GenerationFormed,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    RecipeFixed,
    Submitted,
    VmEnded,
    VmJoined,
    VmRequested,
)
from makara.manager.core.orders import OrderParts, orders
from makara.manager.providers import Resource, ResourceStatus
from makara.manager.server import run
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.runtime import Job
from makara.manager.service.service import Service
from makara.manager.service.tokens import Scope, TokenStore
from makara.manager.service.views.job import job_view
from makara.manager.spec.placement import Attempt
from makara.pipeline import Range, grid
from makara.protocol.messages import BootConfig, Formed, Recipe
from makara.simulator import warm_up

from .made_up import model
from .manager_agents import DEVICE
from .report import Row
from .timing import timed

TITLE = "a manager with 250 to 2,000 VMs in one job, 10,000 ever"
STAGES = 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How many VMs live, and were ever; seconds of a step, and of what is watched."""

    live: int
    ever: int = 10_000
    step_s: float = 10.0
    watched_s: float = 30.0
    settled_s: float = 3.0

    @property
    def vms(self) -> list[str]:
        return [f"j-vm{number}" for number in range(self.ever - self.live, self.ever)]

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            microbatch_size=1,
            num_micro_batches=self.live,
            cuts=list(range(1, STAGES)),
            graph_hash="made-up",
            threads=1,
            device_kind="cpu",
            torch_version="none",
            bundle_sha256="none",
        )

    def spec(self, store: str) -> dict[str, Any]:
        return {
            "name": "j",
            "entrypoint": "train:build",
            "resources": {"provider": "local", "max_nodes": self.live},
            "training": {"global_batch_size": self.live, "steps": 10**9},
            "checkpoint": {"uri": store, "interval": 10**6},
        }


SETTINGS = tuple(Setting(live=live) for live in (250, 500, 1000, 2000))


def rows(settings: Sequence[Setting] = SETTINGS) -> list[Row]:
    """One row for each number of VMs and each thing that comes often."""
    warm_up(wait=True)  # a manager compiles its simulator soon after it began, once
    found: list[Row] = []
    for setting in settings:
        for what, value in _found(setting).items():
            found.append({"VMs": setting.live, "what": what, "found": value})
    return found


def _found(setting: Setting) -> dict[str, float]:
    facts = list(history(setting, "file:///nowhere"))
    fold_s, _ = timed(lambda: fold(facts))
    state, parts = fold([*facts, *generation(setting)]), OrderParts()
    told_s, sizes = timed(
        lambda: [len(orders(state, vm, parts=parts).model_dump_json()) for vm in state.vms.live]
    )
    found = {
        f"fold of {len(facts)} facts, s": fold_s,
        "orders of a new generation for all, made and written, s": told_s,
        "the same, MB": sum(sizes) / 1e6,
    }
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()  # the manager writes its head there
        found |= asyncio.run(_serve(setting, Path(folder), list(history(setting, store))))
    found["peak memory of this process, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def history(setting: Setting, store: str) -> Iterator[Fact]:
    """A job in which nine of ten VMs have come and gone, and the others wait for a plan."""
    yield Submitted(at=1.0, job="j", spec=setting.spec(store), bundle_sha256="none")
    for number in range(setting.ever):
        vm = f"j-vm{number}"
        yield VmRequested(at=1.0, vm=vm)
        devices = (DEVICE.model_dump(),)
        yield VmJoined(at=1.0, vm=vm, address="10.0.0.1", devices=devices)
        if number < setting.ever - setting.live:
            yield VmEnded(at=1.0, vm=vm, reason=EndReason.PREEMPTED)
    yield RecipeFixed(at=1.0, recipe=setting.recipe, calibration=model((0.01,) * STAGES).to_json())


def generation(setting: Setting) -> Iterator[Fact]:
    """All VMs that live run one."""
    plan = grid([Range(n, n + 1) for n in range(STAGES)], setting.live // STAGES, setting.live)
    yield GenerationPlanned(
        at=1.0,
        number=1,
        cause="start",
        plan=plan.to_json(),
        members=tuple((f"{vm}.0", 1) for vm in setting.vms),
        predicted_s=setting.step_s,
        detected_at=1.0,
        decided_s=1.0,
    )
    yield GenerationPrepared(at=1.0, number=1, endpoint="10.0.0.1:1")
    yield GenerationOpened(at=1.0, number=1, endpoint="10.0.0.1:1", checkpoints=())
    formed = Formed(generation=1, step=0, rung="start", phases_s={"load": 0.1})
    yield GenerationFormed(at=1.0, number=1, formed=formed, lost_steps=0)


async def _serve(setting: Setting, home: Path, facts: list[Fact]) -> dict[str, float]:
    """What the manager's process takes while the agents of all VMs are connected."""
    journal, tokens = SqliteJournal(home / "journal.sqlite3"), TokenStore(home / "tokens.sqlite3")
    journal.append("j", facts, [])
    service = Service(ServerConfig(home=home), journal, tokens, {"local": _Cloud(setting)})
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(run(service, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    agents = await _agents(setting, url, home, tokens)
    assert agents.stdin is not None
    try:
        return await _measure(setting, service, agents.stdin)
    finally:
        agents.returncode is None and agents.kill()
        await agents.wait()
        job = service.jobs["j"]
        while job.connections or job.gathered or job.lock.locked():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        tokens.close()
        journal.close()


async def _agents(setting: Setting, url: str, home: Path, tokens: TokenStore) -> asyncio.subprocess.Process:
    """A process that has connected the agents of all VMs."""
    (home / "agents").mkdir()
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            f"{__package__}.manager_agents",
            url,
            str(home / "agents"),
            str(setting.step_s),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for vm in setting.vms:
        token = tokens.issue(Scope.JOIN, job="j", vm=vm, ttl_s=600.0)
        process.stdin.write(f"{vm} {token}\n".encode())
    process.stdin.write(b"\n")
    assert await process.stdout.readline() == b"connected\n"
    return process


async def _measure(setting: Setting, service: Service, agents: asyncio.StreamWriter) -> dict[str, float]:
    job, found = service.jobs["j"], dict[str, float]()
    await asyncio.sleep(setting.settled_s)
    loop_s, process_s = time.thread_time(), time.process_time()
    agents.write(b"ready\n")
    while job.state.current is None or job.state.current.formed is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    found["a generation is planned, prepared and formed: the event loop, s"] = time.thread_time() - loop_s
    found["the same: all threads, s"] = time.process_time() - process_s
    await asyncio.sleep(setting.settled_s)
    found |= await _share(job, setting.watched_s, "heartbeats alone")
    agents.write(b"step\n")
    await asyncio.sleep(1.5 * setting.step_s)
    found |= await _share(job, setting.watched_s, f"heartbeats, and a step in {setting.step_s:g} s")
    assert job.state.running, "nothing happened to the generation"
    assert job.observations.newest_step >= setting.watched_s / setting.step_s, "steps were told of"
    found["a view of the job, s"], _ = timed(lambda: job_view(job, {}, 0.0).model_dump_json())
    found["/metrics, s"], _ = timed(lambda: exposition(service.shown_to(None)))
    return found


async def _share(job: Job, watched_s: float, what: str) -> dict[str, float]:
    """The part of a core that this process takes, by its own time, and how much it heard for that.

    A machine with too much else to do hears less than it should, and the part is too small then.
    """
    heard, before, began = _heard(job), time.process_time(), time.monotonic()
    await asyncio.sleep(watched_s)
    seconds, heard = time.monotonic() - began, _heard(job) - heard
    spent_s = time.process_time() - before
    return {
        f"{what}: % of a core": 100 * spent_s / seconds,
        f"{what}: beats and reports heard in a second": heard / seconds,
        f"{what}: microseconds for each": 1e6 * spent_s / heard,
        f"{what}: load of the machine": os.getloadavg()[0],
    }


def _heard(job: Job) -> int:
    """Beats and reports so far."""
    return sum(last_report.report.sequence for last_report in job.observations.last_reports.values())


class _Cloud:
    """All VMs live."""

    def __init__(self, setting: Setting) -> None:
        self._vms = setting.vms

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        raise AssertionError("no VM is missing")

    def release(self, vm: str, attempts: int = 1) -> bool:
        raise AssertionError("every VM is wanted")

    def list(self) -> Sequence[Resource]:
        return [Resource(vm=vm, attempt=1, id=vm, status=ResourceStatus.RUNNING) for vm in self._vms]
