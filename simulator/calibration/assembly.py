"""Assembles the parts that several workers measured. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any

from ...protocol.messages import Profile, Recipe
from ...protocol.survey import Layout, SectionRow, Share, Survey, Timed
from .data import Calibration, Link
from .links import AllReduce, MeasuredWire
from .measurements import TIMES, Basis, Measurements, Row, best_microbatch_size, rows_for_job
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


def profile_of(
    measured: Measurements,
    base: Recipe,
    *,
    wanted: int | None,
    memory_bytes: int,
    most_workers: int,
    stored: bool = False,
) -> Profile:
    """Choose the job's m: `wanted`, else the best measured m that fits into memory and leaves a micro-batch
    for each of `most_workers`. `base` is the recipe for any other m."""
    usable = rows_for_job(measured.rows, base.global_batch_size, most_workers)
    row = measured.row(wanted or best_microbatch_size(usable, memory_bytes))
    recipe = base.model_copy(
        update={
            "microbatch_size": row.microbatch_size,
            "num_micro_batches": base.global_batch_size // row.microbatch_size,
            "cuts": list(row.cuts),
            "graph_hash": row.graph_hash,
        }
    )
    return Profile(
        recipe=recipe,
        calibration=row.calibration.to_json(),
        measurements=measured.to_json(),
        stored=stored,
    )


def layout_of_row(row: Row) -> Layout:
    calibration = row.calibration
    return Layout(
        microbatch_size=row.microbatch_size,
        graph_hash=row.graph_hash,
        cuts=list(row.cuts),
        cut_bytes=list(calibration.cut_bytes),
        grad_cut_bytes=list(calibration.grad_cut_bytes),
        labels=list(calibration.labels),
    )


def done_in(rows: Iterable[SectionRow]) -> set[tuple[int, int]]:
    """(m, section) of each row."""
    return {(row.microbatch_size, row.section) for row in rows}


def left(layout: Layout, done: Set[tuple[int, int]]) -> list[int]:
    """The sections of `layout` still to be measured; `done` holds (m, section)."""
    return [
        section for section in range(len(layout.cuts) + 1) if (layout.microbatch_size, section) not in done
    ]


def shares(survey: Survey, done: Set[tuple[int, int]], num_shares: int) -> list[Share]:
    """Divide what is left to measure into shares of at most 1/`num_shares` each, the most likely m first. A
    share has one m, so that its worker traces the model once."""
    likely = survey.recipe.microbatch_size
    layouts = sorted(
        survey.layouts, key=lambda layout: (layout.microbatch_size != likely, layout.microbatch_size)
    )
    missing = [(layout.microbatch_size, section) for layout in layouts for section in left(layout, done)]
    each = -(-len(missing) // num_shares)
    found: list[Share] = []
    for m, section in missing:
        if found and found[-1].microbatch_size == m and len(found[-1].sections) < each:
            found[-1] = Share(microbatch_size=m, sections=[*found[-1].sections, section])
        else:
            found.append(Share(microbatch_size=m, sections=[section]))
    return found


SHARE_S = 25.0
"""Target time for the shares of one worker, in seconds."""
_PARTS = 4  # of measuring a section: forward with backward, their memory, the optimizer, making it


def section_time_s(seconds: float, num_sections: int) -> float:
    """The budget in seconds for each part of measuring a section, if `num_sections` share `seconds`."""
    return seconds / max(1, num_sections) / _PARTS


def _row(survey: Survey, layout: Layout, rows: Iterable[SectionRow]) -> Row:
    own = sorted(
        (row for row in rows if row.microbatch_size == layout.microbatch_size), key=lambda row: row.section
    )
    columns = {row.section: row for row in own}  # the last one, if a section was measured twice
    figures = {name: tuple(figure_of(row.times[name]) for row in columns.values()) for name in TIMES}
    values: dict[str, Any] = {name: tuple(figure.median for figure in figures[name]) for name in TIMES}
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
