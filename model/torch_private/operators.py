"""ATen's operators as a graph names them, and their schemas (`torch._ops`).

Which arguments an operator writes is in its schema alone. Checked with torch 2.13.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

__all__ = ["OpOverload", "defaults_of", "is_mutable", "name_of", "overload_of", "written_arguments"]


def name_of(target: Any) -> str:
    """`aten::add_` of aten.add_.Tensor; empty for what is no operator."""
    return getattr(getattr(target, "_schema", None), "name", "")


def overload_of(target: Any) -> str:
    """`Tensor` of aten.add_.Tensor."""
    return target._overloadname


def defaults_of(target: OpOverload) -> dict[str, Any]:
    """Name -> default of the operator's arguments, in order; None where there is none."""
    return {argument.name: argument.default_value for argument in target._schema.arguments}  # pyright: ignore[reportPrivateUsage]


def is_mutable(target: Any) -> bool:
    """Whether `target` is an operator that writes one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """(position, name) of the arguments that `target` writes; none for what is no operator."""
    if not is_mutable(target):
        return []
    return [
        (position, argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
