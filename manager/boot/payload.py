"""What a VM fetches from its manager at its first boot: a wheel of this version's worker side, and the
versions of its dependencies.

Both are made from this installation; an unchanged installation gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOMS = ("pipeline", "protocol", "model", "simulator", "checkpoint", "morphing", "worker")
"""The packages that run on a VM."""

_TORCH = "torch"
# Dependencies of stores on Azure; VMs get them if the manager has them.
_AZURE, _OF_AZURE = "azure", ("azure-core", "azure-identity", "azure-storage-blob", "requests")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time in a zip file
_WHEEL = "Wheel-Version: 1.0\nGenerator: makara\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """Checksums by which a VM verifies what it fetched from this manager."""

    wheel: str  # file name
    wheel_sha256: str
    constraints_sha256: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@cache
def payload() -> Payload:
    return Payload(
        wheel=f"makara-{_makara().version}-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(wheel()).hexdigest(),
        constraints_sha256=hashlib.sha256(constraints()).hexdigest(),
    )


@cache
def wheel() -> bytes:
    """A wheel of `ROOMS`, reproducible: in a fixed order and without times."""
    needs = "".join(f"Requires-Dist: {need}\n" for need in _worker_needs())
    return build_wheel(ROOMS, needs)


def build_wheel(
    rooms: Sequence[str], needs: str, others: Sequence[str] = (), metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build a wheel of installed packages, with their files that are code or match `others`.

    `needs`: lines for the wheel's METADATA. `metadata`: further files of its dist-info folder.
    """
    makara = _makara()
    info = f"makara-{makara.version}.dist-info"
    entries = [(f"makara/{room}{path}", file) for room in rooms for path, file in _files_of(room, others)]
    head = f"Metadata-Version: 2.1\nName: makara\nVersion: {makara.version}\n"
    inner = {"METADATA": head + needs, "WHEEL": _WHEEL, **(metadata or {})}
    entries += [(f"{info}/{name}", text.encode()) for name, text in inner.items()]
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in entries)
    entries.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode()))
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return raw.getvalue()


@cache
def constraints() -> bytes:
    """`name==version` of each library that Makara needs, as installed here, except torch."""
    return pinned(_worker_needs())


def pinned(needs: list[Requirement]) -> bytes:
    """`name==version` of these libraries and their dependencies, as installed here, except torch."""
    found: dict[str, str] = {}
    _follow(needs, found)
    lines = [f"{name}=={version}" for name, version in sorted(found.items()) if name != _TORCH]
    return ("\n".join(lines) + "\n").encode()


def needs_of(extra: str = "") -> list[Requirement]:
    """Makara's requirements on this machine, including those of an extra if named."""
    return _needs(_makara(), extra)


def is_installed(name: str) -> bool:
    return _installed(name) is not None


def torch_version(of_recipe: str | None) -> str:
    """The version of torch for a job's VMs: that of its recipe, else the installed one.

    Without the local part (`+cpu`), since the VM's package index has builds of its own.
    """
    return (of_recipe or distribution(_TORCH).version).partition("+")[0]


def _makara() -> Distribution:
    return distribution("makara")


def _files_of(room: str, others: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for path, entry in _walk(files(f"makara.{room}"), ""):
        if path.endswith((".py", ".typed")) or any(fnmatchcase(f"{room}{path}", one) for one in others):
            yield path, entry.read_bytes()


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        path = f"{prefix}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _walk(entry, path)
        else:
            yield path, entry


def _worker_needs() -> list[Requirement]:
    """The wheel's requirements: without extras, except Azure's libraries for workers, if installed here."""
    needs = {need.name: need for need in needs_of()}
    for need in needs_of(_AZURE):
        if need.name in _OF_AZURE and _installed(need.name) is not None:
            need.marker = None
            needs.setdefault(need.name, need)
    return list(needs.values())


def _needs(of: Distribution, extra: str = "") -> list[Requirement]:
    """The requirements that apply to this machine."""
    needs = [Requirement(line) for line in of.requires or []]
    return [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _follow(needs: list[Requirement], found: dict[str, str]) -> None:
    for need in needs:
        name = canonicalize_name(need.name)
        if name in found or re.match(r"nvidia-|triton$", name):  # torch's dependencies come with torch
            continue
        installed = _installed(name)
        if installed is None:
            continue  # of another platform or an extra: the VM's pip chooses
        found[name] = installed.version
        _follow(_needs(installed), found)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
