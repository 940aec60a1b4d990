"""What the operations and messages of a component cost on a cluster, in the cells it is played in."""

from __future__ import annotations

from functools import lru_cache

from ..pipeline import Component, Hop, Range
from ..pipeline.flat import (
    AFTER,
    BEFORE,
    COUNT,
    FREE,
    HOP_SIZE,
    HOPS,
    HOPS_END,
    OWNER,
    SIZE,
    TOTAL,
    VISITS,
    VISITS_END,
    WORKER_SIZE,
    WORKERS,
    WORKERS_END,
    Cells,
)
from .calibration.data import Calibration
from .calibration.sizes import Sizes
from .cluster import Cluster, to_ns
from .records import (
    BACK,
    CHANNEL,
    GRADIENT_BYTES,
    GRADIENTS_SEEN,
    HOME,
    INPUT_BYTES,
    INPUTS_SEEN,
    JITTER,
    KEPT,
    LEAST,
    LOG,
    NEVER,
    NUMBERED,
    OCCUPIED,
    ONWARD,
    OPEN_BACKWARD,
    OPEN_FORWARD,
    PLAY_HOP_SIZE,
    PLAY_WORKER_SIZE,
    SENDER,
    SOURCE_FIELDS,
    SOURCES,
    SOURCES_END,
    STREAM,
    TAKES,
    WAY,
    WIRE,
)

SIZES = (PLAY_WORKER_SIZE, PLAY_HOP_SIZE)


def cells_for(component: Component) -> int:
    """How many a play needs at `FREE`: for wires, channels and sources."""
    return (4 + 2 * SOURCE_FIELDS) * sum(len(path.hops) for path in component.paths)


def price(component: Component, records: list[int], cluster: Cluster) -> None:
    """Write into the records what operations and messages cost, and that nothing has run."""
    hops = [hop for path in component.paths for hop in path.hops]
    for record, hop in zip(_records(records), hops, strict=True):
        _price_operations(records, record, hop, cluster)
        records[record + INPUTS_SEEN] = 0 if records[record + BEFORE] else records[record + COUNT]
        records[record + GRADIENTS_SEEN] = 0 if records[record + AFTER] else records[record + COUNT]
    _lay_links(records, hops, cluster)
    for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
        records[worker + OPEN_FORWARD] = records[worker + OPEN_BACKWARD] = NEVER


def list_sources(records: list[int]) -> None:
    """Write down for every worker who sends to it."""
    free = records[FREE] + 4 * len(_records(records))  # behind wires and channels
    for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
        free = _list_sources(records, worker, free)


def keep_log(records: list[int]) -> None:
    """Make room for the operations of all workers."""
    for worker in range(records[WORKERS], records[WORKERS_END], records[WORKER_SIZE]):
        records[worker + LOG] = records[SIZE]
        records[SIZE] += 6 * records[worker + TOTAL]


def has_jitter(records: list[int]) -> bool:
    return any(records[record + field + JITTER] for record in _records(records) for field in (ONWARD, HOME))


def draw_apart(component: Component, cells: Cells) -> None:
    """Delays of messages are drawn by sender, stage, direction and number of the message."""
    records = iter(_records(cells))
    number = 0
    for path in component.paths:
        for stage, hop in enumerate(path.hops):
            record = next(records)
            for direction, link in enumerate((record + ONWARD, record + HOME)):
                cells[link + STREAM] = (hop.worker << 11) + (stage << 1) + direction
                cells[link + NUMBERED] = number
        number += len(path.micro_batches)


def _records(cells: Cells) -> range:
    return range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE])


def _price_operations(cells: list[int], record: int, hop: Hop, cluster: Cluster) -> None:
    """Inputs stay until the backward; without recomputation so does what the forward keeps."""
    forward_ns = cluster.forward_ns(hop.worker, hop.range)
    again_ns = cluster.forward_ns(hop.worker, cluster.sizes.trained(hop.range))
    cells[record + TAKES : record + ONWARD] = (
        *(forward_ns, forward_ns, again_ns, cluster.backward_ns(hop.worker, hop.range)),
        *_bytes(cluster.sizes, hop.range),
    )


@lru_cache(maxsize=4096)
def _bytes(sizes: Sizes, span: Range) -> tuple[int, ...]:
    """What operations of a range hold, what they leave, and what comes to it."""
    kept, held = sizes.kept(span), sizes.held(span)
    inputs, gradients = sizes.inputs(span), sizes.gradients(span)
    forward, brief = sizes.forward_peak(span), sizes.brief_forward_peak(span)
    again = sizes.forward_peak(sizes.trained(span))
    return (
        *(forward, brief, again, sizes.backward_peak(span)),
        *(held + kept, held, kept, -(kept + held + inputs + gradients)),
        *(inputs, gradients),
    )


def _lay_links(cells: list[int], hops: list[Hop], cluster: Cluster) -> None:
    """Activations and gradients from one worker to another share a wire."""
    free = cells[FREE]
    places: dict[tuple[int, ...], int] = {}
    prices: dict[tuple[bool, int], tuple[int, int, int]] = {}
    hop_of = dict(zip(_records(cells), hops, strict=True))
    for record, hop in hop_of.items():
        for direction, (field, neighbour) in enumerate(((ONWARD, AFTER), (HOME, BEFORE))):
            target = hop_of.get(cells[record + neighbour])
            if target is None or target.worker == hop.worker:
                continue
            way, same_vm = record + field, cluster.vm_of[hop.worker] == cluster.vm_of[target.worker]
            size_bytes = cells[cells[record + neighbour] + (GRADIENT_BYTES if direction else INPUT_BYTES)]
            wire, channel = (hop.worker, target.worker), (hop.worker, target.worker, direction)
            cells[way + WIRE] = places.setdefault(wire, free + len(places))
            cells[way + CHANNEL] = places.setdefault(channel, free + len(places))
            if (same_vm, size_bytes) not in prices:
                prices[same_vm, size_bytes] = _price_message(cluster.calibration, same_vm, size_bytes)
            cells[way + OCCUPIED : way + JITTER + 1] = prices[same_vm, size_bytes]


def _price_message(calibration: Calibration, same_vm: bool, size_bytes: int) -> tuple[int, int, int]:
    """Nanoseconds that it occupies a wire, that it is on its way, and of jitter."""
    link = calibration.link(same_vm)
    return (
        to_ns(link.occupied_s(size_bytes)),
        to_ns(link.latency_s + calibration.message_s),
        to_ns(link.jitter_s),
    )


def _list_sources(cells: Cells, worker: int, free: int) -> int:
    """Who sends to the worker, and the least time from the start of an operation there to an arrival."""
    least: dict[int, int] = {}
    for visit in range(cells[worker + VISITS], cells[worker + VISITS_END]):
        hop = cells[visit]
        for neighbour, field, what in ((cells[hop + BEFORE], ONWARD, KEPT), (cells[hop + AFTER], HOME, BACK)):
            way = neighbour + field
            if neighbour and cells[way + WIRE]:
                takes_ns = cells[neighbour + TAKES + what] + cells[way + OCCUPIED] + cells[way + WAY]
                sender = cells[neighbour + OWNER]
                least[sender] = min(takes_ns, least.get(sender, takes_ns))
    cells[worker + SOURCES] = free
    for sender, takes_ns in least.items():
        cells[free + SENDER], cells[free + LEAST] = sender, takes_ns
        free += SOURCE_FIELDS
    cells[worker + SOURCES_END] = free
    return free
