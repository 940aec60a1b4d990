"""Limits on messages from other machines: finite numbers, short texts, lists of bounded length.

A report is trusted once it was read, and parts of it are journalled. So values that would not read back as
they were written, or would fill the manager's memory, are refused on arrival.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

MOST_DEVICES = 256  # of one VM
MOST_DEATHS = 100  # of trainers, in one report
MOST_METRICS = 1000  # steps in one report; the others go with the next
MOST_ENTRIES = 100_000  # in a list of a report: sections measured, workers lost
_LONGEST_NAME = 500
_LONGEST_TEXT = 32_768  # of a traceback; its middle is left out
_CUT = "\n[... {} characters are left out ...]\n"
_GREATEST = 2**53  # what every reader of JSON takes for the same integer
_MOST_VALUES = 1_000_000  # in one JSON object
_DEEPEST = 50


def writable(name: Any) -> Any:
    """`name` with `?` for lone surrogates, which file names that are not UTF-8 contain."""
    if not isinstance(name, str) or name.isascii():
        return name
    return name.encode(errors="replace").decode()


def shortened(text: Any) -> Any:
    """`text` with its middle left out if it is long, and escapes for lone surrogates; other types unchanged,
    for the field's type to refuse."""
    if not isinstance(text, str):
        return text
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _LONGEST_TEXT:
        return text
    half = (_LONGEST_TEXT - len(_CUT) - 12) // 2
    return text[:half] + _CUT.format(len(text) - 2 * half) + text[-half:]


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value`. Raises `ValueError` unless it is JSON that reads back unchanged."""
    left = _MOST_VALUES
    pending: list[tuple[Any, int]] = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        left -= 1
        if left < 0 or depth > _DEEPEST:
            raise ValueError(f"more than {_MOST_VALUES} values, or more than {_DEEPEST} deep")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is not a finite number")
        if isinstance(item, dict):
            pending.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list | tuple):
            pending.extend((inner, depth + 1) for inner in item)
    return value


Count = Annotated[int, Field(ge=0, lt=_GREATEST)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, BeforeValidator(writable), Field(max_length=_LONGEST_NAME)]
Text = Annotated[str, BeforeValidator(shortened)]
JsonObject = Annotated[dict[str, Any], AfterValidator(plain)]
