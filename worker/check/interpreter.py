"""Runs a traced graph operation by operation, as the sections run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ...model.precision import Precision
from ...model.tracing.regions import autocast_of
from ...model.tracing.trace import TracedModel


class GraphInterpreter(fx.Interpreter):
    """Calls `seen(node, value)` after each operation."""

    def __init__(self, traced: TracedModel, seen: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(traced.owner, graph=traced.graph)
        self._precision: Precision = traced.precision
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        with autocast_of(n, self._precision):
            value = super().run_node(n)
        self._seen(n, value)
        return value
