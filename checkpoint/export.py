"""Exports a checkpoint's weights as ordinary safetensors, and hashes them to compare runs.

Needs no torch, and one shard and one part at a time on the local disk. Exports
`weights/<name>` and `buffers/<name>` of the parts as `<name>`, without optimizer state and scales.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from pydantic.dataclasses import dataclass

from ..protocol.messages import CheckpointRef
from .errors import Corrupt, Incomplete, NotFound
from .layout import export_done_key, export_prefix, export_step_of
from .manifest import CheckpointPart, Manifest, load_manifest
from .reader import fetch_part, file_header
from .records import FORMAT, STRICT, Count, Sha256, canonical, decode, encode
from .safetensors_header import MOST_HEADER_BYTES, Header, TensorEntry, build_header, parse_header
from .stores.store import Store, retrying

SHARD_BYTES = 5_000_000_000  # as model hubs use
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_EXPORTED = ("weights/", "buffers/")
_CHUNK_BYTES = 8 << 20
_HEADER_GUESS_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Export:
    """Exported weights of `step`. `uri` is the file to load (the index, if there are several shards),
    `sha256` their `weights_sha256`, `num_bytes` the size of all safetensors files.
    """

    uri: str
    sha256: str
    step: int
    num_bytes: int


def export(
    store: Store,
    job: str,
    checkpoint: CheckpointRef,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    scratch: Path | None = None,
) -> Export:
    """Write the weights of `checkpoint` to `<uri>/<job>/export/<step>/`, in shards of about
    `max_shard_bytes`.

    One shard at a time is spooled below `scratch` (None: the system's temporary folder). Each call of the
    store is retried by itself once the export has begun. A finished export is not written again. Raises
    `Corrupt`, `NotFound`, `Incomplete` (no weights in it) and the store's errors; safe to repeat.
    """
    prefix = export_prefix(job, checkpoint.step)
    done = _done(store, job, prefix, checkpoint)
    if done is None:
        manifest = load_manifest(store, job, checkpoint)
        store.delete_many(key for key, _ in store.list(prefix) if export_step_of(job, key) is not None)
        done = _write(store, prefix, manifest, max_shard_bytes, scratch)
        retrying(partial(store.put, export_done_key(job, checkpoint.step), encode(done)))
    name = _SINGLE if len(done.files) == 1 else _INDEX
    return Export(f"{store.uri}/{prefix}{name}", done.sha256, checkpoint.step, sum(done.files.values()))


def weights_sha256(path: Path) -> str:
    """The weight hash of exported weights: of one safetensors file, or of all in a folder.

    It covers name, type, shape and bytes of each tensor in order of names, but not metadata and the division
    into files. Raises `Corrupt`.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    where: dict[str, tuple[Path, TensorEntry]] = {}
    for file in files:
        for name, entry in file_header(file, str(file)).tensors.items():
            where[name] = (file, entry)
    digest = WeightsHash()
    for name in sorted(where):
        file, entry = where[name]
        with file.open("rb") as opened:
            digest.add(entry, _chunks(opened, entry))
    return digest.hexdigest()


def fetch_export(store: Store, made: Export, to: Path) -> Path:
    """Copy an export to `to`, a file if the name ends in .safetensors, else a folder.

    Returns the file to load. Existing files are replaced once all have arrived. Raises `Corrupt`, `NotFound`,
    `Incomplete` (several shards do not fit into one file) and the store's errors.
    """
    prefix, _, first = made.uri.removeprefix(f"{store.uri}/").rpartition("/")
    keys = {key.rpartition("/")[2]: key for key, _ in store.list(f"{prefix}/")}
    names = [name for name in keys if name.endswith(".safetensors") or name == _INDEX]
    if first not in names:
        raise NotFound(f"{prefix}/{first} in {store.uri}: no such object")
    as_file = to.suffix == ".safetensors"
    if as_file and first == _INDEX:
        raise Incomplete(f"{to}: the weights are {len(names) - 1} shards; name a folder for them")
    folder = to.parent if as_file else to
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".makara-export-", dir=folder) as scratch:
        for name in names:
            _fetch(store, keys[name], Path(scratch, name))
        if weights_sha256(Path(scratch)) != made.sha256:
            raise Corrupt(f"{made.uri}: what was copied has another weight hash than what was exported")
        for name in names:
            Path(scratch, name).replace(to if as_file else folder / name)
    return to if as_file else folder / first


