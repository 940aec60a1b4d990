"""A job's code, unpacked where the agent runs."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import warnings
from pathlib import Path

import pytest
from makara.worker.agent.bundles import _unpack
from makara.worker.agent.trainer_user import CodeUser


def archive() -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, mode in (("run.sh", 0o6777), ("train.py", 0o666), ("data/words.txt", 0o666)):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.uid, entry.gid, entry.size = mode, 4321, 4321, 4
            tar.addfile(entry, io.BytesIO(b"pass"))
    return raw.getvalue()


@pytest.mark.parametrize("has_filter", [True, False])
def test_code_gets_plain_rights_and_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_filter: bool
) -> None:
    """Found: Debian 12's Python 3.11.2 knows no filters of tarfile."""
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions ask for a filter
        _unpack(archive(), tmp_path / "code", CodeUser(None))
    found = {path.name: path.stat() for path in (tmp_path / "code").rglob("*") if path.is_file()}
    assert {name: stat.S_IMODE(at.st_mode) for name, at in found.items()} == {
        "run.sh": 0o755,
        "train.py": 0o644,
        "words.txt": 0o644,
    }
    assert {at.st_uid for at in found.values()} == {os.getuid()}


def test_code_has_its_name_only_once_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a VM that crashes, and starts anew, may take empty files for the job's code."""
    code, synced = tmp_path / "code", set[int]()

    def fsync(descriptor: int) -> None:
        assert not code.exists()
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    _unpack(archive(), code, CodeUser(None))
    assert {path.stat().st_ino for path in (code, *code.rglob("*"))} <= synced
