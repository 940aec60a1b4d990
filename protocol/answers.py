"""The answer of a process that runs the user's code: a line of JSON on its stdout, with a mark.

The user's code may print there as well, even after the answer: at exit, or from a library in C that keeps its
lines until then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

_MARK = "answer of makara"


def write_answer(answer: Mapping[str, Any]) -> None:
    """Print it on a line of its own, even where the line before has no end."""
    print("\n" + json.dumps({_MARK: True, **answer}), flush=True)


def answer_in(printed: str) -> dict[str, Any] | None:
    """The answer in all that a process printed; None without any."""
    for line in reversed(printed.splitlines()):
        if _MARK not in line:
            continue
        try:
            value: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and _MARK in value:
            answer = cast(dict[str, Any], value)
            del answer[_MARK]
            return answer
    return None
