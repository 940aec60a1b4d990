"""A step as a Gantt chart (SVG): a lane for each worker with its operations, all-reduces and memory."""

from __future__ import annotations

from ..units import size
from . import strips
from .lanes import Lane, Timeline
from .strips import INNER, LEFT, MEMORY, OPERATIONS, RIGHT, SUMS, WIDTH, Scale
from .svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, document, legend, text

_SECTIONS, _BUSY, _PEAK = LEFT - 8, WIDTH - RIGHT + 42, WIDTH - 24  # right ends of the columns
_TOP, _HEADING, _GAP, _AXIS = 92, 22, 5, 46
_MOST_LANES = 48
_LANE = OPERATIONS + SUMS + MEMORY
_LEAST_WIDTH = 3.0  # mean pixels of an operation below which single operations cannot be told apart
_MOST_TITLED = 4000  # at most so many operations get an element, and so a tooltip, each

_LEGEND = (
    ("forward", BLUE),
    ("recompute", SKY),
    ("backward", ORANGE),
    ("sums", GREEN),
    ("commit", GREY),
    ("update", PURPLE),
)
_LEGEND_OF_HALVES = (("forward", BLUE), ("inputs", ORANGE), ("weights", VERMILION), *_LEGEND[3:])


def draw(timeline: Timeline) -> str:
    """Draw the SVG; equal timelines give equal pictures.

    If operations are too many to be told apart, each worker's shares of time are drawn. Of many equal
    pipelines one is drawn.
    """
    shown = timeline.folded(_MOST_LANES)
    scale = Scale(shown.time_s)
    colours = _LEGEND_OF_HALVES if shown.plan.has_halves else _LEGEND
    parts = [text(24, 48, shown.about, "s"), legend(colours, 24, 70, 86), _memory_key(shown)]
    for name, x in (("sections", _SECTIONS), ("busy", _BUSY), ("peak", _PEAK)):
        parts.append(text(x, _TOP - 4, name, "s", "end"))
    detailed = _mean_operation_s(shown) / scale.length_s * INNER >= _LEAST_WIDTH
    titled = sum(len(lane.operations) for lane in shown.lanes) <= _MOST_TITLED
    y = float(_TOP)
    for pipeline in shown.pipelines:
        alike = f", and {pipeline.alike} more like it" if pipeline.alike else ""
        parts.append(text(24, y + 15, pipeline.name + alike))
        y += _HEADING
        for lane in pipeline.lanes:
            if detailed:
                operations = strips.operations(lane, scale, y, titled)
            else:
                operations = strips.shares_of_time(lane, scale, y)
            parts.append(_lane(shown, lane, scale, y, operations))
            y += _LANE + _GAP
    parts.append(strips.axis(scale, y))
    if shown.num_left_out:
        parts.append(text(24, y + 38, f"{shown.num_left_out} workers are not shown", "s"))
    return document(shown.title, WIDTH, y + _AXIS + (16 if shown.num_left_out else 0), parts)


def _mean_operation_s(timeline: Timeline) -> float:
    times = [span.stop_s - span.start_s for lane in timeline.lanes for span in lane.operations]
    return sum(times) / len(times) if times else timeline.time_s


def _memory_key(timeline: Timeline) -> str:
    most = max((lane.peak_bytes for lane in timeline.lanes), default=0)
    x = 24 + 86 * len(_LEGEND)
    return f'<rect class="m" x="{x}" y="61" width="10" height="10"/>' + text(
        x + 14, 70, f"memory held (full height: {size(most)})", "s"
    )


def _lane(timeline: Timeline, lane: Lane, scale: Scale, y: float, operations: str) -> str:
    first, last = lane.sections.start, lane.sections.stop - 1
    sections = f"{first}" if first == last else f"{first}–{last}"
    most = max(lane.peak_bytes for lane in timeline.lanes)
    busy = lane.busy_s / timeline.time_s if timeline.time_s else 0.0
    return "".join(
        [
            f'<rect class="l" x="{LEFT}" y="{y:.1f}" width="{INNER}" height="{_LANE}"/>',
            text(24, y + 12, lane.name, "s"),
            text(_SECTIONS, y + 12, sections, "s", "end"),
            operations,
            strips.closings(lane, scale, y),
            strips.memory(lane, scale, y + OPERATIONS + SUMS, most),
            text(_BUSY, y + 12, f"{100 * busy:.0f} %", "s", "end"),
            text(_PEAK, y + 12, size(lane.peak_bytes), "s", "end"),
        ]
    )
