"""Bounds the size of a VM's log files."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ...protocol.log_tail import BEFORE

log = logging.getLogger("makara.agent")

_LOOK_S = 0.25  # between two checks of all logs


class BoundedLogs:
    """The log files of a folder, checked periodically. An error with one of them is logged once, and stops
    nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._troubles: dict[Path, str] = {}

    async def keep(self, kept_bytes: Callable[[], int]) -> NoReturn:
        """Bound them until cancelled, in a thread, since a disk may be slow."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.look, kept_bytes())

    def look(self, kept_bytes: int) -> None:
        for path in self._folder.glob("*.log"):
            try:
                bound(path, kept_bytes)
            except OSError as error:
                if self._troubles.get(path) != str(error):
                    log.warning("the end of %s is not kept: %s", path, error)
                self._troubles[path] = str(error)
            else:
                self._troubles.pop(path, None)


def bound(path: Path, kept_bytes: int) -> None:
    """If the log is longer than `kept_bytes`, move its end to a second file and empty it.

    Its writers are not disturbed, since they append to the same file. What they write meanwhile stays, but
    for what comes at the moment at which it is emptied. On a full disk the log is emptied first, to make
    room. Raises `OSError` if its end still cannot be written.
    """
    before = path.with_name(path.name + BEFORE)
    try:
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= kept_bytes:
                return
            file.seek(size - kept_bytes)
            end = file.read(kept_bytes)
            try:
                before.write_bytes(end)
            except OSError:
                file.truncate(0)
                before.write_bytes(end)
                return
            since = file.read()
            file.truncate(0)
        if since:
            with path.open("ab") as file:
                file.write(since)
    except FileNotFoundError:
        return  # nothing was written yet
