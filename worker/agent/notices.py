"""Notices of preemption: how a VM learns that its cloud will take it away."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...protocol.messages import NoticeFile

NOTICE_FILE = "notice.json"


class Notices:
    """A local VM's notice: `notice.json` in its folder.

    The wall clock is asked once for each notice, when it is first seen; from then on it counts down by a
    clock that nobody sets.
    """

    def __init__(
        self,
        directory: Path,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / NOTICE_FILE
        self._wall = wall
        self._steady = steady
        self._seen: tuple[NoticeFile, float] | None = None  # and when, by the steady clock, the VM is killed

    def remaining_s(self) -> float | None:
        """Seconds until the VM is killed; None without a notice.

        The file is written by rename, so it is read whole. Raises `ValidationError` on a malformed one.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        notice = NoticeFile.model_validate_json(data)
        if self._seen is None or self._seen[0] != notice:
            passed_s = min(max(0.0, self._wall() - notice.written_at), notice.deadline_s)
            self._seen = notice, self._steady() + notice.deadline_s - passed_s
        return max(0.0, self._seen[1] - self._steady())
