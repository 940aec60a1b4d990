"""A step as a Gantt chart (SVG): a lane for each worker with its operations, all-reduces and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..units import seconds, size
from . import strips
from .lanes import Lane, Timeline
from .strips import INNER, LEFT, OPERATIONS, RIGHT, SUMS, WIDTH, Window
from .svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, document, legend, text

_SECTIONS, _BUSY, _PEAK = LEFT - 8, WIDTH - RIGHT + 42, WIDTH - 24  # right ends of the columns
_TOP, _HEADING, _GAP, _AXIS = 92, 22, 5, 46
_MOST_LANES = 48
_LEAST_WIDTH = 3.0  # mean pixels of an operation below which single operations cannot be told apart
_WINDOW_WIDTH = 11.0  # mean pixels of an operation in the windows that are then drawn close up
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

    If operations are too many to be told apart, the step is drawn as each worker's shares of time, followed
    by its beginning, middle and end close up. Of many equal pipelines one is drawn.
    """
    shown = timeline.folded(_MOST_LANES)
    whole = Window("", 0.0, shown.time_s)
    mean_s = _mean_operation_s(shown)
    panels = [_Panel(shown, whole, detailed=mean_s / whole.length_s * INNER >= _LEAST_WIDTH)]
    if not panels[0].detailed:
        length_s = min(mean_s * INNER / _WINDOW_WIDTH, whole.length_s)
        panels += [_Panel(shown, window, detailed=True) for window in _windows(shown, length_s)]
    colours = _LEGEND_OF_HALVES if shown.plan.has_halves else _LEGEND
    parts = [text(24, 48, shown.about, "s"), legend(colours, 24, 70, 86), _memory_key(shown)]
    for name, x in (("sections", _SECTIONS), ("busy", _BUSY), ("peak", _PEAK)):
        parts.append(text(x, _TOP - 4, name, "s", "end"))
    y = float(_TOP)
    for panel in panels:
        parts.append(panel.drawn(y))
        y += panel.height
    return document(shown.title, WIDTH, y, parts)


def _mean_operation_s(timeline: Timeline) -> float:
    times = [span.stop_s - span.start_s for lane in timeline.lanes for span in lane.operations]
    return sum(times) / len(times) if times else timeline.time_s


def _windows(timeline: Timeline, length_s: float) -> Iterator[Window]:
    middle = (timeline.pipeline_s - length_s) / 2
    length = seconds(length_s)
    for name, start_s in (
        (f"the first {length}", 0.0),
        (f"{length} in the middle of the pipelines", middle),
        (f"the last {length}", timeline.time_s - length_s),
    ):
        yield Window(f"Close up: {name}", start_s, start_s + length_s)


def _memory_key(timeline: Timeline) -> str:
    most = max((lane.peak_bytes for lane in timeline.lanes), default=0)
    x = 24 + 86 * len(_LEGEND)
    return f'<rect class="m" x="{x}" y="61" width="10" height="10"/>' + text(
        x + 14, 70, f"memory held (full height: {size(most)})", "s"
    )


@dataclass(frozen=True, slots=True)
class _Panel:
    """All lanes over one window, with operations drawn one by one or as shares of time."""

    timeline: Timeline
    window: Window
    detailed: bool

    @property
    def whole(self) -> bool:
        return not self.window.name

    @property
    def lane_height(self) -> int:
        return OPERATIONS + SUMS + (strips.MEMORY if self.whole else 0) + _GAP

    @property
    def height(self) -> float:
        around = 22 if not self.whole else 16 if self.timeline.num_left_out else 0
        return self._lanes_height + _AXIS + around

    @property
    def _lanes_height(self) -> int:
        return sum(_HEADING + self.lane_height * len(p.lanes) for p in self.timeline.pipelines)

    def drawn(self, y: float) -> str:
        parts: list[str] = []
        if not self.whole:
            parts.append(text(24, y + 8, self.window.name, "b"))
            y += 22
        bottom = y + self._lanes_height
        titled = self._num_operations() <= _MOST_TITLED
        for pipeline in self.timeline.pipelines:
            alike = f", and {pipeline.alike} more like it" if pipeline.alike else ""
            parts.append(text(24, y + 15, pipeline.name + alike))
            y += _HEADING
            for lane in pipeline.lanes:
                parts.append(self._lane(lane, y, titled))
                y += self.lane_height
        parts.append(strips.axis(self.window, bottom))
        if self.whole and self.timeline.num_left_out:
            parts.append(text(24, bottom + 38, f"{self.timeline.num_left_out} workers are not shown", "s"))
        return "".join(parts)

    def _num_operations(self) -> int:
        window = self.window
        return sum(
            window.holds(span.start_s, span.stop_s)
            for lane in self.timeline.lanes
            for span in lane.operations
        )

    def _lane(self, lane: Lane, y: float, titled: bool) -> str:
        first, last = lane.sections.start, lane.sections.stop - 1
        sections = f"{first}" if first == last else f"{first}–{last}"
        height = self.lane_height - _GAP
        parts = [
            f'<rect class="l" x="{LEFT}" y="{y:.1f}" width="{INNER}" height="{height}"/>',
            text(24, y + 12, lane.name, "s"),
            text(_SECTIONS, y + 12, sections, "s", "end"),
        ]
        if self.detailed:
            parts.append(strips.operations(lane, self.window, y, titled))
        else:
            parts.append(strips.shares_of_time(lane, self.window, y))
        parts.append(strips.closings(lane, self.window, y))
        if self.whole:
            most = max(lane.peak_bytes for lane in self.timeline.lanes)
            parts.append(strips.memory(lane, self.window, y + OPERATIONS + SUMS, most))
            busy = lane.busy_s / self.timeline.time_s if self.timeline.time_s else 0.0
            parts.append(text(_BUSY, y + 12, f"{100 * busy:.0f} %", "s", "end"))
            parts.append(text(_PEAK, y + 12, size(lane.peak_bytes), "s", "end"))
        return "".join(parts)
