"""The simulated machines: what the cloud has, and which VMs were made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...protocol.messages import TRAINER_PROTOCOL
from ..world import Trainer, Vm

GRAPH_HASH = "replayed"


@dataclass(eq=False, kw_only=True)
class NodeVm(Vm[Trainer]):
    """A VM on a node of the trace. Its trainers never fail by themselves, so each has one incarnation."""

    node: str
    began_ns: int
    joined: bool = False


@dataclass(eq=False)
class Fleet:
    """The cloud's nodes and the job's VMs. A request waits, in order, until there is a node for it."""

    workers_per_vm: int
    trainer_protocol: int = TRAINER_PROTOCOL
    free: dict[str, None] = field(default_factory=dict[str, None])
    """Nodes that nobody has, in the order in which they came."""
    waiting: dict[str, None] = field(default_factory=dict[str, None])
    """Requested VMs that have no node yet, oldest first."""
    leaving: set[str] = field(default_factory=set[str])
    """Nodes that the cloud has said it will take: they are given to nobody."""
    vms: dict[str, NodeVm] = field(default_factory=dict[str, NodeVm])
    """Living VMs."""
    by_node: dict[str, NodeVm] = field(default_factory=dict[str, NodeVm])
    trainers: dict[str, Trainer] = field(default_factory=dict[str, Trainer])
    """Trainers of living VMs, by worker."""
    num_nodes: int = 0
    """Nodes that there are, the job's included."""
    billed_ns: int = 0
    """Of VMs that ended."""

    def hand_out(self, now_ns: int) -> list[NodeVm]:
        """VMs made of free nodes for the requests that wait."""
        made: list[NodeVm] = []
        while self.waiting and self.free:
            name, node = next(iter(self.waiting)), next(iter(self.free))
            del self.waiting[name], self.free[node]
            trainers = [
                Trainer(f"{name}.{index}", trainer_protocol=self.trainer_protocol)
                for index in range(self.workers_per_vm)
            ]
            vm = NodeVm(name, trainers, node=node, began_ns=now_ns)
            self.vms[name] = self.by_node[node] = vm
            self.trainers.update((trainer.worker, trainer) for trainer in trainers)
            made.append(vm)
        return made

    def end(self, vm: NodeVm, now_ns: int) -> None:
        """The VM is gone, or was given back; from now on it costs nothing."""
        vm.alive = False
        self.billed_ns += now_ns - vm.began_ns
        del self.vms[vm.name], self.by_node[vm.node]
        for trainer in vm.trainers:
            del self.trainers[trainer.worker]

    def vm_ns(self, now_ns: int) -> int:
        """The VMs' time until now, in all."""
        return self.billed_ns + sum(now_ns - vm.began_ns for vm in self.vms.values())
