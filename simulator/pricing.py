"""Sets up a component for the engine: the costs of its operations and messages on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ..pipeline.arrays import NONE, lay_out, operation
from ..pipeline.components import Component
from ..pipeline.plan import Hop, Path, Range
from ..pipeline.policy import BACKWARD, FORWARD, INPUT
from .calibration.data import Calibration
from .calibration.sizes import Sizes
from .cluster import Cluster, to_ns
from .fields import Link, SimHop, SimOperation, SimWorker, Wire


@dataclass(slots=True)
class Priced:
    """A component with its costs, before the engine has run it."""

    workers: list[SimWorker]
    hops: list[SimHop]
    operations: list[SimOperation] = field(default_factory=list[SimOperation])
    links: list[Link] = field(default_factory=list[Link])
    wires: list[Wire] = field(default_factory=list[Wire])

    @property
    def has_jitter(self) -> bool:
        return any(link.jitter_ns for link in self.links)


def price(component: Component, cluster: Cluster) -> Priced:
    """Lay out a component with the costs of its operations and messages."""
    priced = Priced(*lay_out(component, SimWorker, SimHop))
    taken = [(path, hop) for path in component.paths for hop in path.hops]
    if cluster.starts_ns:
        for worker, rank in zip(priced.workers, component.by_first_visit, strict=True):
            worker.clock = worker.wake_at = cluster.starts_ns[rank]
    num_arrivals = 0
    for index, (hop, (path, of)) in enumerate(zip(priced.hops, taken, strict=True)):
        hop.first_arrival = num_arrivals
        num_arrivals += hop.num_turns
        sizes = cluster.sizes_on(path)
        hop.input_bytes = sizes.inputs(of.range)
        hop.gradient_bytes = sizes.gradients(of.range)
        priced.operations += _operations(index, path, of, cluster, hop.is_split == 1)
    _lay_links(priced, [hop for _, hop in taken], cluster)
    return priced


def _operations(index: int, path: Path, hop: Hop, cluster: Cluster, is_split: bool) -> list[SimOperation]:
    """A hop's operations in the order of their numbers: FORWARD, FORWARD_DISCARD, RECOMPUTE, BACKWARD, INPUT,
    WEIGHT."""
    forward_ns = cluster.forward_ns(hop.worker, hop.range)
    sizes = cluster.sizes_on(path)
    recompute_ns = cluster.forward_ns(hop.worker, sizes.trained(hop.range))
    backward_ns = cluster.backward_ns(hop.worker, hop.range, path)
    halves_ns = cluster.halves_ns(hop.worker, hop.range, path) if is_split else (backward_ns, backward_ns)
    times = (forward_ns, forward_ns, recompute_ns, backward_ns, *halves_ns)
    actions = zip(times, _bytes(sizes, hop.range), strict=True)
    return [SimOperation(index, action, takes_ns, *sizes) for action, (takes_ns, sizes) in enumerate(actions)]


@lru_cache(maxsize=1 << 14)
def _bytes(sizes: Sizes, span: Range) -> tuple[tuple[int, int], ...]:
    """(bytes held while it runs, bytes left) for each operation of a range.

    Inputs stay until the backward, or W; without recomputation so do the activations that the forward keeps.
    """
    kept, held = sizes.kept(span), sizes.held(span)
    freed = kept + held + sizes.inputs(span) + sizes.gradients(span)
    return (
        (sizes.forward_peak(span), held + kept),
        (sizes.brief_forward_peak(span), held),
        (sizes.forward_peak(sizes.trained(span)), kept),
        (sizes.backward_peak(span), -freed),
        (sizes.input_peak(span), sizes.pending(span)),
        (sizes.weight_peak(span), -freed - sizes.pending(span)),
    )


def _lay_links(priced: Priced, taken: Sequence[Hop], cluster: Cluster) -> None:
    """Lay out links; activations and gradients from one worker to another share a wire."""
    wires: dict[tuple[int, int], int] = {}
    first_of_path = 0
    for index, hop in enumerate(priced.hops):
        if hop.before == NONE and index:
            first_of_path = index
        for carries_gradients, neighbour in enumerate((hop.after, hop.before)):
            if neighbour == NONE or (to := priced.hops[neighbour]).worker == hop.worker:
                continue
            ends = taken[index].worker, taken[neighbour].worker
            size_bytes = to.gradient_bytes if carries_gradients else to.input_bytes
            same_vm = cluster.vm_of[ends[0]] == cluster.vm_of[ends[1]]
            transfer_ns, latency_ns, jitter_ns = _message_ns(cluster.calibration, same_vm, size_bytes)
            backward = INPUT if hop.is_split else BACKWARD
            sending = operation(index, backward if carries_gradients else FORWARD)
            takes_ns = priced.operations[sending].takes_ns
            receiver = priced.workers[to.worker]
            link = Link(
                wire=wires.setdefault(ends, len(wires)),
                carries_gradients=carries_gradients,
                transfer_ns=transfer_ns,
                latency_ns=latency_ns,
                jitter_ns=jitter_ns,
                # Jitter is a function of sender, stage, direction and number of the message.
                stream=(ends[0] << 11) + (index - first_of_path << 1) + carries_gradients,
                first_message=hop.first_turn,
                sender=hop.worker,
                lead_ns=takes_ns + transfer_ns + latency_ns,
                next_here=receiver.first_link,
            )
            receiver.first_link = len(priced.links)
            if carries_gradients:
                hop.gradient_link = len(priced.links)
            else:
                hop.activation_link = len(priced.links)
            priced.links.append(link)
    priced.wires = [Wire() for _ in wires]


def _message_ns(calibration: Calibration, same_vm: bool, size_bytes: int) -> tuple[int, int, int]:
    """Nanoseconds (on the wire, of latency, of mean jitter) of a message."""
    link = calibration.link(same_vm)
    return (
        to_ns(link.occupied_s(size_bytes)),
        to_ns(link.latency_s + calibration.message_s),
        to_ns(link.jitter_s),
    )
