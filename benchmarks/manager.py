"""What a job of a thousand VMs, ten thousand ever, costs the manager's event loop: no sockets, all the rest.

Reports come as text, once a second from each VM, and a step in ten seconds; the journal is a real one.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from makara.manager.config import ServerConfig
from makara.manager.core import fold
from makara.manager.facts import (
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
from makara.manager.journal import SqliteJournal
from makara.manager.orders import OrderParts, orders
from makara.manager.prometheus import exposition
from makara.manager.providers import VmStatus
from makara.manager.service import Service
from makara.manager.tokens import TokenStore
from makara.manager.views import job_view
from makara.pipeline.plan import Range, grid
from makara.worker.messages import (
    BootConfig,
    DeviceInfo,
    Formed,
    Orders,
    Phase,
    Recipe,
    Report,
    WorkerReport,
)

from .made_up import model
from .report import Row

TITLE = "the event loop of a manager with 1,000 VMs in one job, 10,000 ever"
LIVE, EVER = 1000, 10_000
STEP_S, WATCHED_S = 10.0, 30.0
STAGES = 10
_DEVICES = [DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 34)]
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
    facts = list(history())
    fold_s, state = _timed(lambda: fold(facts))
    parts = OrderParts()
    told_s, sizes = _timed(
        lambda: [len(parts.to_json(orders(state, vm, parts=parts))) for vm in state.vms.live]
    )
    with tempfile.TemporaryDirectory() as folder:
        share, view_s, metrics_s = asyncio.run(_serve(Path(folder), facts))
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = [
        (f"fold of {len(facts)} facts, {EVER} VMs ever, s", fold_s),
        (f"orders of a new generation for {LIVE} VMs, made and written, s", told_s),
        ("the same, MB", sum(sizes) / 1e6),
        ("a view of the job, s", view_s),
        ("/metrics, s", metrics_s),
        (f"{LIVE} VMs, a step in {STEP_S:g} s: % of a core", 100 * share),
        ("peak memory of this process, MiB", memory_mib),
    ]
    return [{"what": what, "found": value} for what, value in found]


def history() -> Iterator[Fact]:
    """A job in which nine of ten VMs have come and gone, and the others run one generation."""
    yield Submitted(at=1.0, job="j", spec=_SPEC, bundle_sha256="none")
    for number in range(EVER):
        vm = f"j-vm{number}"
        yield VmRequested(at=1.0, vm=vm)
        devices = tuple(device.model_dump() for device in _DEVICES)
        yield VmJoined(at=1.0, vm=vm, address="10.0.0.1", devices=devices)
        if number < EVER - LIVE:
            yield VmEnded(at=1.0, vm=vm, reason=EndReason.PREEMPTED)
    yield RecipeFixed(at=1.0, recipe=_RECIPE, calibration=model((0.01,) * STAGES).to_json())
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


async def _serve(home: Path, facts: list[Fact]) -> tuple[float, float, float]:
    """(part of a core that the event loop took, seconds of a view, seconds of /metrics)."""
    journal, tokens = SqliteJournal(home / "journal.sqlite3"), TokenStore(home / "tokens.sqlite3")
    journal.append("j", facts, [])
    service = Service(ServerConfig(home=home), journal, tokens, {"local": _Cloud()})
    await service.start()
    vms = list(service.jobs["j"].state.vms.live)
    for vm in vms:
        service.connect("j", vm, _Agent())
    began = time.monotonic()
    await asyncio.gather(*(_report(service, vm, number, began, 3.0) for number, vm in enumerate(vms)))
    before, began = time.thread_time(), time.monotonic()
    await asyncio.gather(*(_report(service, vm, number, began, WATCHED_S) for number, vm in enumerate(vms)))
    share = (time.thread_time() - before) / (time.monotonic() - began)
    assert service.jobs["j"].state.running, "nothing happened to the generation"
    view_s, _ = _timed(lambda: job_view(service.jobs["j"], {}).model_dump_json())
    metrics_s, _ = _timed(lambda: exposition(service))
    await service.close()
    tokens.close()
    journal.close()
    return share, view_s, metrics_s


async def _report(service: Service, vm: str, number: int, began: float, seconds: float) -> None:
    """Once a second, each VM at a moment of its own."""
    text = _text(vm)
    due = began + number / LIVE
    while due < began + seconds:
        await asyncio.sleep(due - time.monotonic())
        told = text.replace('"sequence":0', f'"sequence":{int(due * 1000)}')
        told = told.replace('"step":0', f'"step":{int(due / STEP_S)}')
        await service.report("j", Report.model_validate_json(told))
        due += 1.0


def _text(vm: str) -> str:
    """What the VM reports, at step 0."""
    worker = WorkerReport(
        worker=f"{vm}.0",
        incarnation=1,
        phase=Phase.RUNNING,
        generation=1,
        graph_hash="made-up",
        forward_s=0.1,
        backward_s=0.2,
    )
    return Report(
        vm=vm, sequence=0, orders_version=1, address="10.0.0.1", devices=_DEVICES, workers=[worker]
    ).model_dump_json()


def _timed(call: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


class _Cloud:
    """All VMs live."""

    def request(self, boot: BootConfig) -> None:
        raise AssertionError("no VM is missing")

    def release(self, vm: str) -> None:
        raise AssertionError("every VM is wanted")

    def list(self) -> dict[str, VmStatus]:
        return {f"j-vm{number}": VmStatus.RUNNING for number in range(EVER - LIVE, EVER)}


class _Agent:
    def push(self, orders: Orders) -> None:
        """Written by `rows`."""

    def replaced(self) -> None:
        raise AssertionError("each VM has one connection")


_SPEC: dict[str, Any] = {
    "name": "j",
    "entrypoint": "train:build",
    "resources": {"provider": "local", "max_nodes": LIVE},
    "training": {"global_batch_size": LIVE, "steps": 10**9},
    "checkpoint": {"uri": "file:///c", "interval": 10**6},
}
