"""Makes in-place operations of a traced graph functional, so that a value never changes after it was made.

A value that crosses a cut is a detached leaf in the next section, which must not be written. If other views
of the same memory are read afterwards, or torch has no gradient of the functional operation, the in-place
one stays, and the partition makes no cut inside its span (`written_spans`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UntraceableModel
from ..torch_private.operators import argument_types, name_of, overload_of, written_values
from .nodes import storage_of, value_of
from .source import stack_line

_aten = torch.ops.aten
# Operations that write running statistics though their schema does not say so: positions of (mean, variance,
# training) among their arguments.
_SILENT_WRITERS = {_aten.batch_norm.default: (3, 4, 5), _aten.instance_norm.default: (3, 4, 5)}
STATISTICS = frozenset(
    [*_SILENT_WRITERS, _aten.native_batch_norm.default, _aten._native_batch_norm_legit.default]
)
"""Operations that write only running statistics: means over samples, which can be averaged."""


def functionalise(
    graph: fx.Graph, lifted: Mapping[str, str], inputs: Mapping[str, str]
) -> dict[fx.Node, fx.Node]:
    """Rewrite `graph` in place. {placeholder: name}: `lifted` for parameters, buffers, constants; `inputs`
    for entries of the batch. Returns {node that was written: node that now has the value}.

    Raises `UntraceableModel` naming a parameter, constant or entry that the forward pass would change.
    """
    owners = _owners(graph, {**lifted, **inputs})
    successors: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for target in written(node):
            name = owners.get(storage_of(target))
            if name is not None:
                _refuse_write(node, name, name in inputs.values())
        replaced = _make_functional(graph, node)
        if replaced is not None:
            successors[replaced] = node
    graph.lint()
    return successors


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` writes in place."""
    silent = _SILENT_WRITERS.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if silent is not None:
        mean, variance, training = (node.args[place] for place in silent)
        return [value for value in (mean, variance) if training is True and isinstance(value, fx.Node)]
    values = written_values(node.target, node.args, node.kwargs)
    return [value for value in values if isinstance(value, fx.Node)]


def nodes_in_writing(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The `nodes` between the making of a value and its last write."""
    return {node for first, last in written_spans(nodes) for node in nodes[first : last + 1]}


def written_spans(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """(first, last) positions in `nodes` between which a value is made and last written: no cut inside."""
    first: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        storage = storage_of(node)
        if storage is not None:
            first.setdefault(storage, position)
        for target in written(node):
            key = storage_of(target)
            if key is not None and key in first:
                spans[key] = (first[key], position)
    return [*spans.values(), *_update_spans(nodes)]


def _update_spans(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """From a changing buffer's first use to its new value, so that one section holds it and updates it."""
    number = {node: position for position, node in enumerate(nodes)}
    spans: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        place: fx.Node | None = node.meta.get("new_value_of")
        if place is not None:
            uses = [number[user] for user in place.users if user in number]
            spans.append((min([position, *uses]), max([position, *uses])))
    return spans


def _make_functional(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Make `node` functional if possible; return the node whose later uses now read `node` instead."""
    name = name_of(node.target)
    targets = written(node)
    if len(targets) != 1 or not name.startswith("aten::") or not name.endswith("_") or name.endswith("__"):
        return None
    target = targets[0]
    packet: Any = getattr(_aten, name.removeprefix("aten::").removesuffix("_"), None)
    overload = _functional(packet, node.target)
    if overload is None or target is not node.args[0] or _seen_elsewhere(graph, node, target):
        return None
    if not _does_the_same(overload, node):
        return None
    node.target = overload
    for user in [user for user in target.users if user is not node and _after(user, node)]:
        user.replace_input_with(target, node)
    return target


def _functional(packet: Any, in_place: Any) -> Any:
    """The overload of `packet` that takes what `in_place` takes; None if there is none. Names do not tell:
    `pow_.Scalar` takes a tensor and a number, `pow.Scalar` a number and a tensor."""
    wanted = argument_types(in_place)
    names = [overload_of(in_place), *(packet.overloads() if packet is not None else ())]
    found = (getattr(packet, name, None) for name in names)
    return next((one for one in found if one is not None and argument_types(one) == wanted), None)


def _seen_elsewhere(graph: fx.Graph, node: fx.Node, target: fx.Node) -> bool:
    """Whether a view made before `node` of the memory that `node` writes is read after it."""
    storage = storage_of(target)
    return any(
        other is not target
        and _after(node, other)
        and storage_of(other) == storage
        and any(_after(user, node) for user in other.users)
        for other in graph.nodes
    )


def _does_the_same(overload: Any, node: fx.Node) -> bool:
    """Whether the functional operation's result has the type and shape that the in-place one keeps, and a
    gradient: that of some, such as `copy` and `zero`, is not implemented."""
    expected = value_of(node)
    fake_mode: Any = getattr(expected, "fake_mode", None)
    if fake_mode is None:
        return False
    with fake_mode, torch.enable_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), _leaf)
        result = overload(*args, **kwargs)
    if not isinstance(result, Tensor) or result.dtype != expected.dtype or result.shape != expected.shape:
        return False
    return result.grad_fn is None or not result.grad_fn.name().endswith("NotImplemented")


def _leaf(node: fx.Node) -> Any:
    """The fake value of `node`, which requires a gradient if it can."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _refuse_write(node: fx.Node, name: str, is_input: bool) -> None:
    if is_input:
        message = f"the forward pass changes its input {name!r} in place ({node.target}); change a copy"
    else:
        message = (
            f"the forward pass changes {name!r} in place ({node.target}); forward may not write parameters "
            "or constants. Compute a new value, change it in the optimizer, or keep a moving average of "
            "weights in buffers (register_buffer)"
        )
    raise UntraceableModel(message, stack_line(node))


def _owners(graph: fx.Graph, lifted: Mapping[str, str]) -> dict[int | None, str]:
    places = graph.find_nodes(op="placeholder")
    owners = {storage_of(node): lifted[node.name] for node in places if node.name in lifted}
    owners.pop(None, None)
    return owners


def _after(node: fx.Node, other: fx.Node) -> bool:
    return other < node
