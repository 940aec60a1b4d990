"""Programs of tests that are found in the PATH before those of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Shims:
    """Puts them into the PATH, as long as `patch` lasts."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._programs = folder / "programs"
        self._programs.mkdir()
        patch.setenv("PATH", f"{self._programs}:{os.environ['PATH']}")

    def put(self, name: str, body: str) -> Path:
        """It notes its arguments in the file that is returned, and runs `body` in a shell."""
        noted = self._folder / f"{name}.txt"
        program = self._programs / name
        program.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n{body}\n')
        program.chmod(0o700)
        return noted
