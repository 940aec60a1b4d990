"""Splits a traced model into a chain of sections 0..K-1 (Varuna's cut-points, found automatically).

A position of the graph is a good place for a cut if few bytes cross it: between two blocks of a transformer,
only the residual stream. Cuts are chosen among such places so that sections do nearly equal work. They are
found once per job and never change.

A section's inputs are its parameters, buffers, entries of the batch and values from earlier sections; its
outputs are the values that later sections use. A value that a section does not use is relayed past it, not
through it. Values that are cheap to derive from the batch do not cross: each section computes its own (see
`rematerialized`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from ..precision import dtype_name
from ..tracing.flow import gradient_flow
from ..tracing.layouts import memory_order
from ..tracing.nodes import value_of
from ..tracing.norms import settle_batch_norms, settle_group_norms
from ..tracing.regions import enter_regions
from ..tracing.trace import TracedModel
from .blocks import section_labels
from .cuts import choose_cuts as choose_cuts
from .cuts import most_sections as most_sections
from .cuts import sections_for_workers as sections_for_workers
from .flops import compute_nodes
from .partitioned_model import CutTensor as CutTensor
from .partitioned_model import Section as Section
from .partitioned_model import Sections as Sections
from .places import crossing_bytes, own_nodes, spans
from .rematerialized import find_derived


def split(traced: TracedModel, cuts: Sequence[int]) -> Sections:
    """Split into the sections between `cuts`. Raises `ValueError` if a cut is not possible in this graph."""
    nodes = compute_nodes(traced.graph)
    derived = find_derived(traced)
    crossing = crossing_bytes(nodes, derived)
    if list(cuts) != sorted(set(cuts)) or any(
        not 0 < cut < len(nodes) or crossing[cut] is None for cut in cuts
    ):
        raise ValueError(f"cuts: {list(cuts)} are not ascending places of this model's graph")
    return _Splitter(traced, nodes, derived, tuple(cuts)).sections()


class _Splitter:
    def __init__(
        self, traced: TracedModel, nodes: list[fx.Node], derived: frozenset[fx.Node], cuts: tuple[int, ...]
    ) -> None:
        self._traced = traced
        self._nodes = nodes
        self._derived = derived
        self._cuts = cuts
        self._spans = spans(cuts, len(nodes))
        self._section_of = {
            node: index
            for index, (start, stop) in enumerate(self._spans)
            for node in nodes[start:stop]
            if node not in derived
        }
        self._labels = section_labels(own_nodes(nodes, derived), self._spans)
        self._number = {node: number for number, node in enumerate(nodes)}
        self._output = traced.graph.output_node()
        trained = [place for place, name in traced.parameters.items() if name in traced.trainable]
        self._needs_grad = gradient_flow(traced.graph, trained)

    def sections(self) -> Sections:
        traced = self._traced
        built = [self._section(index) for index in range(len(self._spans))]
        infos = tuple(info for info, _ in built)
        used = {
            name: tuple(s.index for s in infos if name in s.parameters) for name in traced.parameter_names
        }
        return Sections(
            sections=infos,
            crossing=self._crossing(),
            shared={name: places for name, places in used.items() if len(places) > 1},
            parameter_names=traced.parameter_names,
            trainable_names=tuple(name for name in traced.parameter_names if name in traced.trainable),
            persistent_buffers=traced.persistent_buffers,
            aliases=dict(traced.aliases),
            cuts=self._cuts,
            modules=tuple(module for _, module in built),
            traced=traced,
        )

    def _section(self, index: int) -> tuple[Section, fx.GraphModule]:
        traced = self._traced
        last = index == len(self._spans) - 1
        own = [node for node in self._nodes[slice(*self._spans[index])] if node not in self._derived]
        ends = [self._output] if last else []
        made = self._with_derived([*own, *ends])
        used = _ordered_inputs([*made, *ends])
        unused = self._unused if index == 0 else frozenset[str]()
        lifted = (traced.parameters, traced.buffers, traced.constants)
        updates = {n: u.node for n, u in traced.updates.items() if self._section_of[u.node] == index}
        parameters, buffers, constants = (
            self._lifted(used, group, unused | updates.keys()) for group in lifted
        )
        batch = _by_placeholder(used, traced.inputs)
        earlier = [node for node in used if self._section_of.get(node, index) < index]
        values = {_name(self._number[node]): node for node in earlier}
        outputs = [node for node in own if not last and self._is_output(node, index)]
        info = Section(
            index=index,
            parameters=tuple(parameters),
            trainable=tuple(name for name in parameters if name in traced.trainable),
            buffers=tuple(buffers),
            constants=tuple(constants),
            batch=tuple(sorted(batch)),
            inputs=tuple(values),
            outputs=tuple(_name(self._number[node]) for node in outputs),
            updates=tuple(updates),
            label=self._labels[index],
        )
        sources = [*parameters.values(), *buffers.values(), *constants.values()]
        sources += [*(batch[name] for name in info.batch), *values.values()]
        results: Any = self._output.args[0] if last else outputs
        return info, _module(traced, sources, made, (*results, *updates.values()))

    def _with_derived(self, own: list[fx.Node]) -> list[fx.Node]:
        """`own` and all derived nodes that it needs, in the graph's order, without the output."""
        found, waiting = set(own), list(own)
        while waiting:
            for used in waiting.pop().all_input_nodes:
                if used in self._derived and used not in found:
                    found.add(used)
                    waiting.append(used)
        return sorted(found - {self._output}, key=self._number.__getitem__)

    def _lifted(
        self, used: list[fx.Node], group: Mapping[str, str], unused: frozenset[str]
    ) -> dict[str, fx.Node | None]:
        """{name: placeholder} of the tensors in `group` that these nodes use, in the model's order."""
        found: dict[str, fx.Node | None] = dict.fromkeys(name for name in group.values() if name in unused)
        found |= _by_placeholder(used, group)
        return {name: found[name] for name in self._traced.tensors if name in found}

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Parameters and persistent buffers that no section uses; section 0 keeps them, for the export."""
        traced = self._traced
        groups = {**traced.parameters, **traced.buffers}
        made = self._with_derived([*self._section_of, self._output])
        used = set(_by_placeholder(_ordered_inputs([*made, self._output]), groups))
        kept = frozenset(traced.parameter_names) | traced.persistent_buffers - set(traced.updates)
        return kept - used

    def _is_output(self, node: fx.Node, index: int) -> bool:
        return self._last_use(node) > index and isinstance(value_of(node), Tensor)

    def _last_use(self, node: fx.Node) -> int:
        last = len(self._spans) - 1
        return max((self._section_of.get(user, last) for user in node.users), default=-1)

    def _crossing(self) -> tuple[tuple[CutTensor, ...], ...]:
        """For each cut, the values that cross it, in the graph's order."""
        crossing: list[list[CutTensor]] = [[] for _ in self._cuts]
        for node, section in self._section_of.items():
            tensor = value_of(node)
            if not isinstance(tensor, Tensor):
                continue
            dtype = dtype_name(tensor.dtype)
            needs_grad = node in self._needs_grad
            value = CutTensor(
                _name(self._number[node]), tuple(tensor.shape), dtype, needs_grad, memory_order(tensor)
            )
            for cut in range(section, self._last_use(node)):
                crossing[cut].append(value)
        return tuple(map(tuple, crossing))


def _module(
    traced: TracedModel, sources: Sequence[fx.Node | None], own: list[fx.Node], results: Any
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, source in enumerate(sources):
        place = graph.placeholder(f"input_{number}")
        if source is not None:
            copies[source] = place
    for node in own:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and used not in copies:
                copies[used] = graph.node_copy(used)
        if node.op != "get_attr":
            copies[node] = graph.node_copy(node, lambda used: copies[used])
    graph.output(fx.map_arg(results, lambda used: copies[used]))
    enter_regions(graph)
    settle_batch_norms(graph)
    settle_group_norms(graph)
    return fx.GraphModule(traced.owner, graph)


def _ordered_inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for node in nodes:
        found.update(dict.fromkeys(node.all_input_nodes))
    return sorted(found)


def _by_placeholder(used: list[fx.Node], group: Mapping[str, str]) -> dict[str, fx.Node]:
    return {group[node.name]: node for node in used if node.op == "placeholder" and node.name in group}


def _name(number: int) -> str:
    return f"v{number}"
