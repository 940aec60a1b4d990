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
        for name, mode in (("run.sh", 0o6777), ("train.py", 0o666)):
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
    found = {path.name: path.stat() for path in (tmp_path / "code").iterdir()}
    assert {name: stat.S_IMODE(at.st_mode) for name, at in found.items()} == {
        "run.sh": 0o755,
        "train.py": 0o644,
    }
    assert {at.st_uid for at in found.values()} == {os.getuid()}
