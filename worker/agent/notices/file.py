"""A local VM's notice: `notice.json` in its folder, written atomically by rename."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ....protocol.messages import NoticeFile
from .notice import Countdown, Notice, Reading, Source

NOTICE_FILE = "notice.json"


class FileSource(Source):
    period_s = 0.25

    def __init__(
        self,
        directory: Path,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = directory / NOTICE_FILE
        self._wall = wall
        self._countdown = Countdown(steady)

    async def read(self) -> Reading:
        """Raises `ValidationError` on a malformed file."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Reading()
        notice = NoticeFile.model_validate_json(data)
        passed_s = min(max(0.0, self._wall() - notice.written_at), notice.deadline_s)
        return Reading(Notice("terminate", self._countdown.left_s(notice, notice.deadline_s - passed_s)))
