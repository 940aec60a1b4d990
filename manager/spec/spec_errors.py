"""Faults of a job file: the line, the field, what is wrong, and what would be accepted."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ...simulator.source_lines import Lines

WHOLE = "job file"
"""The field name of faults that concern no single key."""

_WORDED = {
    "entrypoint": "expected module:function, for example train:build",
    "name": "expected 1 to 63 lower-case letters, digits and hyphens, with none of the hyphens at an end",
}


class JobSpecError(ValueError):
    """An invalid job file. `errors` holds one (field path, message) per fault, `lines` the line of each
    (None: unknown)."""

    def __init__(self, errors: Sequence[tuple[str, str]], lines: Sequence[int | None] = ()) -> None:
        self.errors = tuple(errors)
        self.lines = tuple(lines) or (None,) * len(self.errors)
        told = zip(self.errors, self.lines, strict=True)
        super().__init__("\n".join(_told(field, message, line) for (field, message), line in told))

    def located(self, text: str) -> JobSpecError:
        """The same faults in the order of their lines in the job file's text."""
        lines = Lines(text)
        known = [
            (line or (None if field == WHOLE else lines.of(field)), field, message)
            for (field, message), line in zip(self.errors, self.lines, strict=True)
        ]
        known.sort(key=lambda fault: fault[0] or 0)
        return JobSpecError([(field, text) for _, field, text in known], [line for line, _, _ in known])

    def in_file(self, path: Path | str) -> str:
        """One line per fault, as compilers write them: "job.yaml:12: training.steps: ..."."""
        return "\n".join(
            (f"{path}:" if line is None else f"{path}:{line}:")
            + (f" {message}" if field == WHOLE else f" {field}: {message}")
            for (field, message), line in zip(self.errors, self.lines, strict=True)
        )


def _told(field: str, message: str, line: int | None) -> str:
    return f"{field}: {message}" + ("" if line is None else f" (line {line})")


class FieldFaults(ValueError):
    """Faults between fields, raised inside a validator, each with its own field path."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{field}: {message}" for field, message in faults))


def explain(error: ValidationError, form: type[BaseModel]) -> JobSpecError:
    """Translate pydantic's errors about `form` into our messages."""
    return JobSpecError([fault for details in error.errors() for fault in _explain(dict(details), form)])


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain(fault: dict[str, Any], form: type[BaseModel]) -> list[tuple[str, str]]:
    location, kind, given = tuple(fault["loc"]), str(fault["type"]), fault["input"]
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, FieldFaults):
        return cause.faults
    path = ".".join(str(part) for part in location) or "job file"
    if kind == "extra_forbidden":
        return [(path, _unknown_key(location, form))]
    if kind == "missing":
        return [(path, "is required")]
    if kind == "string_pattern_mismatch" and path in _WORDED:
        return [(path, f"{_WORDED[path]}, got {shown(given)}")]
    if cause is not None:
        return [(path, str(cause))]
    message = str(fault["msg"]).removeprefix("Input should be ")
    return [(path, f"expected {message}, got {shown(given)}{_hint(kind, given)}")]


def _hint(kind: str, given: object) -> str:
    """How to write a value that YAML 1.1 has read as another type than was meant."""
    if kind == "string_type" and isinstance(given, bool | int | float):
        return "; text that looks like something else is written in quotes" + (
            f': "{given}"' if not isinstance(given, bool) else ""
        )
    if kind not in ("int_type", "float_type") or not isinstance(given, str):
        return ""
    try:
        number = float(given)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {int(number) if number.is_integer() else number}, without quotes"


def _unknown_key(location: tuple[Any, ...], form: type[BaseModel]) -> str:
    model: type[BaseModel] | None = form
    for part in location[:-1]:
        model = _model_of(model.model_fields[str(part)].annotation) if model is not None else None
    accepted = list(model.model_fields) if model is not None else []
    close = difflib.get_close_matches(str(location[-1]), accepted, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown key{hint} (accepted here: {', '.join(accepted)})"


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := _model_of(part)) is not None), None)
    return None
