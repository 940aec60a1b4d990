"""Shortens tracebacks for users to the lines of their own code and the error.

Tracing, and torch below it, add hundreds of frames that say nothing about a model. The whole text is in the
job's log, and printed by `makara check --traceback`.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_MOST_FRAMES = 8
_OUTERMOST = 2  # of these, when the middle is left out
_TORCH, _PYTHON = (Path(file).parent for file in (torch.__file__, traceback.__file__))
_ROOMS = "checkpoint manager model morphing pipeline protocol simulator worker"
_OURS = tuple(Path(__file__).parent.parent / room for room in _ROOMS.split())


def users_part(error: BaseException) -> str | None:
    """The frames of the user's code and of libraries that it calls, and the first line of the message; None
    if there are no such frames. The error's cause is shown if the user's own code raised it."""
    told = _told(error)
    if told is None:
        return None
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is None or not _raised_by_users_line(cause):
        return told
    return f"{_told(cause)}\nwhich led to:\n\n{told}"


def whole(error: BaseException) -> str:
    """The whole traceback, with causes."""
    return "".join(traceback.format_exception(error))


def is_users(file: Path) -> bool:
    """Whether a file belongs to the user's code, or to a library that it brings (not torch)."""
    if not file.is_absolute() or any(file.is_relative_to(folder) for folder in (*_OURS, _TORCH)):
        return False  # code that torch generates has no file
    return "site-packages" in file.parts or not file.is_relative_to(_PYTHON)


def _told(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError):  # the line is the error's own
        return "".join(traceback.format_exception_only(error))
    frames = _frames(error)
    if not frames:
        return None
    lines = ["Traceback (of your code; the most recent call last):\n"]
    if len(frames) > _MOST_FRAMES:
        inner = frames[_OUTERMOST - _MOST_FRAMES :]
        lines += traceback.format_list(frames[:_OUTERMOST])
        lines += [f"  ... {len(frames) - _MOST_FRAMES} more ...\n", *traceback.format_list(inner)]
    else:
        lines += traceback.format_list(frames)
    return "".join(lines) + f"{type(error).__name__}: {first_line(error)}\n"


def first_line(error: BaseException) -> str:
    """The first line of the error's message."""
    return next((line for line in str(error).splitlines() if line.strip()), "")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if is_users(Path(f.filename))]


def _raised_by_users_line(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_users(Path(frames[-1].filename))
