"""Types of a job file's values: texts, sizes, times."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ...simulator.validation import shown

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0}


class JobSection(BaseModel):
    """A mapping in a job file or in clouds.yaml: strict types, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def size_of(text: str) -> int:
    """Parse "16GB" or "512MiB" into bytes. Raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMG]i?B|B)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no size; expected a number with a unit of {', '.join(_SIZES)}")
    return int(float(match[1]) * _SIZES[match[2]])


def split_number(text: str) -> tuple[float, str] | None:
    """(10, "m") for "10m", (10, "") for "10"; None if it is neither a time nor a whole number."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smh]?)\s*", text)
    if match is None or float(match[1]) <= 0 or (not match[2] and "." in match[1]):
        return None
    return float(match[1]), match[2]


def seconds_of(text: str) -> float | None:
    """Parse "90s", "10m" or "2h" into seconds; None for anything else."""
    number, unit = split_number(text) or (0.0, "")
    return number * _TIMES[unit] if unit else None


def _size(value: object) -> object:
    return size_of(value) if isinstance(value, str) else value


def _time(value: object) -> object:
    if not isinstance(value, str) or seconds_of(value) is None:
        raise ValueError(f"{shown(value)} is no time; expected a number with a unit (90s, 10m, 2h)")
    return value


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError(f"{shown(value)} holds a NUL character, which no process can be given")
    return value


Text = Annotated[str, AfterValidator(_text)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=1, lt=2**63)]
Time = Annotated[str, BeforeValidator(_time)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # of money
