"""Log files of a VM, kept from growing for ever."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ...protocol.log_tail import BEFORE

log = logging.getLogger("makara.agent")

_LOOK_S = 0.25  # from one look at all logs to the next


class BoundedLogs:
    """The log files of a folder, looked at now and then. What keeps one of them from being bounded is told
    once, and ends nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._troubles: dict[Path, str] = {}

    async def keep(self, kept_bytes: Callable[[], int]) -> NoReturn:
        """Bound them for ever, in a thread: a disk may be slow."""
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
    """If the log is longer, move its end away and empty it.

    Its writers go on undisturbed: they append to the same file (which they opened so). What they write
    in this very moment may be lost. Raises `OSError` where the end cannot be written, even once the log
    was emptied, which it is all the same, and made room for it.
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
                file.truncate(0)
            except OSError:
                file.truncate(0)
                before.write_bytes(end)
    except FileNotFoundError:
        return  # nothing was written yet
