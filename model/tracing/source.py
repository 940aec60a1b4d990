"""Finds lines of the user's code, for messages that name a line to change."""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import fx

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent) + os.sep


def stack_line(node: fx.Node) -> str | None:
    """The user's line that made `node`."""
    place = stack_place(node)
    return None if place is None else line_of(*place)


def stack_place(node: fx.Node) -> tuple[str, int] | None:
    """(file, line) of the last frame outside torch in the recorded stack of `node`."""
    found: list[tuple[str, str]] = _PLACE.findall(node.meta.get("stack_trace") or "")
    places = [(file, int(line)) for file, line in found if not file.startswith((_TORCH + os.sep, "<"))]
    return places[-1] if places else None


def user_call(error: BaseException) -> str | None:
    """The user's line under which `error` was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else None


def calling_line() -> str | None:
    """The user's line that is running now."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return line_of(frame.f_code.co_filename, frame.f_lineno)


def called_by_user() -> bool:
    """Whether the function that calls this one was itself called by code outside torch and Makara."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


def defined_at(function: object) -> str | None:
    """The line where a function is defined."""
    code: object = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return line_of(code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else None


def line_of(filename: str, number: int) -> str:
    return f"{filename}:{number}: {linecache.getline(filename, number).strip()}"


def is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS, "<"))
