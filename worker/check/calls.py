"""Functions of torch that look at the whole model, when user code calls them where it sees a part only."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_CLIPPERS = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
SCALER = "GradScaler"


@dataclass(frozen=True, slots=True)
class Call:
    """The first call of a function: by name, the line outside torch that led to it, its arguments."""

    name: str
    place: str
    arguments: Mapping[str, Any]


class Calls:
    """Finds calls by their code, however the user imported the function."""

    def __init__(self) -> None:
        clip: Any = torch.nn.utils
        self._known: dict[CodeType, str] = {
            inspect.unwrap(getattr(clip, name)).__code__: name for name in _CLIPPERS
        }
        self._scaler_file = inspect.getsourcefile(torch.amp.GradScaler)
        self._found: dict[str, Call] = {}

    @contextmanager
    def watched(self) -> Generator[None]:
        """Looks at the calls that this thread makes meanwhile."""
        before: Callable[..., object] | None = sys.getprofile()
        if before is not None:  # somebody profiles this run, and a C profiler could not be put back
            yield
            return
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def clipping(self) -> Call | None:
        """The outermost function of clipping by norm."""
        return next((self._found[name] for name in _CLIPPERS if name in self._found), None)

    @property
    def scaling(self) -> Call | None:
        return self._found.get(SCALER)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        name = self._known.get(frame.f_code)
        if name is None and frame.f_code.co_filename == self._scaler_file:
            name = SCALER
        if name is not None and name not in self._found:
            self._found[name] = Call(name, _caller(frame), dict(frame.f_locals))


def _caller(frame: FrameType) -> str:
    for caller, line in traceback.walk_stack(frame.f_back):
        if not caller.f_code.co_filename.startswith(_TORCH):
            return f"{caller.f_code.co_filename}:{line}"
    return "an unknown line"
