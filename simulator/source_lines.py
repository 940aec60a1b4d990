"""Finds the line of a field in a YAML or JSON text, for error messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import yaml

from .validation import FileFault

T = TypeVar("T")
F = TypeVar("F", bound=FileFault)
_INDEX = re.compile(r"\.?(?:\[(\d+)\]|(\d+)(?=[.\[]|$))")


def located(fault: F, text: str) -> F:
    """The same fault with the line of its field in `text` (JSON or YAML)."""
    if fault.line is not None:
        return fault
    return type(fault)(fault.message, Lines(text).of(fault.message.partition(": ")[0]))


def decode(data: bytes, invalid: type[FileFault]) -> str:
    """Decode UTF-8, without a byte order mark. Raises `invalid` if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8: byte 0x{data[error.start]:02x}; save the file as UTF-8"
        raise invalid(what, line) from error


def read_json(text: str, read: Callable[[Any], T], invalid: type[FileFault]) -> T:
    """What `read` makes of the JSON value in `text`. Raises `invalid` with a line, and so may `read`."""
    value = parse_json(text, invalid)
    try:
        return read(value)
    except FileFault as error:
        raise located(error, text) from error


def parse_json(text: str, invalid: type[FileFault]) -> Any:
    """Parse a JSON text. Raises `invalid` if it is not JSON, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        raise invalid(f"not JSON: {error.msg} (column {error.colno})", error.lineno) from error
    except RecursionError as error:
        raise invalid("not JSON: nested too deeply") from error
    except _Repeated as error:
        field, line, first = next(Lines(text).repeated(), (str(error), None, None))
        raise invalid(f"{field}: given twice" + (f", first in line {first}" if first else ""), line) from None


class Lines:
    """The lines of a text's fields. A text that is not YAML has none: its parser reports what is wrong."""

    def __init__(self, text: str) -> None:
        self._text = text

    def of(self, field: str) -> int | None:
        """The line of a field, named as in errors: "training.steps", "links[2].latency_s".

        If the text lacks the field, the line of the nearest enclosing field; None for an empty text.
        """
        node = self._root
        if node is None:
            return None
        line, rest = node.start_mark.line, field
        while (found := _inside(node, rest)) is not None:
            line, node, rest = found
        return line + 1

    def repeated(self) -> Iterator[tuple[str, int, int]]:
        """Yield (field, line, line of its first occurrence) for every repeated key of a mapping."""
        if self._root is not None:
            yield from repeated_keys(self._root)

    @cached_property
    def _root(self) -> yaml.Node | None:
        try:
            # Tabs may stand between the tokens of JSON, not of YAML; raw ones in strings of neither.
            return yaml.compose(self._text.replace("\t", " "), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError):
            return None


def repeated_keys(root: yaml.Node) -> Iterator[tuple[str, int, int]]:
    """Yield (field, line, line of its first occurrence) for every repeated key of a mapping below `root`."""
    yield from _repeated(root, "", set())


def _inside(node: yaml.Node, field: str) -> tuple[int, yaml.Node, str] | None:
    """One step down the path `field`: (line, node, rest of the path); None at the end of the path."""
    if isinstance(node, yaml.SequenceNode):
        step = _INDEX.match(field)
        index = int(step[1] or step[2]) if step else len(node.value)
        if step is None or index >= len(node.value):
            return None
        return node.value[index].start_mark.line, node.value[index], field[step.end() :]
    if not isinstance(node, yaml.MappingNode):
        return None
    field = field.removeprefix(".")
    fitting = [(key, value) for key, value in node.value if _begins(field, key)]
    if not fitting:
        return None
    # A key may hold dots. Of equal ones the last is the one that counts.
    key, value = max(reversed(fitting), key=lambda pair: len(pair[0].value))
    return key.start_mark.line, value, field[len(key.value) :]


def _begins(field: str, key: yaml.Node) -> bool:
    if not isinstance(key, yaml.ScalarNode) or not key.value:
        return False
    return field.startswith(key.value) and field[len(key.value) : len(key.value) + 1] in ("", ".", "[")


class _Repeated(ValueError):
    """A JSON object has this key twice."""


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise _Repeated(key)
        value[key] = item
    return value


def _repeated(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, f"{path}[{index}]", seen)
    if isinstance(node, yaml.MappingNode):
        first: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    yield name, line, first[key.tag, key.value]
                first.setdefault((key.tag, key.value), line)
            yield from _repeated(value, name, seen)
