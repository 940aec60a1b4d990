"""Handles tensors that forward uses and that are not parameters, buffers or entries of the batch.

Those made while the model was built (a plain attribute) and real ones (a module's global) stay constants.
torch.export also makes a constant of `parameter.data`; it becomes a detached parameter again. Others are
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..errors import UntraceableModel
from ..torch_private.fake_tensors import FakeTensor, FakeTensorMode
from ..torch_private.modules import OWN_FIELDS
from ..torch_private.storages import storage_key
from .nodes import insert_call, storage_of
from .source import stack_line

_aten = torch.ops.aten


def settle_constants(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    fake_mode: FakeTensorMode,
    constants: Mapping[str, str],
    lifted: Mapping[str, str],
) -> dict[str, str]:
    """Return the constants that stay, {placeholder: name}; rewrite the graph for those that are `.data` of
    parameters or buffers (`lifted`: {placeholder: name}). `fake_mode`: the mode in which the model was built.

    Raises `UntraceableModel` with the user's line for a parameter of an unregistered module, and for a tensor
    whose values are unknown.
    """
    graph = program.graph
    places = {node.name: node for node in graph.find_nodes(op="placeholder")}
    owners = {storage_of(node): node for name, node in places.items() if name in lifted}
    hidden = {storage_key(parameter): name for name, parameter in _unregistered(model)}
    kept: dict[str, str] = {}
    for place, name in constants.items():
        node, value = places[place], program.constants[name]
        if not node.users:
            continue
        line = next(filter(None, map(stack_line, node.users)), None)
        if not isinstance(value, FakeTensor):
            kept[place] = name
        elif storage_key(value) in hidden:
            raise UntraceableModel(
                f"forward uses the parameter {hidden[storage_key(value)]}, which is not registered in the "
                "model and would not be trained. Keep modules in nn.ModuleList or nn.ModuleDict, parameters "
                "in nn.ParameterList",
                line,
            )
        elif value.fake_mode is fake_mode:
            kept[place] = name
        else:
            _detach(graph, node, value, owners.get(storage_key(value)), line)
    return kept


def _detach(graph: fx.Graph, node: fx.Node, value: Tensor, owner: fx.Node | None, line: str | None) -> None:
    form = (value.shape, value.stride(), value.storage_offset())
    whole: Any = owner.meta["val"] if owner is not None else None
    if owner is None or form != (whole.shape, whole.stride(), whole.storage_offset()):
        raise UntraceableModel(
            "forward uses a tensor that was not made while the model was built; its values are unknown. Make "
            "it a buffer (register_buffer), and write x.detach() for x.data",
            line,
        )
    first = min(node.users)
    node.replace_all_uses_with(insert_call(first, _aten.detach.default, owner, origin=first))
    graph.erase_node(node)


def _unregistered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of modules in plain lists and dicts, which are not registered."""
    registered = {id(part) for part in (*model.modules(), *model.parameters())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in OWN_FIELDS:
                continue
            path = f"{name}.{attribute}" if name else attribute
            for key, item in _items(value):
                if id(item) in registered:
                    continue
                if isinstance(item, nn.Module):
                    yield from ((f"{path}[{key!r}].{inner}", p) for inner, p in item.named_parameters())
                elif isinstance(item, nn.Parameter):
                    yield f"{path}[{key!r}]", item


def _items(value: Any) -> list[tuple[Any, Any]]:
    if type(value) in (list, tuple):
        return list(enumerate(cast(list[Any], value)))
    return list(cast(dict[Any, Any], value).items()) if type(value) is dict else []
