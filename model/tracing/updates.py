"""Turns changes of buffers (running statistics, counters) into values that the forward pass returns.

Forward never writes state. Every write to a buffer goes to a private copy, made before the first use; the
copy's value at the end is the buffer's **new value**, computed from the value at the step's start. The step
combines the new values of its micro-batches: running statistics become their mean, in the order of the
micro-batches; a value that depends on no sample (a counter, an average of weights) advances once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import fx

from ..errors import UntraceableModel
from ..precision import dtype_name
from ..torch_private.operators import is_random
from .functional import STATISTICS, written
from .nodes import insert_call, storage_of
from .source import stack_line

_aten = torch.ops.aten

Kind = Literal["mean", "counter"]


@dataclass(frozen=True, slots=True)
class BufferUpdate:
    """A buffer's new value after one micro-batch."""

    node: fx.Node
    kind: Kind
    """mean: the step's new value is the mean over its micro-batches, in their order. counter: the new value
    depends on no sample, so it is the same after every micro-batch, and becomes the step's."""


@dataclass(slots=True)
class BufferChange:
    """A buffer that forward changes; `settle` makes an `BufferUpdate` of it."""

    place: fx.Node
    latest: fx.Node  # the node of the new value
    writers: list[fx.Node]
    """The operations that change it, as the user wrote them."""
    only_statistics: bool


def isolate(graph: fx.Graph, buffers: Mapping[str, str]) -> dict[str, BufferChange]:
    """Redirect writes to `buffers` ({placeholder: canonical name}) to private copies. Rewrites `graph`."""
    places: dict[int | None, list[fx.Node]] = {}
    for place in graph.find_nodes(op="placeholder"):
        if place.name in buffers:
            places.setdefault(storage_of(place), []).append(place)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written(node):
            found = places.get(storage_of(target), [])
            names = sorted({buffers[place.name] for place in found})
            if len(names) > 1:
                raise UntraceableModel(
                    f"forward changes the buffers {names}, which are tensors on one memory: keep one of them",
                    stack_line(node),
                )
            if found:
                writers.setdefault(found[0], []).append(node)
    return {buffers[place.name]: _isolate(graph, place, nodes) for place, nodes in writers.items()}


def _isolate(graph: fx.Graph, place: fx.Node, writers: list[fx.Node]) -> BufferChange:
    only_statistics = all(node.target in STATISTICS for node in writers)
    assigned = _assigned(place, writers[-1])
    if assigned is not None:  # torch.export writes `self.buffer = value` as a last copy_
        graph.erase_node(writers[-1])
        if assigned.op == "placeholder":
            assigned = _copy(assigned, graph.output_node())
    if not place.users:
        assert assigned is not None, "a buffer that is written has a writer"
        return BufferChange(place, assigned, [assigned], only_statistics)
    copy = _copy(place, min(place.users))
    # Views of the buffer become views of the copy: exchanged fake values give the copy the buffer's storage.
    copy.meta["val"], place.meta["val"] = place.meta["val"], copy.meta["val"]
    place.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    named = [assigned if node is writers[-1] and assigned is not None else node for node in writers]
    return BufferChange(place, assigned or copy, named, only_statistics)


def _assigned(place: fx.Node, node: fx.Node) -> fx.Node | None:
    """The value that `node` assigns to the whole buffer as its last change."""
    if node.target is not _aten.copy_.default or node.args[0] is not place or node.users:
        return None
    value = node.args[1]
    if not isinstance(value, fx.Node) or any(node < user for user in place.users):
        return None
    old, new = place.meta["val"], value.meta["val"]
    return value if old.shape == new.shape and old.dtype == new.dtype else None


def _copy(node: fx.Node, before: fx.Node) -> fx.Node:
    return insert_call(before, _aten.clone.default, node, origin=before)


def settle(
    graph: fx.Graph,
    changes: Mapping[str, BufferChange],
    successors: Mapping[fx.Node, fx.Node],
    samples: Collection[str],
    average: Sequence[str],
) -> dict[str, BufferUpdate]:
    """Make an `BufferUpdate` of each change, once the graph is functional (`successors`: the result of
    `functionalise`). `samples`: placeholders of the batch's entries; `average`: patterns of names.

    Marks the node of a new value (`meta["new_value_of"]`), so that no cut separates it from its buffer.
    Raises `UntraceableModel` naming the buffer and the user's line.
    """
    updates: dict[str, BufferUpdate] = {}
    writers = _writers(graph)
    for name, change in changes.items():
        node = change.latest
        while node in successors:
            node = successors[node]
        change.latest = node
        _refuse_complex(name, change)
        same = not _depends_on_micro_batch(node, samples, writers)
        updates[name] = BufferUpdate(node, "counter" if same else _kind(name, change, average))
        node.meta["new_value_of"] = change.place
        for copy in list(change.place.users):
            unwritten = copy is not node and storage_of(copy) not in writers
            if copy.target is _aten.clone.default and unwritten:
                copy.replace_all_uses_with(change.place)
                graph.erase_node(copy)
    return updates


def _refuse_complex(name: str, change: BufferChange) -> None:
    dtype: torch.dtype = change.place.meta["val"].dtype
    if dtype.is_complex:
        raise UntraceableModel(
            f"the forward pass changes {name!r}, whose type is {dtype_name(dtype)}: new values of complex "
            "numbers are not combined. Keep its real and imaginary parts in a buffer of floating point "
            "(torch.view_as_real, torch.view_as_complex)",
            _line(change),
        )


def _kind(name: str, change: BufferChange, average: Sequence[str]) -> Kind:
    dtype: torch.dtype = change.place.meta["val"].dtype
    declared = any(fnmatchcase(name, pattern) for pattern in average)
    if dtype.is_floating_point and (change.only_statistics or declared):
        return "mean"
    line = _line(change)
    if declared:
        raise UntraceableModel(
            f"Training.average_buffers names {name!r}, but its type is {dtype_name(dtype)}: only "
            "a floating-point buffer has a mean over micro-batches. Keep it in float32, or out of the model",
            line,
        )
    raise UntraceableModel(
        f"the forward pass changes {name!r} in place, and how the changes of several micro-batches combine "
        "is not known (running statistics of batch norm are, and what depends on no sample: counters, "
        "averages of weights). "
        + (
            f"If the mean of its new values is right, declare Training.average_buffers=[{name!r}]; otherwise "
            if dtype.is_floating_point
            else ""
        )
        + "compute it outside the model's forward",
        line,
    )


def _line(change: BufferChange) -> str | None:
    return next(filter(None, map(stack_line, reversed(change.writers))), None)


def _writers(graph: fx.Graph) -> dict[int | None, list[fx.Node]]:
    """{memory: the operations that write it in place}."""
    writers: dict[int | None, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written(node):
            writers.setdefault(storage_of(target), []).append(node)
    return writers


def _depends_on_micro_batch(
    node: fx.Node, samples: Collection[str], writers: Mapping[int | None, Sequence[fx.Node]]
) -> bool:
    """Whether `node` may depend on samples or random numbers."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if is_random(found.target, found.args, found.kwargs) or found.name in samples:
            return True
        waiting += [*found.all_input_nodes, *writers.get(storage_of(found), ())]
    return False
