"""Writes a checkpoint: each host stores its parts and returns receipts, which make the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic.dataclasses import dataclass

from ..protocol.messages import CheckpointRef
from .errors import Incomplete
from .layout import part_key
from .manifest import CheckpointPart, Manifest
from .records import FORMAT, STRICT, Count, Scalar, canonical, decode, encode
from .safetensors_header import parse_header
from .stores.store import Store


@dataclass(frozen=True, config=STRICT)
class Receipt:
    """What `assemble` needs of a stored part; sent to rank 0."""

    checkpoint: CheckpointRef
    num_parts: Count  # of the section
    part: CheckpointPart
    metadata: dict[str, Scalar]

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Receipt:
        """Read what `to_bytes` wrote. Raises `Corrupt` naming the wrong field."""
        return decode(cls, data, "receipt")


def write_part(
    store: Store,
    job: str,
    checkpoint: CheckpointRef,
    section: int,
    part: int,
    num_parts: int,
    payload: bytes,
    *,
    metadata: Mapping[str, Scalar] | None = None,
) -> Receipt:
    """Store `payload`, a safetensors file, as part `part` of the `num_parts` of `section`.

    `metadata`: finite scalars of the section, which go into the manifest. Safe to repeat. Raises `Corrupt` if
    the payload is not such a file, `ValueError` for a bad number or scalar, and the store's errors.
    """
    if not 0 <= part < num_parts or section < 0:
        raise ValueError(f"part {part} of {num_parts} of section {section}: expected 0 <= part < num_parts")
    key = part_key(job, checkpoint, section, part)
    names = tuple(sorted(parse_header(payload, key).tensors))
    canonical(dict(metadata or {}))  # refuses NaN before anything is stored
    stored = CheckpointPart(section, part, key, len(payload), hashlib.sha256(payload).hexdigest(), names)
    store.put(key, payload)
    return Receipt(checkpoint, num_parts, stored, dict(metadata or {}))


def assemble(
    receipts: Iterable[Receipt],
    *,
    job: str,
    checkpoint: CheckpointRef,
    num_sections: int,
    data_position: int,
    recipe: Mapping[str, Any],
) -> Manifest:
    """Make the manifest of `checkpoint` from the receipts of all parts of all sections.

    Receipts may be repeated. Raises `Incomplete` naming what is missing or contradictory.
    """
    by_place: dict[tuple[int, int], Receipt] = {}
    num_parts: dict[int, int] = {}
    metadata: dict[int, dict[str, Scalar]] = {}
    for receipt in receipts:
        part = receipt.part
        if receipt.checkpoint != checkpoint:
            raise Incomplete(f"a receipt for checkpoint {receipt.checkpoint} among those for {checkpoint}")
        if by_place.setdefault((part.section, part.part), receipt) != receipt:
            raise Incomplete(
                f"checkpoint {checkpoint}: two different receipts for part {part.section}.{part.part}"
            )
        if num_parts.setdefault(part.section, receipt.num_parts) != receipt.num_parts:
            raise Incomplete(
                f"checkpoint {checkpoint}: hosts disagree on the number of parts of {part.section}"
            )
        _merge(metadata.setdefault(part.section, {}), receipt.metadata, part)
    absent = sorted(set(range(num_sections)) - set(num_parts))
    surplus = sorted(set(num_parts) - set(range(num_sections)))
    if absent or surplus:
        raise Incomplete(
            f"checkpoint {checkpoint} of {num_sections} sections: no receipt for sections {absent}, "
            f"surplus sections {surplus}"
        )
    return Manifest(
        format=FORMAT,
        job=job,
        checkpoint=checkpoint,
        data_position=data_position,
        recipe=dict(recipe),
        num_parts=tuple(num_parts[section] for section in sorted(num_parts)),
        parts=tuple(by_place[place].part for place in sorted(by_place)),
        metadata={section: values for section, values in metadata.items() if values},
    )


def _merge(into: dict[str, Scalar], metadata: Mapping[str, Scalar], part: CheckpointPart) -> None:
    for name, value in metadata.items():
        if into.setdefault(name, value) != value:
            raise Incomplete(
                f"section {part.section}: its parts disagree on {name}: {into[name]} and {value}"
            )
