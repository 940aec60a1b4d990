"""A replay as a picture (SVG), after Varuna's Figure 8: machines, throughput, shapes, morphs, and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import cycle

from ...simulator.timeline.svg import document, legend, text
from .outcome import Outcome
from .time_account import Item
from .training import Sample

_WIDTH, _LEFT, _RIGHT = 1000, 64, 24
_PANEL, _GAP, _TOP = 130, 46, 62
_INNER = _WIDTH - _LEFT - _RIGHT
_BLINK = 3.0
_COLOURS = ("#1b6ca8", "#c8641b", "#5b8c2a", "#8a4fa3")
_KINDS = {"death": "#c62828", "notice": "#ef8e00", "growth": "#2e7d32"}
_OTHER = "#616161"
_ITEMS = {
    "useful": ("#1b6ca8", (Item.USEFUL,)),
    "steps done again": ("#c62828", (Item.LOST,)),
    "steps cut off": ("#e57373", (Item.CUT_OFF,)),
    "morphs": ("#ef8e00", (Item.DETECT, Item.DECIDE, Item.PREPARE, Item.OPEN, Item.FORM)),
    "snapshots": ("#5b8c2a", (Item.SNAPSHOT,)),
    "start": ("#8a8a8a", (Item.START,)),
    "waiting for VMs": ("#c9c9c9", (Item.WAIT,)),
    "under way at the end": ("#9fc5e8", (Item.UNFINISHED,)),
}


def draw(outcomes: Sequence[Outcome], title: str) -> str:
    """The text of an SVG file. Colours are told in its legends; equal outcomes give an equal picture."""
    hours = max(outcome.wall_s for outcome in outcomes) / 3600
    y = _TOP
    parts = [_machines(outcomes, y, hours)]
    y += _PANEL + _GAP
    for outcome, colour in _coloured(outcomes):
        parts.append(_throughput(outcome, colour, y, hours, max(map(_fastest, outcomes))))
        y += _PANEL + _GAP
    parts.append(_where_time_went(outcomes, y))
    height = y + 30 * len(outcomes) + 62
    return document(title, _WIDTH, height, parts, left=_LEFT)


def _coloured(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, str]]:
    return list(zip(outcomes, cycle(_COLOURS), strict=False))


def _fastest(outcome: Outcome) -> float:
    return max((sample.samples_per_s for sample in outcome.series), default=0.0)


# ---- panels ------------------------------------------------------------------------------------------------


def _machines(outcomes: Sequence[Outcome], y: int, hours: float) -> str:
    most = max((max(s.num_nodes, s.num_used) for o in outcomes for s in o.series), default=1) or 1
    scale = _Scale(y, hours, float(most))
    parts = [scale.frame("VMs that the trace has (grey), and workers that step")]
    series = outcomes[0].series
    parts.append(scale.area(series, lambda sample: sample.num_nodes, outcomes[0].wall_s, "#e3e3e3"))
    for outcome, colour in _coloured(outcomes):
        parts.append(scale.line(outcome.series, lambda sample: sample.num_used, outcome.wall_s, colour))
    entries = [(outcome.policy, colour) for outcome, colour in _coloured(outcomes)]
    return "".join(parts) + legend(entries, _WIDTH - _RIGHT - 110 * len(entries), y - 8, 110)


def _throughput(outcome: Outcome, colour: str, y: int, hours: float, most: float) -> str:
    scale = _Scale(y, hours, most or 1.0)
    title = (
        f"{outcome.policy}: samples/s while stepping, P\u00d7D where it lasts; "
        f"goodput {100 * outcome.goodput:.0f} %, {outcome.samples_per_s:.1f} samples/s over all"
    )
    parts = [scale.frame(title)]
    parts.append(scale.area(outcome.series, lambda s: s.samples_per_s, outcome.wall_s, colour, opacity=0.25))
    parts.append(scale.line(outcome.series, lambda s: s.samples_per_s, outcome.wall_s, colour))
    for morph in outcome.morphs:
        x = scale.x(morph.at_s)
        mark = _KINDS.get(morph.kind, _OTHER)
        about = f"{morph.before or 'start'} to {morph.after}: {morph.cause}"
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 7}" stroke="{mark}">'
            f"<title>{escape(about, quote=False)}</title></line>"
        )
    parts += scale.shapes(outcome.series, outcome.wall_s)
    entries = [*_KINDS.items(), ("other", _OTHER)]
    return "".join(parts) + legend(entries, _WIDTH - _RIGHT - 72 * len(entries), y - 8, 72)


def _where_time_went(outcomes: Sequence[Outcome], y: int) -> str:
    parts = [text(_LEFT, y - 8, "where the time went")]
    for outcome in outcomes:
        x = float(_LEFT)
        parts.append(text(_LEFT - 8, y + 15, outcome.policy, anchor="end"))
        for name, (colour, items) in _ITEMS.items():
            share = sum(outcome.seconds[item] for item in items) / outcome.wall_s
            width = share * _INNER
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{colour}">'
                f"<title>{escape(name, quote=False)}: {100 * share:.1f} %</title></rect>"
            )
            if width > 34:
                ink = "w" if name in ("useful", "steps done again") else "k"
                parts.append(text(x + width / 2, y + 15, f"{100 * share:.0f} %", ink, "middle"))
            x += width
        y += 30
    shown = [(name, colour) for name, (colour, _) in _ITEMS.items()]
    return "".join(parts) + legend(shown, _LEFT, y + 12, _INNER // len(shown))


# ---- lines -------------------------------------------------------------------------------------------------


class _Scale:
    """A panel at height `y`: hours to the right, 0 to `most` upwards."""

    def __init__(self, y: int, hours: float, most: float) -> None:
        self._y, self._hours, self._most = y, hours or 1.0, most

    def x(self, at_s: float) -> float:
        return _LEFT + at_s / 3600 / self._hours * _INNER

    def height(self, value: float) -> float:
        return self._y + _PANEL * (1 - value / self._most)

    def frame(self, title: str) -> str:
        bottom = self._y + _PANEL
        parts = [text(_LEFT, self._y - 8, title)]
        for value in (0.0, self._most / 2, self._most):
            at = self.height(value)
            parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(text(_LEFT - 6, at + 4, f"{value:.3g}", "s", "end"))
        every = next(step for step in (0.25, 0.5, 1, 2, 6, 12, 24, 72, 168, 1e9) if self._hours / step <= 14)
        for tick in range(int(self._hours / every) + 1):
            x = self.x(tick * every * 3600)
            parts.append(f'<line class="a" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(text(x, bottom + 16, f"{tick * every:g} h", "s", "middle"))
        return "".join(parts)

    def _steps(
        self, series: Sequence[Sample], value: Callable[[Sample], float], end_s: float
    ) -> list[tuple[float, float]]:
        """Corners of a line that keeps each value until the next one."""
        points: list[tuple[float, float]] = []
        for sample in series:
            x, height = self.x(sample.at_ns / 1e9), self.height(value(sample))
            if points and points[-1][1] == height:
                continue
            if points:
                points.append((x, points[-1][1]))
            points.append((x, height))
        if points:
            points.append((self.x(end_s), points[-1][1]))
        return points

    def line(
        self, series: Sequence[Sample], value: Callable[[Sample], float], end_s: float, colour: str
    ) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in self._steps(series, value, end_s))
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>'

    def area(
        self,
        series: Sequence[Sample],
        value: Callable[[Sample], float],
        end_s: float,
        colour: str,
        opacity: float = 1.0,
    ) -> str:
        corners = self._steps(series, value, end_s)
        if not corners:
            return ""
        floor = self.height(0)
        closed = [(corners[0][0], floor), *corners, (corners[-1][0], floor)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in closed)
        return f'<polygon points="{points}" fill="{colour}" fill-opacity="{opacity:g}"/>'

    def shapes(self, series: Sequence[Sample], end_s: float) -> list[str]:
        """P×D above the line wherever one shape lasts long enough to be read."""
        runs: list[tuple[str, float, float, float]] = []  # shape, from, to, value
        ends = [*(sample.at_ns / 1e9 for sample in series[1:]), end_s]
        for sample, until in zip(series, ends, strict=True):
            if not sample.shape and self.x(until) - self.x(sample.at_ns / 1e9) < _BLINK:
                continue  # a morph that the eye passes over
            if runs and runs[-1][0] == sample.shape:
                shape, since, _, rate = runs.pop()
                runs.append((shape, since, until, rate))
            else:
                runs.append((sample.shape, sample.at_ns / 1e9, until, sample.samples_per_s))
        return [
            text((self.x(since) + self.x(until)) / 2, self.height(rate) + 12, _times(shape), "s", "middle")
            for shape, since, until, rate in runs
            if shape and self.x(until) - self.x(since) > 30
        ]


def _times(shape: str) -> str:
    return shape.replace("x", "\N{MULTIPLICATION SIGN}")
