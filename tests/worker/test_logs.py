"""Log files are bounded, and read from their ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from makara.protocol.log_tail import tail
from makara.worker.agent.logs import bound


def test_the_end_of_a_log_is_read_across_what_was_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert tail(path, 10) == ""
    with path.open("ab") as log:  # as its writers open it
        log.write(b"0123456789")
        log.flush()
        bound(path, 10)
        assert path.stat().st_size == 10
        log.write(b"abc")
        log.flush()
        bound(path, 10)
        assert path.stat().st_size == 0
        assert tail(path, 4) == "9abc"
        log.write(b"de")
        log.flush()
        assert tail(path, 4) == "bcde"
        assert tail(path, 100) == "3456789abcde"


def test_of_a_large_log_only_the_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 10_000 + b"end")
    bound(path, 100)
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) == 100
    assert tail(path, 3) == "end"


def test_what_is_written_while_the_end_is_moved_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "a.log", Path.write_bytes

    def slow(before: Path, data: bytes) -> int:
        with path.open("ab") as log:
            log.write(b"meanwhile\n")
        return write(before, data)

    path.write_bytes(b"x" * 20)
    monkeypatch.setattr(Path, "write_bytes", slow)
    bound(path, 10)
    assert path.read_bytes() == b"meanwhile\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 10


def test_a_log_that_is_not_there_needs_no_bound(tmp_path: Path) -> None:
    bound(tmp_path / "a.log", 10)
    assert list(tmp_path.iterdir()) == []
