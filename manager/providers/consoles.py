"""Sanitises console output of VMs, which is untrusted, for display."""

from __future__ import annotations

import re

MOST_LINES = 40
_MOST_COLUMNS = 200
# Control sequences of terminals, for colours, titles and more (ECMA-48, 5.3 to 5.6).
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?"
)


def last_lines(console: str) -> str:
    """The end of the output: at most 40 lines of 200 printable characters, without empty lines."""
    lines = (_printable(line) for line in _CONTROLS.sub("", console).splitlines())
    return "\n".join([line[:_MOST_COLUMNS] for line in lines if line][-MOST_LINES:])


def _printable(line: str) -> str:
    """Remove characters that move a cursor or change the direction of text."""
    return "".join(c if c.isprintable() else " " for c in line).rstrip()
