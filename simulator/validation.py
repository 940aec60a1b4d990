"""Strict types for files that people edit, faults of such files, and what pydantic refuses, in words.

A fault names its field by its path ("training.steps", "links[2].latency_s") and says what would be accepted.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

T = TypeVar("T")

NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0)]
PositiveCount = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_EXPECTED = {
    **dict.fromkeys(
        ("model_type", "dataclass_type", "dict_type", "mapping_type"), "a mapping of keys to values"
    ),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
}


class FileFault(ValueError):
    """An invalid file. `message` begins with the field at fault, if any, and a colon; `line` counts from 1
    and is None if no single line is at fault."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.message = message
        self.line = line
        super().__init__(message if line is None else f"line {line}: {message}")

    def in_file(self, path: Path | str) -> str:
        """The message as compilers write it: "costs.json:3: boot_s: ..."."""
        return f"{path}: {self.message}" if self.line is None else f"{path}:{self.line}: {self.message}"


class FieldFaults(ValueError):
    """Faults between fields, raised inside a validator, each with the path of its field from there."""

    def __init__(self, faults: Sequence[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{field}: {message}" for field, message in faults))


def validated(value: object, form: type[T], invalid: type[FileFault], whole: str) -> T:
    """`value`, out of a file, as a `form`. Raises `invalid` with the first fault; see `faults_of`."""
    try:
        return adapter(form).validate_python(value)
    except ValidationError as error:
        field, message = faults_of(error, form, whole)[0]
        raise invalid(f"{field}: {message}") from None


@cache
def adapter(form: type[T]) -> TypeAdapter[T]:
    """Kept, since making one takes longer than a use."""
    return TypeAdapter(form)


def faults_of(
    error: ValidationError, form: type[Any], whole: str, belongs: Callable[[str], str | None] | None = None
) -> list[tuple[str, str]]:
    """(field, message) for each of pydantic's errors about `form`; `whole` is the field of those of no field.

    `belongs` says where an unknown key belongs that is not misspelt; None if that is not known.

    Unknown keys come first: of a key that is misspelt, the right one is missing as well.
    """
    errors = sorted(error.errors(), key=lambda details: details["type"] not in _UNKNOWN)
    return [fault for details in errors for fault in _explain({**details}, form, whole, belongs)]


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain(
    fault: Mapping[str, Any], form: type[Any], whole: str, belongs: Callable[[str], str | None] | None
) -> Sequence[tuple[str, str]]:
    location = [part for part in fault["loc"] if part != "[key]"]  # it follows a mapping's faulty key
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path, cause = "".join(parts).removeprefix("."), fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldFaults):
        return [(f"{path}.{field}" if path else field, message) for field, message in cause.faults]
    message = str(cause) if cause is not None else _message(fault, location, form, belongs)
    return [(path or whole, message)]


def _message(
    fault: Mapping[str, Any],
    location: Sequence[Any],
    form: type[Any],
    belongs: Callable[[str], str | None] | None,
) -> str:
    kind, given = str(fault["type"]), fault["input"]
    if kind == "missing":
        return "is required"
    fields = _fields_at(form, location[:-1])
    if kind in _UNKNOWN:
        key = str(location[-1])
        where = belongs(key) if belongs is not None else None
        close = [] if where else difflib.get_close_matches(key.lower().replace("-", "_"), fields, 1)
        hint = f"; {where}" if where else f"; did you mean {close[0]}?" if close else ""
        return f"unknown key{hint} (accepted here: {', '.join(fields)})"
    expected = _EXPECTED.get(kind, str(fault["msg"]).removeprefix("Input should be "))
    if kind == "string_pattern_mismatch" and location[-1] in fields:
        expected = fields[location[-1]].description or expected
    return f"expected {expected}, got {shown(given)}{_hint(kind, given)}"


def _fields_at(form: Any, location: Sequence[Any]) -> Mapping[str, FieldInfo]:
    """The fields of the model at `location` in a `form`; indices and keys of mappings change nothing."""
    fields = fields_of(form)
    for part in location:
        if part in fields:
            fields = fields_of(fields[part].annotation)
    return fields


def fields_of(annotation: Any) -> Mapping[str, FieldInfo]:
    """The fields of the model that `annotation` is, or is a union, list or mapping of."""
    own: Mapping[str, FieldInfo] | None = getattr(annotation, "__pydantic_fields__", None)
    inner = (found for part in get_args(annotation) if (found := fields_of(part)))
    return own if own is not None else next(inner, {})


def _hint(kind: str, given: object) -> str:
    """How to write a value that YAML 1.1 has read as another type than was meant."""
    if kind == "string_type" and given is None:
        return "; an empty value, and ~ alone, are none"
    if kind == "string_type" and isinstance(given, bool | int | float | date):
        # Of a float the digits are lost (1.50, 2.10), of a boolean the word (yes, on).
        written = f': "{given}"' if isinstance(given, int | date) and not isinstance(given, bool) else ""
        return f"; text that looks like something else is written in quotes{written}"
    if kind not in ("int_type", "float_type") or not isinstance(given, str):
        return ""
    try:
        number = float(given)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {int(number) if number.is_integer() else number}, without quotes"
