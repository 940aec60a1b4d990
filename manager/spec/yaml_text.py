"""Parses YAML; errors name the line.

PyYAML reads YAML 1.1, in which 010 is 8, 10:30 is 630 and `no` is false. What a reader would take for another
value is refused, and so is a text that is small but stands for a huge value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from ...simulator.source_lines import repeated_keys
from .spec_errors import WHOLE, JobSpecError

MAX_FILE_BYTES = 1 << 20  # a manager takes no larger specification: Starlette's limit of a form's field
_MAX_VALUES = 20_000  # aliases replaced by what they stand for; a job file has about 50
_MAX_DEPTH = 64
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_NUMBERS = {"tag:yaml.org,2002:int": _INT, "tag:yaml.org,2002:float": _FLOAT}


def read_yaml(text: str) -> Any:
    """Parse the one document in `text`. Raises `JobSpecError` naming the line."""
    if len(text) > MAX_FILE_BYTES:
        raise JobSpecError([(WHOLE, too_large())])
    try:
        loader = _Loader(text)
        try:
            return _read(loader)
        finally:
            loader.dispose()
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = int(error.character)
        fault = f"not YAML: the character U+{code:04X} may not be in it"
        if code == 0:
            fault += "; if the file is UTF-16, save it as UTF-8"
        raise JobSpecError([(WHOLE, fault)], [line]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise JobSpecError([(WHOLE, _problem(error))], [None if mark is None else mark.line + 1]) from error
    except RecursionError as error:
        raise JobSpecError([(WHOLE, "not YAML: nested too deeply")]) from error


def too_large() -> str:
    """What is said about a file of more than `MAX_FILE_BYTES`."""
    return f"is larger than {MAX_FILE_BYTES >> 10} KiB; is it a job file?"


def _read(loader: _Loader) -> Any:
    root = loader.get_single_node()
    if root is None:
        return None
    faults = [
        (name, f"given twice, first in line {first}", line) for name, line, first in repeated_keys(root)
    ]
    for name, node in _scalars(root, "", set()):
        if fault := _number_fault(loader, node):
            faults.append((name or WHOLE, fault, node.start_mark.line + 1))
    if faults:
        raise JobSpecError([(name, fault) for name, fault, _ in faults], [line for _, _, line in faults])
    return loader.construct_document(root)


def _problem(error: yaml.MarkedYAMLError) -> str:
    if error.problem == "but found another document":
        return "a second document begins here; give one, without ---"
    return f"not YAML: {error.problem}" + (f" {error.context}" if error.context else "")


class _Loader(yaml.SafeLoader):
    """A loader that also reports, with a line, values that Python or JSON cannot hold (a 99th month, half a
    character, a list that contains itself), and stops at a text that stands for too many values."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._around: list[str | None] = []  # anchors of the enclosing nodes
        self._num_values = 0  # so far, aliases replaced
        self._sizes: dict[str, int] = {}  # values that an anchor stands for

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        anchor: str | None = getattr(event, "anchor", None)
        is_alias = isinstance(event, yaml.AliasEvent)
        if is_alias and anchor in self._around:
            problem = f"*{anchor} stands inside of what it stands for"
            raise ComposerError(None, None, problem, event.start_mark)
        if len(self._around) == _MAX_DEPTH:
            raise ComposerError(None, None, "nested too deeply", event.start_mark)
        before = self._num_values
        self._num_values += self._sizes.get(anchor, 1) if is_alias and anchor else 1
        if self._num_values > _MAX_VALUES:
            what = f"with its aliases replaced it has more than {_MAX_VALUES:,} values; use fewer aliases"
            raise JobSpecError([(WHOLE, what)], [event.start_mark.line + 1])
        self._around.append(anchor)
        try:
            node = super().compose_node(parent, index)
        finally:
            self._around.pop()
        if anchor and not is_alias:
            self._sizes[anchor] = self._num_values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error


# ---- numbers -----------------------------------------------------------------------------------------------


def _scalars(node: yaml.Node, path: str, seen: set[int]) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield each scalar once, with the name of its field; a key has the name of the field itself."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield path, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
            merged = key.tag == "tag:yaml.org,2002:merge"
            inside = path if merged or not name else f"{path}.{name}".removeprefix(".")
            yield from _scalars(key, inside, seen)
            yield from _scalars(value, inside, seen)


def _number_fault(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Why a number is refused that is not written in decimal digits; empty if it is none."""
    decimal = _NUMBERS.get(node.tag)
    text: str = node.value
    if decimal is None or decimal.fullmatch(text):
        return ""
    digits = text.lstrip("+-").lower()
    if digits in (".inf", ".nan"):
        return f'{text} is no number of anything here; text is written in quotes: "{text}"'
    try:
        number = loader.construct_yaml_int(node) if decimal is _INT else loader.construct_yaml_float(node)
    except ValueError:
        return ""  # reported when it is constructed
    if ":" in digits:
        kind, also = "a number to base 60", ", a time with its unit (90s, 10m, 2h)"
    elif digits.startswith(("0x", "0b")):
        kind, also = f"a {'hexadecimal' if digits[1] == 'x' else 'binary'} number", ""
    elif digits.startswith("0") and not digits.strip("01234567_"):
        meant = digits.replace("_", "").lstrip("0")
        kind, also = "an octal number", f" or {meant}" if meant and int(meant) != abs(number) else ""
    else:
        kind, also = "a number with underscores", ""
    return f'{text} is {kind} in YAML, {number}: write {number}{also}, or "{text}" if text is meant'
