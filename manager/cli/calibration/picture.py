"""Measurements as a picture (SVG): time per sample against m, and each section's forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ....simulator.calibration.measurements import Measurements, Row
from ....simulator.calibration.microbatch_size import best_microbatch_size
from ....simulator.units import seconds as written

_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 900, 84, 24, 64, 220, 70
_INNER = _WIDTH - _LEFT - _RIGHT
_COLOURS = {"F": "#1b6ca8", "B": "#c8641b"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-size:15px;font-weight:600}"
    ".s{font-size:10px;fill:#555}.g{stroke:#ddd}.e{stroke:#333}"
)


def draw(measured: Measurements, title: str, m: int | None = None) -> str:
    """Draw the SVG. Whiskers are the spread of a figure; sections are those of `m` (None: of the best m)."""
    best = m or best_microbatch_size(measured.rows)
    lower = _TOP + _PANEL + _GAP
    height = lower + _PANEL + 40
    body = _per_sample(measured.rows, best, _TOP) + _sections(measured.row(best), lower)
    name = escape(title, quote=False)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f'<title>{name}</title><style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text class="t" x="{_LEFT}" y="24">{name}</text>{body}</svg>\n'
    )


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
        parts.append(_label(place(index, 0)[0], y + _PANEL + 16, f"{row.microbatch_size}"))
    return "".join(parts) + _legend(y)


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
                f'<line class="e" x1="{x + 0.35 * step:.1f}" x2="{x + 0.35 * step:.1f}" '
                f'y1="{base - spread:.1f}" y2="{base + spread:.1f}"/>'
            )
        if len(totals) <= 40 or index % 10 == 0:
            parts.append(_label(x + 0.35 * step, y + _PANEL + 16, f"{index}"))
    return "".join(parts) + _legend(y)


def _frame(y: int, most: float, text: str) -> str:
    parts = [f'<text x="{_LEFT}" y="{y - 12}">{escape(text, quote=False)}</text>']
    for share in (0.0, 0.5, 1.0):
        height = y + _PANEL * (1 - share)
        parts.append(
            f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="s" x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">'
            f"{escape(written(share * most), quote=False)}</text>"
        )
    return "".join(parts)


def _legend(y: int) -> str:
    place: Callable[[int], int] = lambda number: _WIDTH - _RIGHT - 60 * (2 - number)  # noqa: E731
    return "".join(
        f'<rect x="{place(number)}" y="{y - 21}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{place(number) + 15}" y="{y - 12}">{name}</text>'
        for number, (name, colour) in enumerate(_COLOURS.items())
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text class="s" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text, quote=False)}</text>'
