"""Expands `~` in paths that a user wrote.

Only commands do this, as the user who runs them. A manager may run as another user, whose `~` is another
folder: it refuses such paths as relative.
"""

from __future__ import annotations

import os
from pathlib import Path


class UnknownHome(ValueError):
    """A path begins with `~user`, and there is no such user."""


def expanded(text: str) -> Path:
    """The path with a leading `~` or `~user` replaced, as a shell does. Raises `UnknownHome`."""
    whole = os.path.expanduser(text)  # not `Path.expanduser`, for which ./~ is ~
    if whole.startswith("~"):
        raise UnknownHome(
            f"{text!r}: the home folder {text.partition('/')[0]} is not known on this machine; write the "
            f"whole path (a folder of this name: ./{text})"
        )
    return Path(whole)
