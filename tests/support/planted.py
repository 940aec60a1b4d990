"""Secrets that a test plants, the forms in which they may leak, and what a run leaves to be searched."""

from __future__ import annotations

import base64
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psutil

_LEAST = 12  # bytes of a form; a shorter one would be found by chance


def forms(secret: bytes) -> set[bytes]:
    """As it is, as JSON and URLs write it, in hexadecimal, and in base64 wherever it begins in what was
    encoded."""
    found = {secret, quote(secret, safe="").encode(), secret.hex().encode(), secret.hex().upper().encode()}
    with suppress(UnicodeDecodeError):
        found.add(json.dumps(secret.decode())[1:-1].encode())
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + secret)
        # Without the characters that what is before and after has a part in.
        inner = encoded[-(-8 * before // 6) : 8 * (before + len(secret)) // 6]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return {form for form in found if len(form) >= _LEAST}


class Plants:
    """Secrets by what they are; all the values of one kind count as one."""

    def __init__(self) -> None:
        self._forms: dict[str, set[bytes]] = {}

    def add(self, what: str, secret: str | bytes) -> None:
        data = secret.encode() if isinstance(secret, str) else secret
        assert len(data) >= _LEAST, what
        self._forms.setdefault(what, set()).update(forms(data))

    @property
    def kinds(self) -> set[str]:
        return set(self._forms)

    def among(self, data: bytes) -> set[str]:
        """Which kinds are in `data`, in any form."""
        return {what for what, forms in self._forms.items() if any(form in data for form in forms)}

    def found(self, places: Mapping[str, bytes]) -> set[tuple[str, str]]:
        """(place, kind) of each leak."""
        return {(place, what) for place, data in places.items() for what in self.among(data)}


class Watch(threading.Thread):
    """What a run shows while it lasts: the command lines of all processes of this machine, and all that was
    ever in the files below some folders. Use as a context."""

    def __init__(self, *folders: Path) -> None:
        super().__init__(daemon=True)
        self._folders = folders
        self._ended = threading.Event()
        self.commands: set[bytes] = set()
        self.texts: dict[Path, set[bytes]] = {}
        """By file; of one that grows, its end only counts, for it begins with all that was before."""

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self.look()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.look()

    def look(self) -> None:
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                self.commands.add(Path(f"/proc/{process.pid}/cmdline").read_bytes())
        for path in files_below(self._folders):
            with suppress(OSError):
                self._note(path, path.read_bytes())

    def _note(self, path: Path, data: bytes) -> None:
        kept = self.texts.setdefault(path, set())
        kept -= {text for text in kept if data.startswith(text)}
        kept.add(data)


def files_below(folders: Iterable[Path]) -> Iterator[Path]:
    """Plain files; those that vanish meanwhile are left out."""
    for folder in folders:
        for root, _, names in os.walk(folder):  # which passes over folders that vanish
            for path in (Path(root, name) for name in names):
                with suppress(OSError):
                    if stat.S_ISREG(path.lstat().st_mode):
                        yield path
