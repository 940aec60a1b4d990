"""Measurements as a picture (SVG): time per sample against m, and each section's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ....simulator.calibration.measurements import Measurements, Row
from ....simulator.calibration.microbatch_size import best_microbatch_size
from ....simulator.timeline.svg import document, legend, text
from ....simulator.units import seconds as written

_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 900, 84, 24, 64, 220, 70
_INNER = _WIDTH - _LEFT - _RIGHT
_COLOURS = {"F": "#1b6ca8", "B": "#c8641b"}


def draw(measured: Measurements, title: str, m: int | None = None) -> str:
    """Draw the SVG. Whiskers are the spread of a figure; sections are those of `m` (None: of the best m)."""
    best = m or best_microbatch_size(measured.rows)
    lower = _TOP + _PANEL + _GAP
    height = lower + _PANEL + 40
    panels = _per_sample(measured.rows, best, _TOP), _sections(measured.row(best), lower)
    return document(title, _WIDTH, height, panels, left=_LEFT)


def _per_sample(rows: Sequence[Row], best: int, y: int) -> str:
    lines = {
        "F": [sum(row.calibration.forward_s) / row.microbatch_size for row in rows],
        "B": [sum(row.calibration.backward_s) / row.microbatch_size for row in rows],
    }
    most = max(max(values) for values in lines.values()) or 1.0
    parts = [_frame(y, most, f"all sections, time per sample against m; m = {best} is the smallest worth it")]
    step = _INNER / max(len(rows), 1)

    def place(index: int, seconds: float) -> tuple[float, float]:
        return _LEFT + step * (index + 0.5), y + _PANEL * (1 - seconds / most)

    for name, values in lines.items():
        points = [place(index, seconds) for index, seconds in enumerate(values)]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>')
        for (x, height), seconds, row in zip(points, values, rows, strict=True):
            about = f"{name}({row.microbatch_size})/{row.microbatch_size} = {written(seconds)}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{height:.1f}" r="4" fill="{_COLOURS[name]}">'
                f"<title>{escape(about, quote=False)}</title></circle>"
            )
    for index, row in enumerate(rows):
        parts.append(text(place(index, 0)[0], y + _PANEL + 16, f"{row.microbatch_size}", "s", "middle"))
    return "".join(parts)


def _sections(row: Row, y: int) -> str:
    calibration = row.calibration
    totals = [f + b for f, b in zip(calibration.forward_s, calibration.backward_s, strict=True)]
    most = max(totals) or 1.0
    parts = [_frame(y, most, f"each section, a micro-batch of {row.microbatch_size}")]
    step = _INNER / len(totals)
    for index in range(len(totals)):
        x, base = _LEFT + step * (index + 0.15), float(y + _PANEL)
        label = calibration.labels[index] if calibration.labels else f"section {index}"
        for name, key in (("F", "forward_s"), ("B", "backward_s")):
            figure = row.figures[key][index]
            tall, spread = _PANEL * figure.median / most, _PANEL * figure.spread / most
            about = f"{label}: {name} {written(figure.median)} ± {written(figure.spread)}"
            base -= tall
            parts.append(
                f'<rect x="{x:.1f}" y="{base:.1f}" width="{0.7 * step:.1f}" height="{tall:.1f}" '
                f'fill="{_COLOURS[name]}"><title>{escape(about, quote=False)}</title></rect>'
                f'<line class="a" x1="{x + 0.35 * step:.1f}" x2="{x + 0.35 * step:.1f}" '
                f'y1="{base - spread:.1f}" y2="{base + spread:.1f}"/>'
            )
        if len(totals) <= 40 or index % 10 == 0:
            parts.append(text(x + 0.35 * step, y + _PANEL + 16, f"{index}", "s", "middle"))
    return "".join(parts)


def _frame(y: int, most: float, title: str) -> str:
    right = _WIDTH - _RIGHT
    parts = [text(_LEFT, y - 12, title), legend(list(_COLOURS.items()), right - 80, y - 12, 40)]
    for share in (0.0, 0.5, 1.0):
        height = y + _PANEL * (1 - share)
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(text(_LEFT - 8, height + 4, written(share * most), "s", "end"))
    return "".join(parts)