def _fetch(store: Store, key: str, path: Path) -> None:
    size = store.size(key)
    with path.open("wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            file.write(retrying(partial(store.get_range, key, start, _CHUNK_BYTES)))


def weight_shapes(store: Store, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in a checkpoint. Raises `Corrupt`, `NotFound` and the store's errors."""
    return {
        name.partition("/")[2]: entry.shape
        for part in manifest.parts
        if any(name.startswith("weights/") for name in part.tensors)
        for name, entry in _stored_header(store, part).tensors.items()
        if name.startswith("weights/")
    }


class WeightsHash:
    """Computes `weights_sha256`; add tensors in order of their names."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._last: str | None = None

    def add(self, entry: TensorEntry, chunks: Iterable[bytes]) -> None:
        """Add a tensor: name, type (as safetensors writes it) and shape of `entry`, and its bytes."""
        assert self._last is None or self._last < entry.name, (
            f"{entry.name} after {self._last}: not in name order"
        )
        self._last = entry.name
        self._digest.update(canonical([entry.name, entry.dtype, list(entry.shape)]) + b"\n")
        for chunk in chunks:
            self._digest.update(chunk)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor to export: its exported name, and where it is stored."""

    name: str
    part: CheckpointPart
    entry: TensorEntry


@dataclass(frozen=True, config=STRICT)
class _Done:
    format: int
    checkpoint: CheckpointRef
    sha256: Sha256
    files: dict[str, Count]  # safetensors files and their sizes in bytes


def _done(store: Store, job: str, prefix: str, checkpoint: CheckpointRef) -> _Done | None:
    """The finished export of exactly this checkpoint, if it exists, is complete, and of this version."""
    key = export_done_key(job, checkpoint.step)
    try:
        done = decode(_Done, store.get(key), key)
        if done.checkpoint != checkpoint:
            return None
        return done if all(store.size(prefix + name) == size for name, size in done.files.items()) else None
    except (NotFound, Corrupt):
        return None


def _write(
    store: Store, prefix: str, manifest: Manifest, max_shard_bytes: int, scratch: Path | None
) -> _Done:
    shards = _shards(_sources(store, manifest), max_shard_bytes)
    digest = WeightsHash()
    files: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="makara-export-", dir=scratch) as folder:
        for number, shard in enumerate(shards, 1):
            name = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            path = Path(folder, name)
            _spool(store, shard, path, digest)
            files[name] = path.stat().st_size
            weight_map.update(dict.fromkeys((source.name for source in shard), name))
            retrying(partial(store.put_file, prefix + name, path))
            path.unlink()
    if len(shards) > 1:
        total = sum(source.entry.num_bytes for shard in shards for source in shard)
        index = canonical({"metadata": {"total_size": total}, "weight_map": weight_map})
        retrying(partial(store.put, prefix + _INDEX, index))
    return _Done(FORMAT, manifest.checkpoint, digest.hexdigest(), files)


def _sources(store: Store, manifest: Manifest) -> list[_Source]:
    """All tensors to export, in order of their names."""
    sources: dict[str, _Source] = {}
    for part in manifest.parts:
        if not any(name.startswith(_EXPORTED) for name in part.tensors):
            continue
        header = retrying(partial(_stored_header, store, part))
        for stored, entry in header.tensors.items():
            folder, _, name = stored.partition("/")
            if f"{folder}/" not in _EXPORTED:
                continue
            if name in sources:
                raise Corrupt(f"{part.key}: {stored} would be exported under the name of another tensor")
            sources[name] = _Source(name, part, entry)
    if not sources:
        raise Incomplete(f"checkpoint {manifest.checkpoint} of {manifest.job} holds no weights to export")
    return [sources[name] for name in sorted(sources)]


def _stored_header(store: Store, part: CheckpointPart) -> Header:
    data = store.get_range(part.key, 0, _HEADER_GUESS_BYTES)
    needed = 8 + int.from_bytes(data[:8], "little")
    if len(data) < needed <= min(part.size_bytes, MOST_HEADER_BYTES):
        data = store.get_range(part.key, 0, needed)
    return parse_header(data, f"{part.key} in {store.uri}", total_bytes=part.size_bytes)


def _shards(sources: list[_Source], max_shard_bytes: int) -> list[list[_Source]]:
    """Consecutive runs of at most `max_shard_bytes`, or of one tensor that is larger."""
    shards: list[list[_Source]] = [[]]
    size = 0
    for source in sources:
        if shards[-1] and size + source.entry.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.entry.num_bytes
    return shards


def _spool(store: Store, shard: list[_Source], path: Path, digest: WeightsHash) -> None:
    """Write one shard to `path`, part by part, and feed its tensors to `digest` in order of their names."""
    renamed = [TensorEntry(s.name, s.entry.dtype, s.entry.shape, s.entry.start, s.entry.stop) for s in shard]
    header, placed = build_header(renamed, {"format": "pt"})
    target = {entry.name: entry for entry in placed}
    by_part: dict[str, list[_Source]] = {}
    for source in shard:
        by_part.setdefault(source.part.key, []).append(source)
    with path.open("w+b") as file:
        file.write(header)
        for key, sources in by_part.items():
            fetched = path.with_name("part")
            found = fetch_part(store, sources[0].part, fetched).tensors
            with fetched.open("rb") as part:
                for source in sources:
                    if found.get(source.entry.name) != source.entry:
                        raise Corrupt(f"{key} in {store.uri}: changed while it was read")
                    file.seek(target[source.name].start)
                    for chunk in _chunks(part, source.entry):
                        file.write(chunk)
            fetched.unlink()
        for name in sorted(target):
            digest.add(target[name], _chunks(file, target[name]))


def _chunks(file: IO[bytes], entry: TensorEntry) -> Iterator[bytes]:
    file.seek(entry.start)
    left = entry.num_bytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise Corrupt(f"{file.name}: ends within tensor {entry.name!r}")
        left -= len(chunk)
        yield chunk
