"""Measurements as a table: time per m, times per section, links, and noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ....simulator.calibration.links import AllReduce, MeasuredWire, fitted_links
from ....simulator.calibration.measurements import TIMES, Measurements, Row
from ....simulator.calibration.microbatch_size import best_microbatch_size, least_bytes
from ....simulator.units import rate, seconds, size

_NARROW = 40  # a section's label


def table(measured: Measurements, m: int | None = None) -> Iterable[str]:
    """Lines of text; sections are those of `m` (None: of the best m)."""
    best = best_microbatch_size(measured.rows)
    basis = measured.basis
    if basis is not None:
        yield (
            f"{basis.device_name} ({basis.device_kind}), threads: {basis.threads}, "
            f"torch {basis.torch_version}, {basis.precision}, numerics {basis.numerics}; "
            f"measured in {measured.seconds:.1f} s"
        )
        yield f"fingerprint {basis.fingerprint}"
        yield ""
    yield from _sizes(measured.rows, best)
    yield ""
    yield from _sections(measured.row(m or best))
    if measured.wires:
        yield ""
        yield from _links(measured)


def _sizes(rows: Sequence[Row], best: int) -> Iterable[str]:
    cells = [["m", "F/m", "B/m", "optimizer", "noise", "outliers", "a section needs", ""]]
    for row in rows:
        calibration, m = row.calibration, row.microbatch_size
        figures = [figure for name in TIMES for figure in row.figures[name]]
        cells.append(
            [
                f"{m}",
                seconds(sum(calibration.forward_s) / m),
                seconds(sum(calibration.backward_s) / m),
                seconds(sum(calibration.optimizer_s)),
                f"{100 * statistics.median(figure.noise for figure in figures):.1f} %",
                f"{sum(f.dropped for f in figures)} of {sum(f.repeats for f in figures)}",
                size(least_bytes(calibration)),
                "<- the smallest that is as good as the next" if m == best else "",
            ]
        )
    yield from aligned(cells)


def _sections(row: Row) -> Iterable[str]:
    calibration = row.calibration
    labels = calibration.labels or ("",) * calibration.num_sections
    cells = [["section", "modules", f"F({row.microbatch_size})", "B", "optimizer", "weights", "kept", "on"]]
    for index in range(calibration.num_sections):
        onward = size(calibration.cut_bytes[index]) if index < len(calibration.cut_bytes) else ""
        times = [_noisy(row.figures[name][index].median, row.figures[name][index].noise) for name in TIMES]
        sizes = [size(calibration.parameter_bytes[index]), size(calibration.activation_bytes[index])]
        cells.append([f"{index}", labels[index][:_NARROW], *times, *sizes, onward])
    yield from aligned(cells, left=2)


def _links(measured: Measurements) -> Iterable[str]:
    cells = [["link", "latency", "jitter", "bandwidth", "a sum's hop", ""]]
    measured_kinds = {wire.same_vm for wire in measured.wires}
    links = fitted_links(measured.wires, measured.allreduces)
    for same_vm, link in zip((False, True), links, strict=True):
        hop = ""
        if link.hop_latency_s is not None and link.hop_bytes_per_s is not None:
            hop = f"{seconds(link.hop_latency_s)} and {rate(link.hop_bytes_per_s)}"
        cells.append(
            [
                "within a VM" if same_vm else "between VMs",
                seconds(link.latency_s),
                seconds(link.jitter_s),
                rate(link.bytes_per_s),
                hop,
                _source(measured.wires, same_vm) if same_vm in measured_kinds else "assumed as the other",
            ]
        )
    yield from aligned(cells, left=1)
    if measured.allreduces:
        yield ""
        heads = ["all-reduce", "ring", "bytes", "in flight", "time"]
        yield from aligned([heads, *_sums(measured.allreduces)], left=1)


def _sums(allreduces: Sequence[AllReduce]) -> Iterable[list[str]]:
    for entry in allreduces:
        where = "within a VM" if entry.same_vm else "between VMs"
        time = _noisy(entry.seconds.median, entry.seconds.noise)
        yield [where, f"{entry.ring}", size(entry.size_bytes), f"{entry.in_flight}", time]


def _source(wires: Sequence[MeasuredWire], same_vm: bool) -> str:
    own = [wire for wire in wires if wire.same_vm == same_vm]
    if any(wire.source == "loopback" for wire in own):
        return "over loopback, not between workers"
    beside = ", computing beside it" if all(wire.loaded for wire in own) else ""
    return f"{len(own)} pairs of workers{beside}"


def _noisy(value: float, noise: float) -> str:
    return f"{seconds(value)} ±{100 * noise:.0f}%"


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> Iterable[str]:
    """Align columns; the first `left` columns and the last are left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column < left or column == len(row) - 1 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
