"""The manifest: lists all of a checkpoint's parts with checksums, and proves that it is complete.

Which tensors and scalars a section has, and their names, is said in `makara.worker.sections.state`.
"""

from __future__ import annotations

import hashlib

from pydantic.dataclasses import dataclass

from ..protocol.messages import CheckpointRef
from .errors import Corrupt, Incomplete
from .layout import manifest_key, part_key
from .records import FORMAT, STRICT, Count, JsonObject, Scalar, Sha256, decode, encode
from .stores.store import Store


@dataclass(frozen=True, slots=True, config=STRICT)
class CheckpointPart:
    """One stored safetensors file: part `part` of section `section`, and the names of the tensors in it."""

    section: Count
    part: Count
    key: str
    size_bytes: Count
    sha256: Sha256
    tensors: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class Manifest:
    """A complete checkpoint: section k has the parts 0..num_parts[k]-1; each tensor is in exactly one part.

    `data_position` counts the samples consumed so far; `recipe` is the job's, as JSON; `metadata` holds the
    scalars of each section. Raises `Incomplete` if parts are missing, `ValueError` if the recipe is not plain
    JSON.
    """

    format: int
    job: str
    checkpoint: CheckpointRef
    data_position: Count
    recipe: JsonObject
    num_parts: tuple[Count, ...]
    parts: tuple[CheckpointPart, ...]
    metadata: dict[int, dict[str, Scalar]]

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

    def to_bytes(self) -> bytes:
        """Canonical JSON that carries a checksum of itself."""
        return encode(_Envelope(self, hashlib.sha256(encode(self)).hexdigest()))

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Manifest:
        """Read what `to_bytes` wrote under `key`. Raises `Corrupt` saying what is wrong."""
        try:
            stored = decode(_Envelope, data, key)
        except Incomplete as error:
            raise Corrupt(f"{key}: {error}") from error
        manifest = stored.body
        if hashlib.sha256(encode(manifest)).hexdigest() != stored.sha256:
            raise Corrupt(f"{key}: the checksum does not match")
        if manifest.format != FORMAT:
            raise Corrupt(f"{key}: format {manifest.format}; this version reads {FORMAT}")
        return manifest


def load_manifest(store: Store, job: str, checkpoint: CheckpointRef) -> Manifest:
    """Read the manifest of `checkpoint`. Raises `NotFound`, or `Corrupt` if it is damaged or another's."""
    key = manifest_key(job, checkpoint)
    manifest = Manifest.from_bytes(store.get(key), key)
    if (manifest.job, manifest.checkpoint) != (job, checkpoint):
        raise Corrupt(f"{key}: describes checkpoint {manifest.checkpoint} of job {manifest.job}")
    return manifest


@dataclass(frozen=True, config=STRICT)
class _Envelope:
    body: Manifest
    sha256: Sha256


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
