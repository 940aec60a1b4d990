"""Common parts of the SVG pictures: page, colours, legends and ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from ..units import SECONDS

# Distinguishable with any colour vision (Okabe and Ito, "Color Universal Design", 2008).
BLUE, SKY, ORANGE, GREEN = "#0072B2", "#56B4E9", "#E69F00", "#009E73"
VERMILION, PURPLE, GREY = "#D55E00", "#CC79A7", "#6E7781"

# Classes: t title, s small, b bold, w and k on light and dark; g grid, a axis; p paper, l lane, m area.
_STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#24292f}"
    ".t{font-size:16px;font-weight:600}.s{font-size:10px;fill:#57606a}.b{font-weight:600}"
    ".w{font-size:9px;fill:#fff}.k{font-size:9px;fill:#1b1f24}"
    ".g{stroke:#e4e7eb}.a{stroke:#8c959f}.p{fill:#fff}.l{fill:#f1f3f5}.m{fill:#c8ced6}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa4af}.w{fill:#fff}.k{fill:#1b1f24}"
    ".g{stroke:#2d333b}.a{stroke:#6e7781}.p{fill:#14171c}.l{fill:#20262d}.m{fill:#4d5661}}"
)


def document(title: str, width: float, height: float, parts: Iterable[str], left: float = 24) -> str:
    """The text of an SVG file with its title on top; it follows the viewer's light or dark scheme."""
    name = escape(title, quote=False)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>{name}</title><style>{_STYLE}</style>"
        '<rect class="p" width="100%" height="100%"/>'
        f'<text class="t" x="{left:g}" y="28">{name}</text>' + "".join(parts) + "</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "") -> str:
    """`kind` is a class of the style, `anchor` middle or end (left out: start)."""
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(words, quote=False)}</text>'


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, step: float) -> str:
    """Draw (name, colour) entries, `step` pixels apart, from `x` to the right."""
    return "".join(
        f'<rect x="{x + step * n:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>'
        + text(x + step * n + 14, y, name, "s")
        for n, (name, colour) in enumerate(entries)
    )


def ticks(start: float, stop: float, most: int) -> list[float]:
    """At most `most` round values (1, 2 or 5 times a power of ten) from `start` to `stop`."""
    span = stop - start
    if not span > 0:
        return [start]
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * times for times in (1, 2, 5, 10, 20) if span / (power * times) <= most - 1)
    first = math.ceil(start / step - 1e-9)
    return [n * step for n in range(first, math.floor(stop / step + 1e-9) + 1)]


def time_unit(most_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit that suits times up to `most_s`."""
    return next((unit for unit in SECONDS if most_s >= 2 * unit[0]), SECONDS[-1])
