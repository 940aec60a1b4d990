"""Settings of the bounds in time of core, agents and manager: `makara server --bound NAME=VALUE`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

from .config import ServerConfig
from .core import Timing
from .core.orders import Leases
from .core.strikes.table import TABLE, Kind
from .home import ConfigError

OF_SERVER = (
    "store_patience_s",
    "slow_call_s",
    "cloud_check_s",
    "cloud_list_s",
    "close_timeout_s",
)
OF_STRIKES = ("first_s", "longest_s", "limit")
"""The numbers of a row of the ledger of failures that can be set: `KIND.NAME`."""
_PROGRESS = 3.0, "progress is told once a second, and several of these must be missing"
_FACTOR = 1.0, "else what takes as long as expected counts as slower"
# {name: (the least value, why)}. Shorter bounds would take the healthy for dead, or detect nothing.
_LEAST: Mapping[str, tuple[float, str]] = {
    "trainer_lease_s": (2.0, "a trainer beats every 0.5 s, and several beats must be missing"),
    "vm_lease_s": (5.0, "an agent reports every second, and several reports must be missing"),
    "link_timeout_s": (4.0, "the kernel asks once a second, and three answers must be missing"),
    "orphan_timeout_s": (20.0, "an agent tries to reach its manager every 5 s, and a manager may restart"),
    "cloud_list_s": (5.0, "clouds count calls, and a list of AWS is kept for so long in any case"),
    "stacks_s": (2.0, "a trainer has a second to write them"),
    "log_bytes": (1 << 16, "stacks and last words are read from the log"),
    **dict.fromkeys(
        (
            "form_timeout_s",
            "prepare_timeout_s",
            "progress_floor_s",
            "data_wait_s",
            "store_wait_s",
            "start_wait_s",
            "profile_wait_s",
            "stop_timeout_s",
        ),
        _PROGRESS,
    ),
    **dict.fromkeys(("progress_factor", "first_step_factor", "drift", "slow", "recovered"), _FACTOR),
}


def bounds_of(settings: Iterable[str]) -> Timing:
    """The bounds with these `NAME=VALUE` set. Raises `ConfigError` that names what would be accepted."""
    values = values_of(settings)
    leases = replace(Leases(), **_among(_numbers(Leases()), values))
    timing = replace(Timing(), **_among(_numbers(Timing()), values), leases=leases)
    for name, value in _among(_of_strikes(), values).items():
        kind, _, number = name.partition(".")
        timing = timing.with_row(Kind(kind), **{number: value})
    return timing


def with_bounds(config: ServerConfig) -> ServerConfig:
    """`config` with those of its `bounds` applied that are its own fields. Raises `ConfigError`."""
    return replace(config, **_among(OF_SERVER, values_of(config.bounds)))


def values_of(settings: Iterable[str]) -> dict[str, float]:
    """Parse `NAME=VALUE` settings; names are those of `defaults`. Raises `ConfigError`."""
    known, values = defaults(), dict[str, float]()
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in known:
            expected = ", ".join(sorted(known))
            raise ConfigError(f"--bound {setting}: there is no bound {name!r}; expected one of {expected}")
        values[name] = _value(setting, text, known[name])
    return values


def defaults() -> dict[str, float]:
    """Every bound that can be set: numbers of `Timing`, its table of strikes, `Leases`, and `OF_SERVER`."""
    server = _numbers(ServerConfig(home=Path()))
    return {
        **_numbers(Timing()),
        **_of_strikes(),
        **_numbers(Leases()),
        **_among(OF_SERVER, server),
    }


def differing(settings: Iterable[str]) -> dict[str, float]:
    """The bounds that these settings change."""
    known = defaults()
    return {name: value for name, value in values_of(settings).items() if value != known[name]}


def told(values: Mapping[str, float]) -> str:
    """A message that shows bounds beside their defaults."""
    known = defaults()
    return ", ".join(f"{name}={value:g} (default {known[name]:g})" for name, value in values.items())


def _value(setting: str, text: str, default: float) -> float:
    """Parse a number of the default's type: a count stays an integer."""
    try:
        value = int(text) if isinstance(default, int) else float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"--bound {setting}: expected {kind} greater than 0, such as {default:g}")
    name = setting.partition("=")[0]
    least, why = _LEAST.get(name, (0.0, ""))
    if value < least:
        raise ConfigError(f"--bound {setting}: {name} must be at least {least:g}: {why}")
    return value


def _numbers(bounds: Timing | Leases | ServerConfig) -> dict[str, float]:
    found = ((f.name, getattr(bounds, f.name)) for f in fields(bounds))
    return {name: value for name, value in found if isinstance(value, int | float)}


def _of_strikes() -> dict[str, float]:
    """Those numbers of the table that mean anything: the others are 0 or None."""
    rows = [(kind, row) for kind, row in TABLE.items() if not row.is_fixed]
    numbers = ((f"{kind}.{name}", getattr(row, name)) for kind, row in rows for name in OF_STRIKES)
    return {name: value for name, value in numbers if value}


def _among(names: Iterable[str], values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in names if name in values}
