"""ATen's operators as a graph names them, and their schemas (`torch._ops`).

Which arguments an operator writes, and whether it draws random numbers, is in its schema and tags alone.
Checked with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload


def name_of(target: Any) -> str:
    """`aten::add_` of aten.add_.Tensor; empty for what is no operator."""
    return getattr(getattr(target, "_schema", None), "name", "")


def overload_of(target: Any) -> str:
    """`Tensor` of aten.add_.Tensor."""
    return target._overloadname


def arguments_of(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included; None where there is neither."""
    names = {argument.name: argument.default_value for argument in target._schema.arguments}  # pyright: ignore[reportPrivateUsage]
    return {**names, **dict(zip(names, args, strict=False)), **kwargs}


def argument_types(target: OpOverload) -> list[str]:
    """`Tensor`, `number` and so on, of each argument."""
    return [str(argument.type) for argument in target._schema.arguments]  # pyright: ignore[reportPrivateUsage]


def is_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `target` draws random numbers.

    Attention and recurrent layers without dropout draw none, nor does what draws in training mode only.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    given = arguments_of(target, args, kwargs)
    drops = given.get("dropout_p") != 0.0 and given.get("dropout") != 0.0
    return drops and given.get("train") is not False and given.get("training") is not False


def is_mutable(target: Any) -> bool:
    """Whether `target` is an operator that writes one of its arguments."""
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def may_return_its_argument(target: Any) -> bool:
    """Whether the result of `target` may lie in the memory of its first argument, which it does not write."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.arguments or not schema.returns:
        return False
    given, result = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return given is not None and result is not None and not given.is_write


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """(position, name) of the arguments that `target` writes; none for what is no operator."""
    if not is_mutable(target):
        return []
    return [
        (position, argument.name)
        for position, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written_values(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The values that a call gives for the arguments that `target` writes."""
    return [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in written_arguments(target)
    ]
