"""Removes a folder in which a job's code wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def wipe(folder: Path) -> None:
    """Remove `folder`, whatever modes its subfolders have. Raises `OSError` if something remains."""
    try:
        shutil.rmtree(folder)
    except PermissionError:
        _let_owner_write(folder)
        shutil.rmtree(folder)


def _let_owner_write(folder: Path) -> None:
    folder.chmod(0o700)
    for place, names, _ in os.walk(folder):  # the modes are changed before the walk enters a folder
        for name in names:
            path = Path(place, name)
            if not path.is_symlink():
                path.chmod(0o700)
