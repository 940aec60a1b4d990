"""Faults of a job file: the line, the field, what is wrong, and what would be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from ...simulator.source_lines import Lines
from ...simulator.validation import faults_of
from .other_tools import belongs

WHOLE = "job file"
"""The field name of faults that concern no single key."""


class JobSpecError(ValueError):
    """An invalid job file. `errors` holds one (field path, message) per fault, `lines` the line of each
    (None: unknown)."""

    def __init__(self, errors: Sequence[tuple[str, str]], lines: Sequence[int | None] = ()) -> None:
        self.errors = tuple(errors)
        self.lines = tuple(lines) or (None,) * len(self.errors)
        told = zip(self.errors, self.lines, strict=True)
        super().__init__("\n".join(_told(field, message, line) for (field, message), line in told))

    def located(self, text: str) -> JobSpecError:
        """The same faults in the order of their lines in the job file's text."""
        lines = Lines(text)
        known = [
            (line or (None if field == WHOLE else lines.of(field)), field, message)
            for (field, message), line in zip(self.errors, self.lines, strict=True)
        ]
        known.sort(key=lambda fault: fault[0] or 0)
        return JobSpecError([(field, text) for _, field, text in known], [line for line, _, _ in known])

    def in_file(self, path: Path | str) -> str:
        """One line per fault, as compilers write them: "job.yaml:12: training.steps: ..."."""
        return "\n".join(
            (f"{path}:" if line is None else f"{path}:{line}:")
            + (f" {message}" if field == WHOLE else f" {field}: {message}")
            for (field, message), line in zip(self.errors, self.lines, strict=True)
        )


def _told(field: str, message: str, line: int | None) -> str:
    return f"{field}: {message}" + ("" if line is None else f" (line {line})")


def explain(error: ValidationError, form: type[BaseModel]) -> JobSpecError:
    """Translate pydantic's errors about `form` into our messages."""
    return JobSpecError(faults_of(error, form, WHOLE, lambda key: belongs(key, form)))
