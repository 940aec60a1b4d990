"""What is wrong with a file."""

from __future__ import annotations

from pathlib import Path


class FileFault(ValueError):
    """An invalid file. `message` begins with the field at fault, if any, and a colon; `line` counts from 1
    and is None if no single line is at fault."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.message = message
        self.line = line
        super().__init__(message if line is None else f"line {line}: {message}")

    def in_file(self, path: Path | str) -> str:
        """The message as compilers write it: "costs.json:3: boot_s: ..."."""
        return f"{path}: {self.message}" if self.line is None else f"{path}:{self.line}: {self.message}"
