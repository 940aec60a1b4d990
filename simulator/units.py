"""Times and sizes for people: three digits and a unit."""

from __future__ import annotations

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
"""Units of time: (seconds, name), the largest first."""


def seconds(value: float) -> str:
    """A time in its own unit, to three digits."""
    unit, name = next((unit for unit in SECONDS if abs(value) >= unit[0]), SECONDS[-1])
    return f"{_digits(value / unit)} {name}" if value else "0 s"


def size(size_bytes: float) -> str:
    """A number of bytes with a decimal unit, to three digits."""
    for power, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size_bytes >= power:
            return f"{_digits(size_bytes / power)} {unit}"
    return f"{size_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Bytes a second."""
    return f"{size(bytes_per_s)}/s"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:#.3g}"
