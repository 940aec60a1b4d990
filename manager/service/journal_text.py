"""Facts and commands as JSON for the journal; each is parsed again before it is stored."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from ..spec.frozen import Frozen

V = TypeVar("V", bound=BaseModel)


class NotReadable(ValueError):
    """A fact or command would not read back as it is; nothing is stored."""


class Unreadable(Frozen):
    """A fact or command that this version of Makara cannot read."""

    fact: Literal["unreadable"] = "unreadable"
    at: float  # Unix seconds
    text: str  # as it is stored
    error: str


def readable_text(kind: TypeAdapter[Any], value: BaseModel) -> str:
    """The JSON of a fact or command. Raises `NotReadable` unless it reads back as the same."""
    try:
        text = value.model_dump_json(warnings="error")
        again = kind.validate_json(text)
    except ValueError as error:
        raise NotReadable(f"{type(value).__name__} cannot be stored: {error}") from error
    if again != value and _plain(again.model_dump()) != _plain(value.model_dump()):
        raise NotReadable(f"{type(value).__name__} cannot be stored: it would read back as {text:.500}")
    return text


def _plain(value: Any) -> Any:
    """Replace tuples by lists, since JSON does not distinguish them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_back(kind: TypeAdapter[V], at: float, text: str) -> V | Unreadable:
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        return Unreadable(at=at, text=text, error=str(error))
