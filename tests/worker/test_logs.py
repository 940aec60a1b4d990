"""Log files are bounded, and read from their ends."""

from __future__ import annotations

from pathlib import Path

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


def test_a_log_that_is_not_there_needs_no_bound(tmp_path: Path) -> None:
    bound(tmp_path / "a.log", 10)
    assert list(tmp_path.iterdir()) == []
