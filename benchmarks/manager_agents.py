"""The agents of a thousand VMs in one process: the worker's own connections, and trainers that only pretend.

Run by `manager`: `python -m benchmarks.manager_agents MANAGER_URL FOLDER STEP_S`, with lines "vm token" on
standard input, then an empty one. The next lines are commands: be ready to train, then begin to step.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from makara.protocol.messages import (
    At,
    BootConfig,
    DeviceInfo,
    Formed,
    Orders,
    Phase,
    Progress,
    Report,
    StepMetrics,
    WorkerReport,
)
from makara.worker.agent import connection
from makara.worker.agent.reports import as_beat, metrics_backlog

DEVICE = DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 34)
_AT_A_TIME = 5  # connections that are being opened


class Vm:
    """One VM with one worker; a `makara.worker.agent.connection.Peer`."""

    def __init__(self, boot: BootConfig, last_rank: int) -> None:
        Path(boot.directory).mkdir()
        self.connection = connection.ManagerConnection(boot, self)
        self.connected = asyncio.Event()
        self._vm, self._last_rank = boot.vm, last_rank
        self._orders = Orders(version=0, action="idle")
        self._backlog = metrics_backlog()
        self._sequence = self._count = 0
        self._told: Report | None = None
        self._worker = WorkerReport(worker=f"{boot.vm}.0", incarnation=1, phase=Phase.STARTING)

    def obey(self, orders: Orders) -> None:
        self._orders, generation = orders, orders.generation
        self.connected.set()
        if generation is None:
            return
        if generation.phase == "prepare" and self._worker.prepared < generation.number:
            first = generation.first == self._worker.worker
            self.change(prepared=generation.number, endpoint="10.0.0.1:1" if first else None)
        if generation.phase == "go" and self._worker.generation < generation.number:
            formed = Formed(generation=generation.number, step=self._worker.step, rung="start", phases_s={})
            self.change(generation=generation.number, phase=Phase.RUNNING, formed=formed)

    def acknowledge(self, sequence: int) -> None:
        self._backlog.acknowledge(sequence)

    def change(self, **values: object) -> None:
        self._worker = self._worker.model_copy(update=values)
        self.connection.changed()

    def ready(self) -> None:
        self.change(phase=Phase.IDLE, graph_hash="made-up", forward_s=0.1, backward_s=0.2)

    def step(self, seconds: float) -> None:
        generation = self._orders.generation
        assert generation is not None, "it trains"
        step = self._worker.step + 1
        if generation.ranks[self._worker.worker] in (0, self._last_rank):
            metrics = StepMetrics(
                step=step, generation=generation.number, loss=1.0, grad_norm=1.0, seconds=seconds, samples=1
            )
            self._backlog.add(metrics)
        self.change(step=step)

    def report(self, limit_bytes: int, *, is_first: bool, may_beat: bool) -> tuple[str, bool]:
        self._sequence, self._count = self._sequence + 1, self._count + 1
        if is_first:
            self._backlog.send_again()
        report = Report(
            vm=self._vm,
            sequence=self._sequence,
            orders_version=self._orders.version,
            address="10.0.0.1",
            devices=[DEVICE],
            workers=[self._worker],
            metrics=self._backlog.take(self._sequence, limit_bytes),
            progress=[Progress(count=self._count, at=At.COMPUTING)],
        )
        if may_beat and (beat := as_beat(report, self._told)) is not None:
            return beat, False
        self._told = report
        return report.model_dump_json(), True


async def main(url: str, folder: Path, step_s: float) -> None:
    tokens = dict(line.split() for line in iter(sys.stdin.readline, "\n"))
    vms = [
        Vm(
            BootConfig(vm=vm, job="j", manager_url=url, join_token=token, directory=str(folder / vm)),
            len(tokens) - 1,
        )
        for vm, token in tokens.items()
    ]
    connections: list[asyncio.Task[None]] = []
    for begin in range(0, len(vms), _AT_A_TIME):
        some = vms[begin : begin + _AT_A_TIME]
        connections += [asyncio.create_task(vm.connection.run()) for vm in some]
        await asyncio.gather(*(vm.connected.wait() for vm in some))
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for vm in vms:
        vm.ready()
    await asyncio.to_thread(sys.stdin.readline)
    due = time.monotonic()
    while True:
        due += step_s
        await asyncio.sleep(due - time.monotonic())
        for vm in vms:  # all at once: each has seen the same commit
            vm.step(step_s)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
