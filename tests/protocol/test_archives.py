"""What a bundle may be, on its way from a user's folder through the manager to a VM."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from makara.manager.cli.bundle import BundleError, pack
from makara.protocol.archives import BadArchive, BundleBounds, check, members, opened
from managers import BUNDLE, Manager, archive, job_spec

BOUNDS = BundleBounds(members=10, unpacked_bytes=10_000, name_chars=100)


def tar(*entries: tarfile.TarInfo, of: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar.gz with these entries, whose data are zeros."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=of) as made:
        for entry in entries:
            made.addfile(entry, io.BytesIO(bytes(entry.size)))
    return gzip.compress(raw.getvalue(), mtime=0)


def entry(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_a_bundle_within_its_bounds_is_read_to_its_end() -> None:
    data = tar(entry("a/b.py", 10), entry("c", 9_000), entry("d", type=tarfile.DIRTYPE))
    check(data, BOUNDS)
    with opened(data) as found:
        assert [member.name for member in members(found, BOUNDS)] == ["a/b.py", "c", "d"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (tar(*(entry(f"f{n}") for n in range(11))), "more than 10 files"),
        (tar(entry("a", 6_000), entry("b", 6_000)), "unpacks to more than 10000"),
        (
            tar(entry("a", 6_000)) + gzip.compress(bytes(1 << 20)),
            "unpacks to more than 10000",
        ),  # behind its end
        (tar(entry("x" * 101)), "name of 101 characters"),
        (tar(entry("a", pax_headers={"comment": "x" * 10**6})), "a header of"),
        (tar(entry("x" * 10**5), of=tarfile.GNU_FORMAT), "a header of"),
        (tar(entry("a/../../b")), "no plain file"),
        (tar(entry("/etc/x")), "no plain file"),
        (tar(entry("l", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "no plain file"),
        (tar(entry("l", type=tarfile.LNKTYPE, linkname="a")), "no plain file"),
        (tar(entry("p", type=tarfile.FIFOTYPE)), "no plain file"),
        (tar(entry("a", 10))[:-4], "not a tar.gz"),
        (b"", "not a tar.gz"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bundle_beyond_its_bounds_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadArchive, match=said):
        check(data, BOUNDS)


def with_checksums(raw: bytearray) -> bytes:
    """The archive, whose headers are taken for what they say."""
    for start in range(0, len(raw) - 511, 512):
        if raw[start + 257 : start + 262] == b"ustar":
            raw[start + 148 : start + 156] = b" " * 8
            raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
    return bytes(raw)


@pytest.mark.parametrize("of", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_an_archive_with_any_bytes_changed_is_read_or_refused(of: int) -> None:
    """Found: a size beyond 64 bits ended the request with HTTP 500."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    changes = random.Random(seed)
    sound = gzip.decompress(
        tar(entry("a", 10, mtime=1.5), entry("b" * 90 + "/é" * 40, 700), entry("c"), of=of)
    )
    for _ in range(3_000):
        raw = bytearray(sound)
        for place in changes.choices(range(len(raw)), k=changes.randint(1, 6)):
            raw[place] = changes.choice([0, 0x20, 0x2D, 0x39, 0x80, 0xFF, changes.randrange(256)])
        with suppress(BadArchive):
            check(gzip.compress(with_checksums(raw), 1), BOUNDS)


