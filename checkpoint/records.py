"""Strict JSON for stored records: unknown keys and wrong types are errors that name the field.

The models are private to head, manifest and writer; their callers see frozen dataclasses.
"""

from __future__ import annotations

import json
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from .errors import Corrupt

FORMAT = 1
Scalar = int | float | bool | str  # metadata that a part may carry beside its tensors
Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
JsonObject = dict[str, JsonValue]

R = TypeVar("R", bound="StoredRecord")


class StoredRecord(BaseModel):
    """Unknown keys, missing keys and coerced types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CheckpointRecord(StoredRecord):
    step: Count
    generation: Count


def encode(record: StoredRecord) -> bytes:
    """Encode a record canonically: sorted keys, UTF-8, no NaN."""
    return canonical(record.model_dump(mode="json"))


def canonical(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def decode(kind: type[R], data: bytes, key: str) -> R:
    """Decode the record in `data`. Raises `Corrupt` naming `key` and the first wrong field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(step) for step in first["loc"]) or "the whole object"
        raise Corrupt(f"{key}: {field}: {first['msg']}") from error
