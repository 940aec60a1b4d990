"""A job's progress where there is no terminal: lines for a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .progress import ProgressText, completed, fields_of, loss_of

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S = 5.0


class ProgressLines:
    """Used as `ProgressDisplay` is. Prints a line when status, shape or the job's activity change, and at
    most one every few seconds about steps."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = ProgressText(console)
        self._clock = clock
        self._printed_at = -_EVERY_S
        self._state: tuple[str, ...] = ()  # status, shape and doing of the last line
        self._line = ""
        self._view: dict[str, Any] = {}

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, view: dict[str, Any]) -> bool:
        """Print what is new in a job's view; returns whether there are new morphs."""
        self._view = view = completed(view)
        fields = fields_of(view)
        state = (view["status"], fields["shape"], fields["doing"])
        self._print(view["step"], fields, at_once=state != self._state)
        self._state = state
        return self._text.show(view)

    def tell(self, line: str) -> None:
        """Print a line about the plan that runs, unless it was the last such line."""
        self._text.tell(line)

    def show_step(self, step: dict[str, Any]) -> None:
        if self._view:
            self._print(step["step"], {**fields_of(self._view), "loss": loss_of(step)}, at_once=False)

    def _print(self, step: int, fields: dict[str, str], *, at_once: bool) -> None:
        now = self._clock()
        if not at_once and now - self._printed_at < _EVERY_S:
            return
        texts = (f"{self._view['status']:<9}", f"step {step}/{self._view['steps']}", *fields.values())
        line = "  ".join(text for text in texts if text)
        if line != self._line:
            self._text.print(line)
            self._line, self._printed_at = line, now