@pytest.mark.parametrize(
    "size", [b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff0000000144", b"-1234567890\0", b"999999999z9\0"]
)
def test_a_size_that_is_none_is_refused(size: bytes) -> None:
    raw = bytearray(gzip.decompress(tar(entry("a", 10), entry("b", 10))))
    raw[124:136] = size
    with pytest.raises(BadArchive):
        check(gzip.compress(with_checksums(raw)), BOUNDS)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def header(size: int, kind: bytes, name: str = "x") -> bytes:
    return entry(name, size, type=kind).tobuf(format=tarfile.USTAR_FORMAT)


def pax(body: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header(len(body), kind) + padded(body)


def record(keyword: str, value: str) -> bytes:
    said = f" {keyword}={value}\n"
    length = len(said)
    while len(f"{length}{said}") != length:
        length += 1
    return f"{length}{said}".encode()


MIB = 1 << 20
FILE = header(0, tarfile.REGTYPE)
# A file that claims to be sparse, whose map is all that follows:
NEW_SPARSE = pax(record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")) + header(
    512, tarfile.REGTYPE
)
OLD_SPARSE = bytearray(header(512, tarfile.GNUTYPE_SPARSE))
OLD_SPARSE[257:265] = b"ustar  \0"
OLD_SPARSE[482] = 1  # its map goes on in the next block
MORE_MAP = bytes(504) + b"\1" + bytes(7)
NEGATIVE = bytearray(header(0, tarfile.REGTYPE))
NEGATIVE[124:136] = b"\xff" * 10 + b"\xfc\x00"  # -1024


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (NEW_SPARSE + b"99999\n" + b"0\n" * 200_000, "headers of more than"),
        (bytes(OLD_SPARSE) + MORE_MAP * 4096, "headers of more than"),
        ((FILE + bytes(OLD_SPARSE)) + MORE_MAP * 4096, "headers of more than"),
        (pax(b"") * 4096 + FILE, "headers of more than"),
        (pax(record("comment", "x" * 60_000)) * 40 + FILE, "headers of more than"),
        ((pax(record("comment", "x" * 60_000)) + FILE) * 9, "headers of more than"),
        (pax(b"2 " * 30_000 + b"=") + FILE, "pax header of it is malformed"),
        (pax(b"9 a=b") + FILE, "pax header of it is malformed"),
        (pax(record("comment", "1" * 60_000)) + FILE, "100 digits"),
        (pax(b"1" * 60_000) + FILE, "pax header of it is malformed"),
        (
            pax(b"".join(record(f"k{n}", "") for n in range(200)), tarfile.XGLTYPE) + FILE,
            "200 records for all",
        ),
        (pax(record("GNU.sparse.realsize", "0")) + bytes(NEGATIVE), "a size in it is negative"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_cost_no_more_than_their_bound(stream: bytes, said: str) -> None:
    """Found: a kilobyte had its reader use gigabytes, or read in circles."""
    tracemalloc.start()
    try:
        with pytest.raises(BadArchive, match=said):
            check(gzip.compress(with_checksums(bytearray(stream + bytes(1024)))), BundleBounds())
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def test_members_with_long_headers_are_read_to_their_end() -> None:
    names = ["ü" * 100 + "/" + "x" * 200, *(f"{'d' * 200}/{'e' * 200}/{n}" for n in range(300))]
    told = {"comment": "0" * 100}
    data = tar(*(entry(name, 513, mtime=0.5, pax_headers=told) for name in names))
    bounds = BundleBounds()
    with opened(data) as found:
        assert [member.name for member in members(found, bounds)] == names
    check(tar(*(entry(name, 512) for name in names), of=tarfile.GNU_FORMAT), bounds)


def test_a_part_of_a_name_is_what_file_systems_take() -> None:
    with pytest.raises(BadArchive, match="more than 255 bytes"):
        check(tar(entry("ü" * 128)), BundleBounds())


def test_a_folder_with_too_many_files_is_refused_where_it_is(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / f"f{number}").touch()
    with pytest.raises(BundleError, match=r"more than 10 files.*\.makaraignore"):
        pack(tmp_path, max_bytes=1 << 20, bounds=BOUNDS)
    (tmp_path / ".makaraignore").write_text("f1*\n")
    check(pack(tmp_path, max_bytes=1 << 20, bounds=BOUNDS), BOUNDS)


def test_a_submission_of_a_million_files_is_refused_at_the_first_too_many(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "home").start()
    try:
        block = tarfile.TarInfo("f").tobuf()
        many = gzip.compress(block * 1_000_000, 9)
        assert len(many) < 4 << 20
        answer = manager.post_job(json.dumps(job_spec(tmp_path / "store")), bundle=many)
        assert answer.status_code == 422
        told = {error["field"]: error["message"] for error in answer.json()["errors"]}
        assert told == {"bundle": "holds more than 20000 files and folders"}
    finally:
        manager.stop()


def test_what_tests_submit_is_within_the_bounds() -> None:
    check(BUNDLE, BundleBounds())
    check(archive(), BOUNDS)
