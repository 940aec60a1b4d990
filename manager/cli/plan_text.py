"""The ranking of plans as text: a table with costs and assumptions; and the VMs that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ...morphing import Candidate, Request, Risk, Slot
from ...simulator import Calibration
from ...simulator.units import seconds, size
from ..core.timing import Timing
from ..core.worth import first_risk
from ..replay import Prices
from ..service.planning.ranking import Ranking
from ..service.planning.requests import request_for
from ..spec.job_spec import JobSpec
from .calibration.table import aligned

_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedVms:
    """The VMs that a plan is for. All are paid, used or not."""

    num_vms: int
    workers_per_vm: int
    memory_bytes: int | None
    """Memory of each worker; None: unbounded."""
    prices: Prices

    @property
    def num_workers(self) -> int:
        return self.num_vms * self.workers_per_vm

    def per_million(self, row: Candidate, global_batch_size: int, vm_hour: float | None) -> float | None:
        """The cost of a million samples under a plan, at this price of a VM-hour."""
        if vm_hour is None or row.predicted_s is None:
            return None
        return vm_hour * self.num_vms * row.predicted_s / 3600 / global_batch_size * 1e6


def request(spec: JobSpec, calibration: Calibration, cluster: PricedVms) -> Request:
    """The request that the manager would make to the planner if all these VMs were running."""
    memory_bytes = _NO_LIMIT if cluster.memory_bytes is None else cluster.memory_bytes
    workers = [
        Slot(f"vm{vm}.{index}", f"vm{vm}", memory_bytes)
        for vm in range(cluster.num_vms)
        for index in range(cluster.workers_per_vm)
    ]
    risk = first_risk(spec, Timing())
    return replace(request_for(spec, calibration, workers), risk=Risk(**risk.model_dump()))


def report(
    ranking: Ranking,
    spec: JobSpec,
    calibration: Calibration,
    cluster: PricedVms,
    where: str,
    after_death: str,
) -> Iterable[str]:
    """The table, the reason, the price and the assumptions, line by line."""
    yield from aligned(_cells(ranking.rows, spec, cluster))
    if ranking.num_slower:
        yield f"({ranking.num_slower} slower ones are not shown; --rows)"
    yield ""
    yield ranking.why
    if after_death:
        yield after_death
    if (cost := _cost(cluster)) is not None:
        yield cost
    yield ""
    yield from _assumed(spec, calibration, cluster, where)


def _cells(rows: Sequence[Candidate], spec: JobSpec, cluster: PricedVms) -> list[list[str]]:
    prices = cluster.prices
    priced = [
        (name, price)
        for name, price in (("spot", prices.spot), ("on demand", prices.on_demand))
        if price is not None
    ]
    heads = ["PxD", "step", "samples/s", "workers", "idle", "busiest"]
    heads += ["window", "recompute", "halves", "offload", "memory"]
    cells = [[*heads, *(f"{name}/1M" for name, _ in priced), ""]]
    batch = spec.training.global_batch_size
    for row in rows:
        assert row.predicted_s is not None, "only what was simulated is ranked"
        cells.append(
            [
                row.shape,
                seconds(row.predicted_s),
                f"{batch / row.predicted_s:#.4g}",
                f"{row.used}",
                f"{cluster.num_workers - row.used}",
                f"{100 * (row.busy_s or 0.0) / row.predicted_s:.0f} %",
                "-" if row.window is None else f"{row.window}",
                "yes" if row.recompute else "no",
                "yes" if row.halves else "no",
                "yes" if row.optimizer_on_host else "no",
                _memory(row, cluster),
                *(f"{cluster.per_million(row, batch, price):.2f}" for _, price in priced),
                "<- best" if row is rows[0] else "",
            ]
        )
    return cells


def _memory(row: Candidate, cluster: PricedVms) -> str:
    held = size(row.peak_bytes or 0)
    return held if cluster.memory_bytes is None else f"{held} of {size(cluster.memory_bytes)}"


def _cost(cluster: PricedVms) -> str | None:
    spot, on_demand = cluster.prices.spot, cluster.prices.on_demand
    told = [
        f"{price * cluster.num_vms:.2f} an hour {name}"
        for name, price in (("on the spot market", spot), ("on demand", on_demand))
        if price is not None
    ]
    return f"{cluster.num_vms} VMs cost {', '.join(told)}, idle ones included." if told else None


def _assumed(spec: JobSpec, calibration: Calibration, cluster: PricedVms, where: str) -> Iterable[str]:
    m = calibration.microbatch_size
    num_micro_batches = spec.training.global_batch_size // m
    yield f"calibration: {where}; m = {m}, N = {num_micro_batches}, K = {calibration.num_sections}"
    memory = "without bound" if cluster.memory_bytes is None else size(cluster.memory_bytes)
    each = f"{cluster.workers_per_vm} worker{'s' if cluster.workers_per_vm > 1 else ''} each"
    money = "" if _cost(cluster) else "; prices: give --spot-price, --on-demand-price"
    yield f"assumed: {cluster.num_vms} VMs of {each}, alike and all there; memory of a worker {memory}{money}"
