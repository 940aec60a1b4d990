"""Operators that run functions which they are given: torch.cond, scan and map (`torch._higher_order_ops`).

A traced graph holds each function as a graph of its own. Checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from ..patching import replaced
from .dispatch import TorchDispatchMode
from .pytree import tree_leaves, tree_map

_MODULE = "torch._higher_order_ops."


def higher_order_name(target: Any) -> str | None:
    """`cond` of torch.cond, which runs graphs that it is given; None for any other operator."""
    return target.name() if isinstance(target, HigherOrderOperator) else None


class FunctionsSeen(TorchDispatchMode):
    """A mode that also sees the operations in functions which an operator is given. By itself torch shows it
    that operator alone."""

    supports_higher_order_operators = True

    def run(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `target`, from `__torch_dispatch__`."""
        if higher_order_name(target) is None:
            return target(*args, **kwargs)
        return target(*tree_map(self._over, list(args)), **kwargs)

    def _over(self, leaf: Any) -> Any:
        if not callable(leaf) or isinstance(leaf, Tensor):
            return leaf

        def function(*args: Any) -> Any:
            with self:
                return leaf(*args)

        return function


@contextmanager
def run_as_python() -> Generator[None]:
    """torch.cond, scan and map run as the Python code that their documentation compares them with.

    torch would compile the functions; in a dispatch mode it does not, and parameters in closures get no
    gradient.
    """
    replacements: list[tuple[str, str, Callable[..., Any]]] = [
        ("utils", "_hop_compile_and_call", _call),
        ("cond", "cond_op", _cond),
        ("scan", "scan_op", _scan),
        ("map", "map_impl", _map),
    ]
    with ExitStack() as stack:
        for module, name, function in replacements:
            stack.enter_context(replaced(import_module(_MODULE + module), name, function))
        yield


def _call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    return function(*args, **(kwargs or {}))


def _cond(
    chosen: Any, if_true: Callable[..., Any], if_false: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    return if_true(*operands) if chosen else if_false(*operands)


def _scan(
    turn: Callable[..., Any],
    init: Sequence[Tensor],
    rows: Sequence[Tensor],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    carried: Any = init
    found: list[Any] = []
    for number in range(len(rows[0])):
        given = (*tree_leaves(carried), *(row[number] for row in rows))
        carried, out = turn(*given, *additional_inputs)
        found.append(out)
    return carried, tree_map(_stack, *found)


def _map(function: Callable[..., Any], rows: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
    found = [function(*(row[number] for row in rows), *arguments) for number in range(len(rows[0]))]
    return tree_map(_stack, *found)


def _stack(*values: Any) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else values[0]
