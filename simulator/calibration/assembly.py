"""Assembles the parts that several workers measured: a section's F_i is the median of its `forward_s`.

Which m a job takes of the result is chosen in `microbatch_size`. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any

from ...protocol.survey import Layout, SectionRow, Survey, TiedParameters, Timed
from .data import Calibration, Link, TiedSum
from .links import AllReduce, MeasuredWire
from .measurements import HALVES, TIMES, Basis, Measurements, Row
from .statistics import Figure

_NO_LINK = Link(latency_s=0.0, bytes_per_s=1e9)  # until the links are known, see `Measurements.with_links`


def measurements_of(
    survey: Survey, rows: Iterable[SectionRow], wires: Sequence[MeasuredWire], allreduces: Sequence[AllReduce]
) -> Measurements:
    """The measurements of every m whose sections all were measured, by the surveying worker or in `rows`.

    There must be at least one such m. Without `wires`, the links are those of the surveying worker's survey.
    """
    found = [*survey.rows, *rows]
    done = done_in(found)
    whole = [layout for layout in survey.layouts if not left(layout, done)]
    measured = Measurements(
        basis=Basis.from_json(survey.basis),
        rows=tuple(_row(survey, layout, found) for layout in sorted(whole, key=_size_of)),
        seconds=survey.seconds + sum(row.seconds for row in found),
    )
    return measured.with_links(wires or [MeasuredWire.from_json(wire) for wire in survey.wires], allreduces)


def layout_of_row(row: Row) -> Layout:
    calibration = row.calibration
    return Layout(
        microbatch_size=row.microbatch_size,
        graph_hash=row.graph_hash,
        cuts=list(row.cuts),
        cut_bytes=list(calibration.cut_bytes),
        grad_cut_bytes=list(calibration.grad_cut_bytes),
        labels=list(calibration.labels),
        tied=[
            TiedParameters(sections=list(one.sections), gradient_bytes=one.gradient_bytes)
            for one in calibration.tied_sums
        ],
    )


def tied_sums_of(layout: Layout) -> tuple[TiedSum, ...]:
    return tuple(
        TiedSum(sections=tuple(one.sections), gradient_bytes=one.gradient_bytes) for one in layout.tied
    )


def done_in(rows: Iterable[SectionRow]) -> set[tuple[int, int]]:
    """(m, section) of each row."""
    return {(row.microbatch_size, row.section) for row in rows}


def left(layout: Layout, done: Set[tuple[int, int]]) -> list[int]:
    """The sections of `layout` still to be measured; `done` holds (m, section)."""
    return [
        section for section in range(len(layout.cuts) + 1) if (layout.microbatch_size, section) not in done
    ]


def _row(survey: Survey, layout: Layout, rows: Iterable[SectionRow]) -> Row:
    own = sorted(
        (row for row in rows if row.microbatch_size == layout.microbatch_size), key=lambda row: row.section
    )
    columns = {row.section: row for row in own}  # the last one, if a section was measured twice
    has_halves = all(name in row.times for row in columns.values() for name in HALVES)
    names = (*TIMES, *HALVES) if has_halves else TIMES
    figures = {name: tuple(figure_of(row.times[name]) for row in columns.values()) for name in names}
    values: dict[str, Any] = {name: tuple(figure.median for figure in figures[name]) for name in names}
    values |= {name: tuple(row.sizes[name] for row in columns.values()) for name in columns[0].sizes}
    values |= survey.executor
    calibration = Calibration(
        **values,
        cut_bytes=tuple(layout.cut_bytes),
        grad_cut_bytes=tuple(layout.grad_cut_bytes),
        inter_vm=_NO_LINK,
        intra_vm=_NO_LINK,
        device_kind=survey.recipe.device_kind,
        microbatch_size=layout.microbatch_size,
        versions={"torch": survey.recipe.torch_version},
        labels=tuple(layout.labels),
        tied_sums=tied_sums_of(layout),
    )
    return Row(
        calibration=calibration, graph_hash=layout.graph_hash, cuts=tuple(layout.cuts), figures=figures
    )


def _size_of(layout: Layout) -> int:
    return layout.microbatch_size


def figure_of(timed: Timed) -> Figure:
    return Figure(**timed.model_dump())


def timed_of(figures: Mapping[str, Figure]) -> dict[str, Timed]:
    return {name: Timed(**asdict(figure)) for name, figure in figures.items()}
