"""The bounds of the core and of agents, as whoever starts a manager sets them: `--bound NAME=VALUE`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace

from .config import ConfigError
from .core import Timing
from .orders import Leases


def bounds_of(settings: Iterable[str]) -> Timing:
    """The bounds with these `NAME=VALUE` set; names are the fields of `Timing` and of `Leases`.

    Raises `ConfigError` that names what would be accepted.
    """
    timing, leases = Timing(), Leases()
    for setting in settings:
        name, _, text = setting.partition("=")
        for_timing, for_leases = _names(timing), _names(leases)
        if name not in (*for_timing, *for_leases):
            known = ", ".join(sorted((*for_timing, *for_leases)))
            raise ConfigError(f"--bound {setting}: there is no bound {name!r}; expected one of {known}")
        if name in for_timing:
            timing = replace(timing, **{name: _number(setting, text, getattr(timing, name))})
        else:
            leases = replace(leases, **{name: _number(setting, text, getattr(leases, name))})
    return replace(timing, leases=leases)


def _names(bounds: Timing | Leases) -> list[str]:
    return [f.name for f in fields(bounds) if isinstance(getattr(bounds, f.name), int | float)]


def _number(setting: str, text: str, default: float) -> float:
    """As precise as the default: a count stays a count."""
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"--bound {setting}: expected {kind} greater than 0, such as {default:g}")
    return value
