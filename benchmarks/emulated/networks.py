"""Networks between emulated workers, at full size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from makara.simulator import Link

from ..wires import Emulation
from .models import SCALE

_INTRA_VM = Emulation(bytes_per_s=12e9, latency_s=50e-6, jitter_s=0.0)


@dataclass(frozen=True, slots=True)
class Network:
    """Links between VMs of `workers_per_vm` each, and inside them; rates are those of full-sized tensors."""

    name: str
    inter_vm: Emulation
    intra_vm: Emulation = _INTRA_VM
    workers_per_vm: int = 1

    def vm(self, worker: int) -> str:
        return f"vm{worker // self.workers_per_vm}"

    def between(self, vms: Sequence[str]) -> Emulation:
        """The link of a ring, or of a pair, on these VMs; at the scale."""
        full = self.intra_vm if len(set(vms)) == 1 else self.inter_vm
        return Emulation(SCALE * full.bytes_per_s, full.latency_s, full.jitter_s)

    def links(self) -> tuple[Link, Link]:
        """(between VMs, inside a VM) as a simulation takes them; at the scale."""
        return as_link(self.between(["a", "b"])), as_link(self.between(["a"]))


_NOTHING = Emulation(bytes_per_s=1e15, latency_s=0.0, jitter_s=0.0)
IDEAL = Network("ideal", _NOTHING, _NOTHING)
"""Messages take no longer than this machine needs to pass them on."""


def as_link(emulation: Emulation) -> Link:
    return Link(latency_s=emulation.latency_s, bytes_per_s=emulation.bytes_per_s, jitter_s=emulation.jitter_s)
