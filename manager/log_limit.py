"""A log that no single cause can fill a disk with."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST = 4000  # characters of a message; a traceback comes after it, and may be as long


@dataclass(slots=True)
class _Line:
    """One place in the code that logs: since when its records are counted, and how many there were."""

    since: float
    num_records: int = 0


def log_to_stderr() -> None:
    """Log this process's messages on stderr, within limits."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    logging.getLogger("httpx").setLevel(logging.WARNING)


class LogLimit(logging.Filter):
    """Lets `most` records of each line of code through in `period_s`; the next one that passes says how many
    did not. Long messages are cut."""

    def __init__(
        self, most: int = 60, period_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most = most
        self._period_s = period_s
        self._clock = clock
        self._lines: dict[tuple[str, int], _Line] = {}  # as many as the programs have

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        line = self._lines.setdefault((record.pathname, record.lineno), _Line(self._clock()))
        left_out = 0
        if self._clock() - line.since >= self._period_s:
            left_out = max(0, line.num_records - self._most)
            line.since, line.num_records = self._clock(), 0
        line.num_records += 1
        if line.num_records > self._most:
            return False
        try:
            text = _cut(record.getMessage())
        except Exception:  # its arguments do not fit: the handler says so, and the code that logs goes on
            return True
        if left_out:
            text = f"{text} ({left_out} more like this were not logged)"
        record.msg, record.args = text, ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)  # which handlers then take
        if record.exc_text:
            record.exc_text = _cut(record.exc_text)
        return True


def _cut(text: str, most: int = _LONGEST) -> str:
    """The text without its middle if it is long: a traceback ends with the error."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters are left out ...] {text[-half:]}"
