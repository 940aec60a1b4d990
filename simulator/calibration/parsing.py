"""Strict reading of calibrations, which people may have edited: a fault is told with its field and line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..source_lines import FileFault, parse_json

T = TypeVar("T")
WHOLE = "calibration"
"""What a fault names that is of no field, but of the whole."""


class InvalidCalibration(FileFault):
    """A calibration that cannot be used; the message names the field and what would be accepted."""

    def inside(self, parent: str) -> InvalidCalibration:
        """The same fault, of a value that is the field `parent` of a larger one."""
        field, _, reason = self.message.partition(": ")
        return InvalidCalibration(f"{join(parent, field if field != WHOLE else '')}: {reason}", self.line)


def read_text(text: str, parse: Callable[[Any], T]) -> T:
    """`parse` of the JSON value that `text` is. Raises `InvalidCalibration` with the line."""
    value = parse_json(text, InvalidCalibration)
    try:
        return parse(value)
    except InvalidCalibration as error:
        raise error.located(text) from error


def join(parent: str, field: str) -> str:
    """The path of a field of the value at the path `parent`."""
    return f"{parent}.{field}" if parent and field else parent or field


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def expect_object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidCalibration(f"{name or WHOLE}: expected an object, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def expect_fields(value: object, name: str, keys: set[str], optional: set[str]) -> Mapping[str, Any]:
    """`value` as an object with these fields and no others."""
    checked = expect_object(value, name)
    if unknown := sorted(set(checked) - keys):
        field = join(name, unknown[0])
        raise InvalidCalibration(f"{field}: unknown field; known are {', '.join(sorted(keys))}")
    if missing := sorted(keys - optional - set(checked)):
        raise InvalidCalibration(f"{name or WHOLE}: the field {missing[0]!r} is missing")
    return checked


def expect_list(value: object, name: str, kind: str) -> Sequence[Any]:
    """`value` as a list; `kind` says of what."""
    if not isinstance(value, list | tuple):
        raise InvalidCalibration(f"{name or WHOLE}: expected a list of {kind}, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def expect_numbers(value: object, name: str, *, whole: bool) -> tuple[Any, ...]:
    checked = expect_list(value, name, "numbers")
    for index, number in enumerate(checked):
        if not is_finite(number) or (whole and not isinstance(number, int)):
            kind = "whole number" if whole else "number"
            raise InvalidCalibration(f"{name}[{index}]: {number!r} is not a {kind}")
    return tuple(checked) if whole else tuple(float(number) for number in checked)


def expect_strs(value: object, name: str) -> tuple[str, ...]:
    return tuple(
        expect_str(item, f"{name}[{index}]") for index, item in enumerate(expect_list(value, name, "texts"))
    )


def expect_str(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidCalibration(f"{name or WHOLE}: expected text, got {type(value).__name__}")
    return value


def expect_int(value: object, name: str, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise InvalidCalibration(f"{name or WHOLE}: {value!r} is not a whole number >= {least}")
    return value


def expect_number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or not is_finite(value) or value < 0:
        raise InvalidCalibration(f"{name or WHOLE}: {value!r} is not a number >= 0")
    return float(value)
