"""Plans for emulated workers, chosen as a job's are, and what a simulation says of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from makara.morphing import Choice, Request, Slot, choose
from makara.simulator import Calibration, Link, simulate
from makara.simulator.calibration.links import AllReduce, fitted_hop

from .networks import Network

_AMPLE_BYTES = 1 << 40
_SEEDS = 16  # of simulations with jitter; their mean counts


@dataclass(frozen=True, slots=True)
class Planner:
    """What the planner knows: the calibration, taken before, and the network."""

    calibration: Calibration
    network: Network
    sums: tuple[AllReduce, ...]
    """All-reduces as measured on this network."""
    workers: tuple[str, ...]
    num_micro_batches: int
    memory_bytes: int = _AMPLE_BYTES
    """Of each worker; left out, memory bounds nothing."""

    def choose(
        self,
        depth: int | None = None,
        replicas: int | None = None,
        *,
        recompute: Literal["auto", "on", "off"] = "off",
        unequal: bool = False,
    ) -> Choice:
        """The plan for these workers; P and D are the planner's choice where they are left out.

        `unequal`: pipelines of different depth may be chosen.
        """
        choice = choose(
            Request(
                calibration=self.on_network,
                num_sections=self.calibration.num_sections,
                num_micro_batches=self.num_micro_batches,
                workers=self._slots,
                generation=1,
                pipeline_parallel_degree=depth,
                data_parallel_degree=replicas,
                recompute=recompute,
                unequal_pipelines="auto" if unequal else "off",
            )
        )
        assert isinstance(choice, Choice), choice
        return choice

    def predicted_s(self, choice: Choice) -> float:
        """The simulated step; its mean over draws of the jitter where there is any."""
        vm_of = [self.vm_of(worker) for worker in choice.workers]
        seeds = range(_SEEDS if self.network.inter_vm.jitter_s else 1)
        return statistics.mean(
            simulate(choice.plan, self.on_network, vm_of=vm_of, seed=seed, timeline=False).time_s
            for seed in seeds
        )

    def vm_of(self, worker: str) -> str:
        return self.network.vm(self.workers.index(worker))

    @property
    def on_network(self) -> Calibration:
        inter_vm, intra_vm = self.network.links()
        return replace(
            self.calibration,
            inter_vm=_with_hop(inter_vm, [entry for entry in self.sums if not entry.same_vm]),
            intra_vm=_with_hop(intra_vm, [entry for entry in self.sums if entry.same_vm]),
        )

    @property
    def _slots(self) -> Sequence[Slot]:
        return [Slot(worker, self.vm_of(worker), self.memory_bytes) for worker in self.workers]


def _with_hop(link: Link, sums: Sequence[AllReduce]) -> Link:
    hop = fitted_hop(sums)
    return link if hop is None else replace(link, hop_latency_s=hop[0], hop_bytes_per_s=hop[1])
