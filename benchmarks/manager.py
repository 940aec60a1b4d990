"""What a job of a thousand VMs, ten thousand ever, costs the manager's process.

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

TITLE = "a manager with 1,000 VMs in one job, 10,000 ever"
LIVE, EVER = 1000, 10_000
STEP_S, WATCHED_S = 10.0, 30.0
_SETTLED_S = 3.0
STAGES = 10
_RECIPE = Recipe(
    microbatch_size=1,
    num_micro_batches=LIVE,
    cuts=list(range(1, STAGES)),
    graph_hash="made-up",
    threads=1,
    device_kind="cpu",
    torch_version="none",
    bundle_sha256="none",
)


def rows() -> list[Row]:
    """One row for each thing that comes often."""
    warm_up(wait=True)  # a manager compiles its simulator soon after it began, once
    facts = list(history("file:///nowhere"))
    fold_s, _ = timed(lambda: fold(facts))
    state, parts = fold([*facts, *generation()]), OrderParts()
    told_s, sizes = timed(
        lambda: [len(parts.to_json(orders(state, vm, parts=parts))) for vm in state.vms.live]
    )
    found = {
        f"fold of {len(facts)} facts, {EVER} VMs ever, s": fold_s,
        f"orders of a new generation for {LIVE} VMs, made and written, s": told_s,
        "the same, MB": sum(sizes) / 1e6,
    }
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()  # the manager writes its head there
        found |= asyncio.run(_serve(Path(folder), list(history(store))))
    found["peak memory of this process, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [{"what": what, "found": value} for what, value in found.items()]


def history(store: str) -> Iterator[Fact]:
    """A job in which nine of ten VMs have come and gone, and the others wait for a plan."""
    spec = {**SPEC, "checkpoint": {**SPEC["checkpoint"], "uri": store}}
    yield Submitted(at=1.0, job="j", spec=spec, bundle_sha256="none")
    for number in range(EVER):
        vm = f"j-vm{number}"
        yield VmRequested(at=1.0, vm=vm)
        devices = (DEVICE.model_dump(),)
        yield VmJoined(at=1.0, vm=vm, address="10.0.0.1", devices=devices)
        if number < EVER - LIVE:
            yield VmEnded(at=1.0, vm=vm, reason=EndReason.PREEMPTED)
    yield RecipeFixed(at=1.0, recipe=_RECIPE, calibration=model((0.01,) * STAGES).to_json())


def generation() -> Iterator[Fact]:
    """All VMs that live run one."""
    plan = grid([Range(n, n + 1) for n in range(STAGES)], LIVE // STAGES, LIVE).to_json()
    members = tuple((f"j-vm{number}.0", 1) for number in range(EVER - LIVE, EVER))
    yield GenerationPlanned(
        at=1.0,
        number=1,
        cause="start",
        plan=plan,
        members=members,
        predicted_s=STEP_S,
        detected_at=1.0,
        decided_s=1.0,
    )
    yield GenerationPrepared(at=1.0, number=1, endpoint="10.0.0.1:1")
    yield GenerationOpened(at=1.0, number=1, endpoint="10.0.0.1:1", checkpoints=())
    formed = Formed(generation=1, step=0, rung="start", phases_s={"load": 0.1})
    yield GenerationFormed(at=1.0, number=1, formed=formed, lost_steps=0)


async def _serve(home: Path, facts: list[Fact]) -> dict[str, float]:
    """What the manager's process takes while the agents of all VMs are connected."""
    journal, tokens = SqliteJournal(home / "journal.sqlite3"), TokenStore(home / "tokens.sqlite3")
    journal.append("j", facts, [])
    service = Service(ServerConfig(home=home), journal, tokens, {"local": _Cloud()})
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(run(service, listener))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    agents = await _agents(url, home, tokens)
    assert agents.stdin is not None
    try:
        return await _measure(service, agents.stdin)
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


async def _agents(url: str, home: Path, tokens: TokenStore) -> asyncio.subprocess.Process:
    """A process that has connected the agents of all VMs."""
    (home / "agents").mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{__package__}.manager_agents", url, str(home / "agents"), str(STEP_S)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for made in _Cloud().list():
        token = tokens.issue(Scope.JOIN, job="j", vm=made.vm, ttl_s=600.0)
        process.stdin.write(f"{made.vm} {token}\n".encode())
    process.stdin.write(b"\n")
    assert await process.stdout.readline() == b"connected\n"
    return process


async def _measure(service: Service, agents: asyncio.StreamWriter) -> dict[str, float]:
    job, found = service.jobs["j"], dict[str, float]()
    await asyncio.sleep(_SETTLED_S)
    loop_s, process_s = time.thread_time(), time.process_time()
    agents.write(b"ready\n")
    while job.state.current is None or job.state.current.formed is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    found["a generation is planned, prepared and formed: the event loop, s"] = time.thread_time() - loop_s
    found["the same: all threads, s"] = time.process_time() - process_s
    await asyncio.sleep(_SETTLED_S)
    found |= await _share(job, "heartbeats alone")
    agents.write(b"step\n")
    await asyncio.sleep(1.5 * STEP_S)
    found |= await _share(job, f"heartbeats, and a step in {STEP_S:g} s")
    assert job.state.running, "nothing happened to the generation"
    assert job.observations.newest_step >= WATCHED_S / STEP_S, "steps were told of"
    found["a view of the job, s"], _ = timed(lambda: job_view(job, {}, 0.0).model_dump_json())
    found["/metrics, s"], _ = timed(lambda: exposition(service.shown_to(None)))
    return found


async def _share(job: Job, what: str) -> dict[str, float]:
    """The part of a core that this process takes, by its own time, and how much it heard for that.

    A machine with too much else to do hears less than it should, and the part is too small then.
    """
    heard, before, began = _heard(job), time.process_time(), time.monotonic()
    await asyncio.sleep(WATCHED_S)
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

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        raise AssertionError("no VM is missing")

    def release(self, vm: str, attempts: int = 1) -> bool:
        raise AssertionError("every VM is wanted")

    def list(self) -> Sequence[Resource]:
        names = [f"j-vm{number}" for number in range(EVER - LIVE, EVER)]
        return [Resource(vm=vm, attempt=1, id=vm, status=ResourceStatus.RUNNING) for vm in names]


SPEC: dict[str, Any] = {
    "name": "j",
    "entrypoint": "train:build",
    "resources": {"provider": "local", "max_nodes": LIVE},
    "training": {"global_batch_size": LIVE, "steps": 10**9},
    "checkpoint": {"uri": "file:///c", "interval": 10**6},
}
