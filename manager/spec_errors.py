"""How a job file's faults are said: the field, what is wrong, what would be accepted, and the line."""

from __future__ import annotations

import difflib
import types
from collections.abc import Sequence
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

_WORDED = {
    "entrypoint": "expected module:function, for example train:build",
    "name": "expected 1 to 63 lower-case letters, digits and hyphens, with none of the hyphens at an end",
}


class JobSpecError(ValueError):
    """A job file that cannot be accepted. `errors` holds one (field path, message) for each fault."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(f"{field}: {message}" for field, message in self.errors))


class FieldFaults(ValueError):
    """Faults between fields, raised inside a validator, each with its own field path."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{field}: {message}" for field, message in faults))


def explain(error: ValidationError, form: type[BaseModel]) -> JobSpecError:
    """Pydantic's findings about `form` in our words."""
    return JobSpecError([fault for details in error.errors() for fault in _explain(dict(details), form)])


def with_lines(error: JobSpecError, node: yaml.Node | None) -> JobSpecError:
    """The same faults, each with the line of the nearest key that the YAML text has."""
    return JobSpecError([(field, _with_line(node, field, message)) for field, message in error.errors])


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
    return [(path, f"expected {message}, got {shown(given)}")]


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


def _with_line(node: yaml.Node | None, field: str, message: str) -> str:
    for part in field.split("."):
        if not isinstance(node, yaml.MappingNode):
            break
        found = [(key, value) for key, value in node.value if key.value == part]
        if not found:
            break
        key, value = found[0]
        node = value if isinstance(value, yaml.MappingNode) else key
    return message if node is None else f"{message} (line {node.start_mark.line + 1})"
