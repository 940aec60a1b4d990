"""Writes a checkpoint: each host stores its parts and returns receipts, which make the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import Incomplete
from .layout import CheckpointId, part_key
from .manifest import CheckpointPart, Manifest
from .records import CheckpointRecord, Count, Scalar, Sha256, StoredRecord, canonical, decode
from .safetensors_header import parse_header
from .stores.store import Store


@dataclass(frozen=True)
class Receipt:
    """What `assemble` needs of a stored part; sent to rank 0 as JSON."""

    checkpoint: CheckpointId
    num_parts: int  # of the section
    part: CheckpointPart
    metadata: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint.to_json(),
            "num_parts": self.num_parts,
            "section": self.part.section,
            "part": self.part.part,
            "key": self.part.key,
            "size_bytes": self.part.size_bytes,
            "sha256": self.part.sha256,
            "tensors": list(self.part.tensors),
            "metadata": dict(self.metadata),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Receipt:
        """Read what `to_json` wrote. Raises `Corrupt` naming the wrong field."""
        record = decode(_ReceiptRecord, canonical(dict(value)), "receipt")
        return cls(
            CheckpointId(record.checkpoint.step, record.checkpoint.generation),
            record.num_parts,
            CheckpointPart(
                record.section,
                record.part,
                record.key,
                record.size_bytes,
                record.sha256,
                tuple(record.tensors),
            ),
            record.metadata,
        )


class _ReceiptRecord(StoredRecord):
    checkpoint: CheckpointRecord
    num_parts: Count
    section: Count
    part: Count
    key: str
    size_bytes: Count
    sha256: Sha256
    tensors: list[str]
    metadata: dict[str, Scalar]


def write_part(
    store: Store,
    job: str,
    checkpoint: CheckpointId,
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
    checkpoint: CheckpointId,
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
        job=job,
        checkpoint=checkpoint,
        data_position=data_position,
        recipe=recipe,
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
