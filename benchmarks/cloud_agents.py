"""The agents of rented VMs in one process, from their joining to their end: trainers only pretend.

Run by `clouds`: `python -m benchmarks.cloud_agents STEP_S`. Each line of standard input is a command: the
JSON of a boot file has a VM come up, `end VM` takes one away without a word.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

from makara.protocol.messages import BootConfig, Formed, Orders, Phase, Profile, Recipe
from makara.simulator import Calibration

from .made_up import model
from .manager_agents import Vm

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from calibrations import measured

SECTIONS = 10
GRAPH_HASH = "made-up"


class RentedVm(Vm):
    """It joins a job that knows nothing of its model yet, and is a member of one generation after the other.

    `steps` counts those of each job: state passes between trainers, which do without the manager.
    """

    def __init__(self, boot: BootConfig, steps: Counter[str]) -> None:
        super().__init__(boot)
        self._job = boot.job
        self._steps = steps

    def obey(self, orders: Orders) -> None:
        self._orders = orders
        self.connected.set()
        if orders.job is None:
            return
        worker = self._worker
        if worker.phase is Phase.STARTING:
            self.change(phase=Phase.IDLE)
        if orders.recipe is not None and worker.graph_hash is None:
            self.change(graph_hash=orders.recipe.graph_hash, profile=None, forward_s=0.1, backward_s=0.2)
        elif orders.action == "profile" and worker.profile is None:
            self.change(profile=_profile(orders))
        if orders.abandoned >= worker.generation > 0 and worker.phase is Phase.RUNNING:
            self.change(phase=Phase.BROKEN)
        self._follow(orders)

    def _follow(self, orders: Orders) -> None:
        generation, worker = orders.generation, self._worker
        if generation is None or generation.kind != "train" or worker.generation >= generation.number:
            return
        if generation.phase == "prepare" and worker.prepared < generation.number:
            first = generation.first == worker.worker
            self.change(prepared=generation.number, endpoint="10.0.0.1:1" if first else None)
        elif generation.phase == "go":
            step = self._steps[self._job]
            formed = Formed(generation=generation.number, step=step, rung="start", phases_s={"load": 1.0})
            self.change(generation=generation.number, phase=Phase.RUNNING, formed=formed, step=step)

    def step(self, seconds: float) -> None:
        if self._worker.phase is Phase.RUNNING and self._orders.generation is not None:
            self.change(step=self._steps[self._job] - 1)
            super().step(seconds)


def _profile(orders: Orders) -> Profile:
    assert orders.job is not None, "only a job's workers are asked for a profile"
    calibration: Calibration = model((0.01,) * SECTIONS)
    recipe = Recipe(
        microbatch_size=1,
        num_micro_batches=orders.job.global_batch_size,
        cuts=list(range(1, SECTIONS)),
        graph_hash=GRAPH_HASH,
        threads=1,
        device_kind="cpu",
        torch_version="none",
        bundle_sha256=orders.job.bundle_sha256,
    )
    return Profile(
        recipe=recipe,
        calibration=calibration.to_json(),
        measurements=measured(calibration, GRAPH_HASH).to_json(),
    )


class Machines:
    def __init__(self) -> None:
        self._vms: dict[str, tuple[RentedVm, asyncio.Task[None]]] = {}
        self._steps: Counter[str] = Counter()

    def command(self, line: str) -> None:
        if line.startswith("end "):
            ended = self._vms.pop(line.removeprefix("end "), None)
            if ended is not None:
                ended[1].cancel()
            return
        boot = BootConfig.model_validate_json(line)
        vm = RentedVm(boot, self._steps)
        self._vms[boot.vm] = vm, asyncio.create_task(vm.connection.run())

    async def train(self, step_s: float) -> None:
        """All jobs step at once, each VM if it is a member of its job's generation."""
        while True:
            await asyncio.sleep(step_s)
            self._steps.update({job: 1 for job in {vm.rsplit("-vm", 1)[0] for vm in self._vms}})
            for vm, _ in self._vms.values():
                vm.step(step_s)


async def main(step_s: float) -> None:
    machines = Machines()
    training = asyncio.create_task(machines.train(step_s))
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        machines.command(line)
    training.cancel()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
