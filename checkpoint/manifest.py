"""The manifest: lists all of a checkpoint's parts with checksums, and proves that it is complete."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .errors import Corrupt, Incomplete
from .layout import CheckpointId, manifest_key, part_key
from .records import (
    FORMAT,
    CheckpointRecord,
    Count,
    JsonObject,
    Scalar,
    Sha256,
    StoredRecord,
    canonical,
    decode,
)
from .stores.store import Store


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One stored safetensors file: part `part` of section `section`, and the names of the tensors in it."""

    section: int
    part: int
    key: str
    size_bytes: int
    sha256: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint: section k has the parts 0..num_parts[k]-1; each tensor is in exactly one part.

    `data_position` counts the samples consumed so far; `recipe` is the job's, as JSON; `metadata` holds the
    scalars of each section. Raises `Incomplete` if parts are missing.
    """

    job: str
    checkpoint: CheckpointId
    data_position: int
    recipe: Mapping[str, Any]
    num_parts: tuple[int, ...]
    parts: tuple[CheckpointPart, ...]
    metadata: Mapping[int, Mapping[str, Scalar]]

    def __post_init__(self) -> None:
        _check_whole(self)

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def generation(self) -> int:
        return self.checkpoint.generation

    @property
    def num_sections(self) -> int:
        return len(self.num_parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def parts_of(self, sections: Iterable[int]) -> tuple[CheckpointPart, ...]:
        """The parts of these sections, in order of section and part."""
        wanted = set(sections)
        return tuple(part for part in self.parts if part.section in wanted)

    def to_bytes(self) -> bytes:
        """Canonical JSON that carries a checksum of itself."""
        body = _Body(
            format=FORMAT,
            job=self.job,
            checkpoint=CheckpointRecord.model_validate(self.checkpoint.to_json()),
            data_position=self.data_position,
            recipe=_recipe(self.recipe),
            num_parts=list(self.num_parts),
            parts=[_PartRecord(**asdict(part)) for part in self.parts],
            metadata={str(section): dict(values) for section, values in sorted(self.metadata.items())},
        ).model_dump(mode="json")
        return canonical({"body": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Manifest:
        """Read what `to_bytes` wrote under `key`. Raises `Corrupt` saying what is wrong."""
        record = decode(_Envelope, data, key)
        body = record.body
        if hashlib.sha256(canonical(body.model_dump(mode="json"))).hexdigest() != record.sha256:
            raise Corrupt(f"{key}: the checksum does not match")
        if body.format != FORMAT:
            raise Corrupt(f"{key}: format {body.format}; this version reads {FORMAT}")
        try:
            return cls(
                job=body.job,
                checkpoint=CheckpointId(body.checkpoint.step, body.checkpoint.generation),
                data_position=body.data_position,
                recipe=body.recipe,
                num_parts=tuple(body.num_parts),
                parts=tuple(
                    CheckpointPart(p.section, p.part, p.key, p.size_bytes, p.sha256, tuple(p.tensors))
                    for p in body.parts
                ),
                metadata={int(section): values for section, values in body.metadata.items()},
            )
        except (Incomplete, ValueError) as error:
            raise Corrupt(f"{key}: {error}") from error


def load_manifest(store: Store, job: str, checkpoint: CheckpointId) -> Manifest:
    """Read the manifest of `checkpoint`. Raises `NotFound`, or `Corrupt` if it is damaged or another's."""
    key = manifest_key(job, checkpoint)
    manifest = Manifest.from_bytes(store.get(key), key)
    if (manifest.job, manifest.checkpoint) != (job, checkpoint):
        raise Corrupt(f"{key}: describes checkpoint {manifest.checkpoint} of job {manifest.job}")
    return manifest


class _PartRecord(StoredRecord):
    section: Count
    part: Count
    key: str
    size_bytes: Count
    sha256: Sha256
    tensors: list[str] | tuple[str, ...]


class _Body(StoredRecord):
    format: int
    job: str
    checkpoint: CheckpointRecord
    data_position: Count
    recipe: JsonObject
    num_parts: list[Count]
    parts: list[_PartRecord]
    metadata: dict[str, dict[str, Scalar]]


class _Envelope(StoredRecord):
    body: _Body
    sha256: Sha256


_RECIPE: TypeAdapter[JsonObject] = TypeAdapter(JsonObject)


def _recipe(value: Mapping[str, Any]) -> JsonObject:
    try:
        return _RECIPE.validate_python(dict(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"recipe: not plain JSON: {error.errors(include_url=False)[0]['loc']}") from error


def _check_whole(manifest: Manifest) -> None:
    what = f"checkpoint {manifest.checkpoint} of {manifest.job}"
    expected = [(section, part) for section, count in enumerate(manifest.num_parts) for part in range(count)]
    found = [(part.section, part.part) for part in manifest.parts]
    if not manifest.num_parts or 0 in manifest.num_parts:
        raise Incomplete(
            f"{what}: every section has at least one part, got counts {list(manifest.num_parts)}"
        )
    if found != expected:
        missing = sorted(set(expected) - set(found))
        surplus = sorted(set(found) - set(expected))
        raise Incomplete(
            f"{what}: parts (section, part) missing {missing}, surplus or out of order {surplus}"
        )
    holder: dict[str, CheckpointPart] = {}
    for part in manifest.parts:
        if part.key != part_key(manifest.job, manifest.checkpoint, part.section, part.part):
            raise Incomplete(f"{what}: part {part.section}.{part.part} has the foreign key {part.key}")
        for name in part.tensors:
            if name in holder:
                raise Incomplete(f"{what}: tensor {name!r} is in both {holder[name].key} and {part.key}")
            holder[name] = part
    if not set(manifest.metadata) <= set(range(manifest.num_sections)):
        raise Incomplete(
            f"{what}: metadata for sections {sorted(manifest.metadata)} of {manifest.num_sections}"
        )
