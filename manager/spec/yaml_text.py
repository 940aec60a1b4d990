"""Parses YAML; errors name the line."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from .spec_errors import WHOLE, JobSpecError


def read_yaml(text: str) -> Any:
    """Parse the one document in `text`. Raises `JobSpecError` naming the line."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        fault = f"not YAML: the character U+{int(error.character):04X} may not be in it"
        raise JobSpecError([(WHOLE, fault)], [line]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        fault = f"not YAML: {error.problem}" + (f" {error.context}" if error.context else "")
        raise JobSpecError([(WHOLE, fault)], [None if mark is None else mark.line + 1]) from error
    except RecursionError as error:
        raise JobSpecError([(WHOLE, "not YAML: nested too deeply")]) from error


class _Loader(yaml.SafeLoader):
    """A loader that also reports, with a line, values that Python or JSON cannot hold (a 99th month, half a
    character, a list that contains itself)."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._around: list[str | None] = []  # anchors of the enclosing nodes

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        anchor: str | None = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent) and anchor in self._around:
            problem = f"*{anchor} stands inside of what it stands for"
            raise ComposerError(None, None, problem, event.start_mark)
        self._around.append(anchor)
        try:
            return super().compose_node(parent, index)
        finally:
            self._around.pop()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error
