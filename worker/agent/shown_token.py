"""The token that a VM shows to its manager: in memory, and in a file for a restarted agent."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("makara.agent")


class ShownToken:
    """The VM's worker token once it has one; the join token until then.

    The token in memory counts, so a full disk, which keeps it out of the file, does not matter at once.
    """

    def __init__(self, path: Path, join_token: str) -> None:
        self._path = path
        self.text = path.read_text() if path.exists() else join_token
        self._is_written = True
        self._is_told = False

    def renew(self, text: str) -> None:
        self.text = text
        self._is_written = False
        self.write()

    def write(self) -> None:
        """Write the token to its file if it is not there; after a failure the next call tries again."""
        if self._is_written:
            return
        try:
            write_secret(self._path, self.text)
        except OSError as error:
            if not self._is_told:
                log.warning("cannot write this VM's token to %s: %s; trying again", self._path, error)
            self._is_told = True
        else:
            self._is_written, self._is_told = True, False


def write_secret(path: Path, text: str) -> None:
    """Write `text` to a file that only this user can read, replacing it whole."""
    temporary = path.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
