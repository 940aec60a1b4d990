"""Measurements of wires and all-reduces between workers, and the links fitted to them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from ..validation import FieldFaults, Flag, PositiveCount
from .data import InvalidCalibration, Link, Record
from .statistics import SCALE, Figure

Source = Literal["workers", "loopback"]
_EXPONENTIAL = SCALE * 0.4812
"""The scaled median absolute deviation of an exponential variable of mean 1 (0.4812 unscaled)."""
_NEGLIGIBLE_S_PER_BYTE = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWire(Record):
    """Measured messages in one direction between two workers, which also compute if `loaded`.

    `source` is `loopback` if only a connection inside one machine could be measured.
    """

    same_vm: Flag
    latency_s: Figure
    bytes_per_s: Figure
    loaded: Flag
    source: Source

    @property
    def jitter_s(self) -> float:
        """The mean of the exponential jitter with the measured spread."""
        return self.latency_s.spread / _EXPONENTIAL

    @property
    def link(self) -> Link:
        """The link whose median message takes as long as the measured one."""
        latency_s = max(0.0, self.latency_s.median - math.log(2) * self.jitter_s)
        return Link(latency_s=latency_s, bytes_per_s=self.bytes_per_s.median, jitter_s=self.jitter_s)

    @model_validator(mode="after")
    def _has_a_bandwidth(self) -> Self:
        if not self.bytes_per_s.median:
            raise FieldFaults([("bytes_per_s.median", "0 is not a bandwidth > 0")])
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(Record):
    """Measured seconds of an all-reduce of `size_bytes` over `ring` workers, `in_flight` at a time."""

    same_vm: Flag
    """Whether all workers of the ring are on one VM."""
    ring: Annotated[PositiveCount, Field(ge=2)]
    size_bytes: PositiveCount
    in_flight: PositiveCount
    seconds: Figure


def fitted_links(wires: Sequence[MeasuredWire], allreduces: Sequence[AllReduce]) -> tuple[Link, Link]:
    """(link between VMs, link within a VM): the median wire of each kind, a hop fitted to the all-reduces.

    A kind that was not measured is assumed equal to the other. Raises `InvalidCalibration` without any wire.
    """
    found = [_fitted(same_vm, wires, allreduces) for same_vm in (False, True)]
    inter_vm, intra_vm = found[0] or found[1], found[1] or found[0]
    if inter_vm is None or intra_vm is None:
        raise InvalidCalibration("wires: expected at least one, got none")
    return inter_vm, intra_vm


def fitted_hop(allreduces: Sequence[AllReduce]) -> tuple[float, float] | None:
    """Fit (latency, bandwidth) of a hop to the measured times by least relative squares, where an all-reduce
    is 2(D-1) hops of size/D bytes; None if the measurements do not determine both."""
    rows: list[tuple[float, float]] = []  # (a, b) of an equation a·latency + b·(1/bandwidth) = 1
    for entry in allreduces:
        if entry.seconds.median > 0:
            hops = 2 * (entry.ring - 1) / entry.seconds.median
            rows.append((hops, hops * entry.size_bytes / entry.ring))
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    sum_a, sum_b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if len(rows) < 2 or determinant <= 1e-9 * aa * bb:
        return None
    latency_s = (sum_a * bb - sum_b * ab) / determinant
    s_per_byte = (aa * sum_b - ab * sum_a) / determinant
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, sum_b / bb
    elif s_per_byte <= _NEGLIGIBLE_S_PER_BYTE:
        latency_s, s_per_byte = sum_a / aa, _NEGLIGIBLE_S_PER_BYTE
    return latency_s, 1 / s_per_byte


def _fitted(same_vm: bool, wires: Sequence[MeasuredWire], allreduces: Sequence[AllReduce]) -> Link | None:
    links = [wire.link for wire in wires if wire.same_vm == same_vm]
    if not links:
        return None
    alone = [entry for entry in allreduces if entry.same_vm == same_vm and entry.in_flight == 1]
    hop = fitted_hop(alone) or (None, None)
    return Link(
        latency_s=statistics.median(link.latency_s for link in links),
        bytes_per_s=statistics.median(link.bytes_per_s for link in links),
        jitter_s=statistics.median(link.jitter_s for link in links),
        hop_latency_s=hop[0],
        hop_bytes_per_s=hop[1],
    )
