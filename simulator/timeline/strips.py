"""The strips of a lane: operations or their shares of time, all-reduces, memory; and the axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...pipeline import Kind
from ..spans import Span
from ..step_end import ClosingKind
from ..units import seconds
from .lanes import Lane
from .svg import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, text, ticks, time_unit

WIDTH, LEFT, RIGHT = 1240, 132, 128  # of the picture, and beside the lanes; all in pixels
INNER = WIDTH - LEFT - RIGHT
OPERATIONS, SUMS, MEMORY = 17, 4, 12  # heights of a lane's three strips
_BIN = 4.0

_COLOURS = {
    Kind.FORWARD: BLUE,
    Kind.RECOMPUTE: SKY,
    Kind.BACKWARD: ORANGE,
    Kind.INPUT: ORANGE,
    Kind.WEIGHT: VERMILION,
}
_CLOSING_COLOURS = {
    ClosingKind.LOSS_ALLREDUCE: GREEN,
    ClosingKind.GRADIENT_ALLREDUCE: GREEN,
    ClosingKind.COMMIT: GREY,
    ClosingKind.UPDATE: PURPLE,
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recomputation",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
}


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the step."""

    name: str
    start_s: float
    stop_s: float

    @property
    def length_s(self) -> float:
        return self.stop_s - self.start_s or 1e-9

    def x(self, at_s: float) -> float:
        """The x coordinate of a time, clipped to the window."""
        share = (at_s - self.start_s) / self.length_s
        return LEFT + INNER * min(1.0, max(0.0, share))

    def holds(self, start_s: float, stop_s: float) -> bool:
        return start_s < self.stop_s and stop_s > self.start_s


def operations(lane: Lane, window: Window, y: float, titled: bool) -> str:
    """Draw operations one by one, with micro-batch numbers where there is room, `titled` with tooltips."""
    seen = [span for span in lane.operations if window.holds(span.start_s, span.stop_s)]
    most_digits = len(str(max((span.operation.micro_batch for span in lane.operations), default=0)))
    parts: list[str] = []
    if not titled:
        for kind, colour in _COLOURS.items():
            boxes = "".join(_box(*_edges(span, window), y) for span in seen if span.operation.kind is kind)
            parts.append(f'<path d="{boxes}" fill="{colour}"/>' if boxes else "")
    for span in seen:
        start, stop = _edges(span, window)
        operation = span.operation
        if titled:
            name = f"{_NAMES[operation.kind]} of micro-batch {operation.micro_batch}"
            taken = (
                f"{seconds(span.start_s)} to {seconds(span.stop_s)}, {seconds(span.stop_s - span.start_s)}"
            )
            parts.append(
                f'<rect x="{start:.1f}" y="{y:.1f}" width="{stop - start:.1f}" height="{OPERATIONS}" '
                f'fill="{_COLOURS[operation.kind]}"><title>{operation}: {name}: {taken}</title></rect>'
            )
        if stop - start >= 4 + 5.6 * most_digits:
            ink = "w" if operation.kind is Kind.FORWARD else "k"
            parts.append(text((start + stop) / 2, y + 12, str(operation.micro_batch), ink, "middle"))
    return "".join(parts)


def _edges(span: Span, window: Window) -> tuple[float, float]:
    """Left and right edge of an operation, with a small gap to the next one where there is room."""
    start, stop = window.x(span.start_s), window.x(span.stop_s)
    return start, max(stop - 0.5, start + 0.2) if stop - start > 1.5 else stop


def _box(start: float, stop: float, y: float) -> str:
    width = stop - start
    return f"M{start:.1f} {y:.1f}h{width:.2f}v{OPERATIONS}h-{width:.2f}z"


def shares_of_time(lane: Lane, window: Window, y: float) -> str:
    """For each bin of time, draw a column of the shares of each kind of operation."""
    num_bins = int(INNER / _BIN)
    bin_s = window.length_s / num_bins
    base = [0.0] * num_bins
    parts: list[str] = []
    for kind, colour in _COLOURS.items():
        shares = [0.0] * num_bins
        for span in lane.operations:
            if span.operation.kind is kind:
                _spread(shares, span.start_s / bin_s, span.stop_s / bin_s)
        columns = ""
        heights = [round(2 * OPERATIONS * min(1.0, share)) / 2 for share in shares]
        x = 0.0
        for (height, low), run in itertools.groupby(zip(heights, base, strict=True)):
            width = len(list(run)) * INNER / num_bins
            if height:
                top = y + OPERATIONS - low - height
                columns += f"M{LEFT + x:.1f} {top:.1f}h{width:.2f}v{height:g}h-{width:.2f}z"
            x += width
        base = [min(float(OPERATIONS), low + height) for low, height in zip(base, heights, strict=True)]
        parts.append(f'<path d="{columns}" fill="{colour}"/>' if columns else "")
    return "".join(parts)


def _spread(shares: list[float], start: float, stop: float) -> None:
    """Add the interval from `start` to `stop`, counted in bins, to the bins that it overlaps."""
    first, last = int(start), min(int(stop), len(shares) - 1)
    for index in range(first, last + 1):
        shares[index] += min(stop, index + 1) - max(start, index)


def closings(lane: Lane, window: Window, y: float) -> str:
    """Draw all-reduces in a strip of their own, since they run beside operations; commit and update fill
    the lane."""
    parts: list[str] = []
    for closing in lane.closings:
        if not window.holds(closing.start_s, closing.stop_s):
            continue
        start, stop = window.x(closing.start_s), window.x(closing.stop_s)
        top, height = (y + OPERATIONS, SUMS) if closing.kind.is_beside else (y, OPERATIONS)
        of = "" if closing.section is None else f" of section {closing.section}"
        taken = seconds(closing.stop_s - closing.start_s)
        parts.append(
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(0.4, stop - start):.1f}" height="{height}" '
            f'fill="{_CLOSING_COLOURS[closing.kind]}"><title>{closing.kind}{of}: {taken}</title></rect>'
        )
    return "".join(parts)


def memory(lane: Lane, window: Window, y: float, most_bytes: int) -> str:
    """Draw memory as an area; of changes within a pixel the largest is drawn."""
    held: dict[int, int] = {}
    before = 0
    for at_s, size_bytes in lane.memory:
        column = round(window.x(at_s))
        held[column] = max(held.get(column, before), size_bytes)
        before = size_bytes
    points = [f"{LEFT},{y + MEMORY:.1f}"]
    height = float(MEMORY)
    for column, size_bytes in held.items():
        points.append(f"{column},{y + height:.1f}")
        height = MEMORY * (1 - size_bytes / most_bytes) if most_bytes else MEMORY
        points.append(f"{column},{y + height:.1f}")
    points += [f"{LEFT + INNER},{y + height:.1f}", f"{LEFT + INNER},{y + MEMORY:.1f}"]
    return f'<polygon class="m" points="{" ".join(points)}"/>'


def axis(window: Window, bottom: float) -> str:
    """Draw ticks below the lanes."""
    unit, name = time_unit(window.stop_s)
    parts: list[str] = []
    for moment in ticks(window.start_s / unit, window.stop_s / unit, 12):
        x = window.x(moment * unit)
        parts.append(f'<line class="a" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}"/>')
        parts.append(text(x, bottom + 16, f"{moment:.10g} {name}", "s", "middle"))
    return "".join(parts)
