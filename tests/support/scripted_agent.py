"""An agent without trainers: it speaks the whole protocol with a real manager and pretends to train.

Run by the local provider in place of the real agent: `python tests/support/scripted_agent.py BOOT_FILE`. It
publishes real checkpoints of one tiny weight, so that the manager's effects have something to do.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from pathlib import Path

from calibrations import measured, uniform
from makara.checkpoint import assemble, open_store, publish, write_part
from makara.protocol.messages import (
    TO_AGENT,
    BootConfig,
    CheckpointRef,
    Credential,
    DeviceInfo,
    Failure,
    Formed,
    Orders,
    Phase,
    Profile,
    Recipe,
    Report,
    StepMetrics,
    WorkerReport,
)
from makara.worker.agent.trust import trust
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

NUM_SECTIONS = 2
STEP_S = 0.05
FAILS = "FAILS"  # of the job's environment: its code raises an error at the first step
END_WAITS_FOR = "END_WAITS_FOR"  # of the job's environment: a file without which its last step is not taken


def safetensors(value: float) -> bytes:
    """A safetensors file with one float32 weight."""
    header = json.dumps({"weights/w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", value)


class ScriptedAgent:
    def __init__(self, boot: BootConfig) -> None:
        self.boot = boot
        self.token = boot.join_token
        self.orders: Orders | None = None
        self.sequence = 0
        self.worker = WorkerReport(worker=f"{boot.vm}.0", incarnation=1, phase=Phase.STARTING)
        self.metrics: list[StepMetrics] = []

    async def run(self) -> None:
        url = self.boot.manager_url.replace("http", "ws", 1) + f"/api/v1/agents/{self.boot.vm}"
        training = asyncio.create_task(self.train())
        while not training.done():
            try:
                header = {"Authorization": f"Bearer {self.token}"}
                trusted = {"ssl": trust(self.boot)} if self.boot.ca is not None else {}
                async with connect(url, additional_headers=header, **trusted) as connection:
                    sender = asyncio.create_task(self.send(connection))
                    try:
                        async for frame in connection:
                            self.take(frame)
                    finally:
                        sender.cancel()
            except InvalidStatus as error:
                raise SystemExit(f"refused: {error}") from error
            except (OSError, ConnectionClosed):
                await asyncio.sleep(0.1)  # the manager is away: training goes on

    def take(self, frame: str | bytes) -> None:
        message = TO_AGENT.validate_json(frame)
        if isinstance(message, Credential):
            self.token = message.token
        elif isinstance(message, Orders):
            if message.action == "shutdown":
                raise SystemExit(0)
            self.orders = message

    async def send(self, connection) -> None:
        while True:
            self.sequence += 1
            metrics, self.metrics = self.metrics, []
            report = Report(
                vm=self.boot.vm,
                sequence=self.sequence,
                orders_version=self.orders.version if self.orders else 0,
                address=self.boot.address,
                devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 34)],
                workers=[self.worker],
                metrics=metrics,
            )
            await connection.send(report.model_dump_json())
            await asyncio.sleep(STEP_S)

    async def train(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self.orders is not None and self.orders.job is not None:
                self.turn(self.orders)

    def turn(self, orders: Orders) -> None:
        generation, worker = orders.generation, self.worker
        if worker.phase is Phase.STARTING:
            self.change(phase=Phase.IDLE)
        if orders.recipe is not None:
            self.change(graph_hash=orders.recipe.graph_hash, profile=None)
        elif orders.action == "profile":
            self.change(profile=self.profile(orders))
        if orders.abandoned >= worker.generation > 0 and worker.phase is Phase.RUNNING:
            self.change(phase=Phase.BROKEN)
        if generation is not None and generation.kind == "train" and generation.number > worker.generation:
            if generation.phase == "prepare":
                self.change(prepared=generation.number, endpoint="127.0.0.1:1")
            else:
                self.switch(orders)
        if self.worker.phase is Phase.RUNNING:
            self.step(orders)

    def switch(self, orders: Orders) -> None:
        generation = orders.generation
        assert generation is not None
        step = max([self.worker.step, *(ref.step for ref in generation.checkpoints)])
        formed = Formed(generation=generation.number, step=step, rung="start", phases_s={"load": 0.001})
        self.change(phase=Phase.RUNNING, generation=generation.number, step=step, formed=formed)

    def step(self, orders: Orders) -> None:
        assert orders.job is not None
        assert orders.generation is not None
        leads = orders.generation.first == self.worker.worker
        if orders.hold:
            self.save(orders, leads)
            self.change(phase=Phase.HELD)
            return
        step, waits_for = self.worker.step + 1, orders.job.envs.get(END_WAITS_FOR)
        if step >= orders.job.steps and waits_for is not None and not Path(waits_for).exists():
            return
        if FAILS in orders.job.envs:
            self.change(
                phase=Phase.EXITED, failure=Failure(kind="user", message="the job's code raised this")
            )
            return
        self.change(step=step)
        if leads:
            numbers = {"loss": 3.0 / step, "grad_norm": float("nan"), "seconds": STEP_S}
            self.metrics.append(
                StepMetrics(step=step, generation=self.worker.generation, samples=4, **numbers)
            )
        if step >= orders.job.steps:
            self.save(orders, leads)
            self.change(phase=Phase.FINISHED)

    def save(self, orders: Orders, leads: bool) -> None:
        if not leads:
            return
        assert orders.job is not None
        job, step, generation = orders.job.job, self.worker.step, self.worker.generation
        store, checkpoint = open_store(orders.job.store.uri), CheckpointRef(step=step, generation=generation)
        receipts = [
            write_part(store, job, checkpoint, section, 0, 1, safetensors(step)) for section in range(1)
        ]
        manifest = assemble(
            receipts, job=job, checkpoint=checkpoint, num_sections=1, data_position=step, recipe={}
        )
        publish(store, job, generation, manifest)
        self.change(published=CheckpointRef(step=step, generation=generation))

    def profile(self, orders: Orders) -> Profile:
        assert orders.job is not None
        recipe = Recipe(
            microbatch_size=1,
            num_micro_batches=orders.job.global_batch_size,
            cuts=list(range(1, NUM_SECTIONS)),
            graph_hash="scripted",
            threads=1,
            device_kind="cpu",
            torch_version="none",
            bundle_sha256=orders.job.bundle_sha256,
        )
        calibration = uniform(NUM_SECTIONS, microbatch_size=1)
        measurements = measured(calibration, recipe.graph_hash).to_json()
        return Profile(recipe=recipe, calibration=calibration.to_json(), measurements=measurements)

    def change(self, **values: object) -> None:
        self.worker = self.worker.model_copy(update=values)


if __name__ == "__main__":
    asyncio.run(ScriptedAgent(BootConfig.model_validate_json(Path(sys.argv[1]).read_bytes())).run())
