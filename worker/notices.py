"""Notices of preemption: how a VM learns that its cloud will take it away."""

from __future__ import annotations

import time
from pathlib import Path

from .messages import NoticeFile

NOTICE_FILE = "notice.json"


def remaining_notice_s(directory: Path) -> float | None:
    """Seconds until a local VM is killed, from `notice.json` in its folder; None without a notice.

    The file is written by rename, so it is read whole. Raises `ValidationError` on a malformed one.
    """
    try:
        data = (directory / NOTICE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    notice = NoticeFile.model_validate_json(data)
    return max(0.0, notice.written_at + notice.deadline_s - time.time())
