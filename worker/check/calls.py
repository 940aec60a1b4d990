"""Functions of torch that must see the whole model, found when user code calls them where it sees a part."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from .findings import Report

_TORCH = str(Path(torch.__file__).parent)
_CLIPPING = ("clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm")
_SCALER = "torch.amp.GradScaler"


class Calls:
    """The first call that clips by a norm, and the first of a `GradScaler`. They are known by their code,
    however the user imported them."""

    def __init__(self) -> None:
        utils: Any = torch.nn.utils
        self._known: dict[CodeType, str] = {
            inspect.unwrap(getattr(utils, name)).__code__: f"torch.nn.utils.{name}" for name in _CLIPPING
        }
        for _, method in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction):
            self._known[method.__code__] = _SCALER
        self._clipping: tuple[str, str, object] | None = None  # name, line, the limit
        self._scaling: str | None = None  # line

    @contextmanager
    def watched(self) -> Generator[None]:
        """Looks at the calls that this thread makes meanwhile."""
        if sys.getprofile() is not None:  # somebody profiles this run: a C profiler could not be put back
            yield
            return
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(None)

    def blame(self, where: str, report: Report) -> None:
        """Blame the function `where`, which called them."""
        if self._clipping is not None:
            name, line, limit = self._clipping
            report.find(
                where,
                f"it calls {name} at {line}. Makara makes one optimizer per section, from that section's "
                "parameters alone, so each section would be clipped by its own norm",
                f"Remove the call and declare Training(clip_grad_norm={limit}), which clips by the norm over "
                "the whole model",
            )
        if self._scaling is not None:
            report.find(
                where,
                f"it uses {_SCALER} at {self._scaling}: sections would scale their gradients, and skip "
                "steps, each by itself",
                "Remove the scaler and set training.precision: fp16 in the job file: Makara scales the loss, "
                "and all sections skip a step together",
            )

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        name = self._known.get(frame.f_code) if event == "call" else None
        if name == _SCALER:
            self._scaling = self._scaling or _caller(frame)
        elif name is not None and self._clipping is None:
            self._clipping = name, _caller(frame), frame.f_locals.get("max_norm", "...")


def _caller(frame: FrameType) -> str:
    """The line outside torch that led to it."""
    for caller, line in traceback.walk_stack(frame.f_back):
        if not caller.f_code.co_filename.startswith(_TORCH):
            return f"{caller.f_code.co_filename}:{line}"
    return "an unknown line"
