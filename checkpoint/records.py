"""Strict JSON for stored records: unknown keys and wrong types are errors that name the field."""

from __future__ import annotations

import json
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from .errors import Corrupt

FORMAT = 1
Scalar = int | float | bool | str  # metadata that a part may carry beside its tensors
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
JsonObject = dict[str, JsonValue]

STRICT = ConfigDict(extra="forbid", strict=True)  # of stored dataclasses

R = TypeVar("R")


def encode(record: object) -> bytes:
    """Encode a record canonically: sorted keys, UTF-8, no NaN."""
    return canonical(TypeAdapter(type(record)).dump_python(record, mode="json"))


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def decode(kind: type[R], data: bytes, key: str) -> R:
    """Decode the record in `data`. Raises `Corrupt` naming `key` and the first wrong field."""
    try:
        return TypeAdapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(step) for step in first["loc"]) or "the whole object"
        raise Corrupt(f"{key}: {field}: {first['msg']}") from error
