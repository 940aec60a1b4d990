"""Formats stacks of a trainer's threads so that a reader finds the job's own code first."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from pathlib import Path

# Signals at which a trainer writes stacks: of its newest hundred threads; of its main thread.
ALL_THREADS, MAIN_THREAD = signal.SIGUSR1, signal.SIGUSR2
_THREAD = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \(most recent)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def lead(text: str, code: Path) -> str:
    """Reorder faulthandler's output: the main thread first, after the innermost line in the job's `code`.

    The main thread computes; faulthandler writes it last. If no thread is in the job's code, the first line
    is the main thread's innermost one.
    """
    begins = [found.start() for found in _THREAD.finditer(text)]
    threads = [text[a:b].rstrip() for a, b in pairwise([*begins, len(text)])][::-1]
    frames = [found for thread in threads for found in _FRAME.finditer(thread)]
    if not frames:
        return text
    frame = next((frame for frame in frames if _is_own(Path(frame["file"]), code)), frames[0])
    file = frame["file"].removeprefix(f"{code}/")
    return "\n\n".join([f"in {frame['function']}, {file} line {frame['line']}", *threads]) + "\n"


def is_cut(text: str) -> bool:
    """Whether faulthandler left threads out: beyond a hundred it drops the oldest, so the main thread."""
    return "\n...\n" in text


def _is_own(file: Path, code: Path) -> bool:
    return file.is_relative_to(code) and "site-packages" not in file.parts
