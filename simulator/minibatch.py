"""One mini-batch of a plan in virtual time: pipelines, the sums beside them, the commit, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline import Plan, Range
from ..pipeline.flat import AFTER, HOP_SIZE, HOPS, HOPS_END, OWNER, WORKER_SIZE, WORKERS, WORKERS_END
from .calibration.data import Calibration
from .closing import Closing, Ended, Seat, close_step, closings_of
from .cluster import NS_PER_S, Cluster
from .code import Code, current
from .pipelines import Played, play_all
from .records import BACK, BUSY, KEPT, LAST_BACKWARD, LAST_FORWARD, PEAK, TAKES
from .spans import Span, memory_of, spans_of


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What a step takes. Tuples are by worker in rank order; seconds and bytes."""

    time_s: float
    """From the first forward until the last worker has applied the step."""
    pipeline_s: float
    """Until the last backward has ended; the rest is what is left of the sums, commit and optimizer."""
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    """With a checkpoint of the step before on its way to the store."""
    # Empty unless the timeline is asked for:
    timeline: tuple[Span, ...]
    closings: tuple[Closing, ...]
    """In the order in which each worker comes to them; what takes no time is left out."""
    memory: tuple[tuple[tuple[float, int], ...], ...]
    """For each worker (time_s, resident bytes from then on), from the start of the step to its end."""


def simulate(
    plan: Plan,
    calibration: Calibration,
    *,
    vm_of: Sequence[str] | None = None,
    slowdown: Sequence[float] | None = None,
    seed: int = 0,
    timeline: bool = True,
) -> MiniBatch:
    """Plays one step of `plan` (Varuna §4.4). The same arguments always give the same answer.

    `vm_of` names each worker's VM (left out: each its own), which chooses the link; `slowdown` multiplies
    each worker's compute times; `seed` draws the links' jitter. Without `timeline` nothing is kept of single
    operations. Pipelines that are alike are played once.
    Raises `ValueError` naming the argument whose length does not fit the plan.
    """
    return simulate_with(
        current(), plan, _cluster(plan, calibration, vm_of, slowdown), seed=seed, timeline=timeline
    )


def simulate_with(code: Code, plan: Plan, cluster: Cluster, *, seed: int, timeline: bool) -> MiniBatch:
    """`simulate`, by interpreted or by compiled code."""
    parts = play_all(plan, cluster, seed, code, keeps_log=timeline)
    seats = [seat for played in parts for seat in _seats(plan, cluster, played)]
    seats += _unused(plan, cluster, seats)
    ended = close_step(plan, cluster, seats, max(_losses_ns(played.cells) for played in parts))
    lasting = _lasting_bytes(cluster, seats)
    update = {span: cluster.sizes.update(span) for span in lasting}
    times: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] * plan.num_workers
    for seat in seats:
        busy_ns = seat.busy_ns + seat.apply_ns
        peak = lasting[seat.span] + max(seat.peak_bytes, update[seat.span])
        one = busy_ns / NS_PER_S, (ended.end_ns - busy_ns) / NS_PER_S, peak
        for worker in seat.workers:
            times[worker] = one
    busy_s, idle_s, peak_bytes = zip(*times, strict=True)
    return MiniBatch(
        time_s=ended.end_ns / NS_PER_S,
        pipeline_s=ended.pipeline_ns / NS_PER_S,
        busy_s=busy_s,
        idle_s=idle_s,
        peak_bytes=peak_bytes,
        timeline=spans_of(parts) if timeline else (),
        closings=closings_of(ended) if timeline else (),
        memory=_memory(plan, cluster, parts, lasting, ended) if timeline else (),
    )


def _cluster(
    plan: Plan, calibration: Calibration, vm_of: Sequence[str] | None, slowdown: Sequence[float] | None
) -> Cluster:
    vms = [f"worker {worker}" for worker in range(plan.num_workers)] if vm_of is None else list(vm_of)
    factors = [1.0] * plan.num_workers if slowdown is None else list(slowdown)
    if calibration.num_sections != plan.num_sections:
        raise ValueError(
            f"calibration: it is of {calibration.num_sections} sections, the plan has {plan.num_sections}"
        )
    for name, given in (("vm_of", vms), ("slowdown", factors)):
        if len(given) != plan.num_workers:
            raise ValueError(f"{name}: {len(given)} entries for the plan's {plan.num_workers} workers")
    if any(not factor > 0 for factor in factors):
        raise ValueError("slowdown: every factor must be > 0")
    return Cluster(calibration, tuple(vms), tuple(factors))


def _seats(plan: Plan, cluster: Cluster, played: Played) -> list[Seat]:
    """The workers of components that are alike, those at one place of all of them together."""
    cells = played.cells
    seats: dict[int, Seat] = {}
    ranks = zip(*(component.by_first_visit for component in played.alike), strict=True)
    records = range(cells[WORKERS], cells[WORKERS_END], cells[WORKER_SIZE])
    for record, workers in zip(records, ranks, strict=True):
        span = plan.ranges[workers[0]]
        seats[record] = Seat(
            workers=workers,
            span=span,
            apply_ns=cluster.apply_ns(workers[0], span),
            busy_ns=cells[record + BUSY],
            peak_bytes=cells[record + PEAK],
        )
    hops = (hop for path in played.alike[0].paths for hop in path.hops)
    for record, hop in zip(range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE]), hops, strict=True):
        seat = seats[cells[record + OWNER]]
        began_ns, takes_ns = cells[record + LAST_BACKWARD], cells[record + TAKES + BACK]
        ends_ns = seat.ends_ns
        seat.stop_ns = max(seat.stop_ns, began_ns + takes_ns)
        for section, share in cluster.backward_shares(hop.range):  # within an operation, by their shares
            ends_ns[section] = max(began_ns + round(takes_ns * share), ends_ns.get(section, 0))
    return list(seats.values())


def _unused(plan: Plan, cluster: Cluster, seats: Sequence[Seat]) -> list[Seat]:
    """The workers that no micro-batch comes to."""
    rest = set(range(plan.num_workers)).difference(*(seat.workers for seat in seats))
    alike: dict[tuple[Range, float], list[int]] = {}
    for worker in sorted(rest):
        alike.setdefault((plan.ranges[worker], cluster.slowdown[worker]), []).append(worker)
    return [Seat(workers, span, cluster.apply_ns(workers[0], span)) for (span, _), workers in alike.items()]


def _losses_ns(cells: Sequence[int]) -> int:
    """When all forwards at ends of paths are done."""
    return max(
        cells[hop + LAST_FORWARD] + cells[hop + TAKES + KEPT]
        for hop in range(cells[HOPS], cells[HOPS_END], cells[HOP_SIZE])
        if not cells[hop + AFTER]
    )


def _lasting_bytes(cluster: Cluster, seats: Sequence[Seat]) -> dict[Range, int]:
    """By range: state, and the copy of a checkpoint on its way to the store."""
    num_hosts = [0] * cluster.calibration.num_sections
    for seat in seats:
        for section in seat.span.sections:
            num_hosts[section] += len(seat.workers)
    sizes = cluster.sizes
    return {
        span: sizes.state(span) + sizes.snapshot([(section, num_hosts[section]) for section in span.sections])
        for span in {seat.span for seat in seats}
    }


def _memory(
    plan: Plan, cluster: Cluster, parts: Sequence[Played], lasting: dict[Range, int], ended: Ended
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """What each worker holds over time: what lasts, then what the pipeline and the update add."""
    held = memory_of(parts)
    result: list[tuple[tuple[float, int], ...]] = []
    for worker, span in enumerate(plan.ranges):
        steps = {0: 0} | dict(held.get(worker, ()))
        steps |= {ended.committed_ns: cluster.sizes.update(span), ended.end_ns: 0}
        result.append(
            tuple((at_ns / NS_PER_S, lasting[span] + size_bytes) for at_ns, size_bytes in steps.items())
        )
    return tuple(result)
