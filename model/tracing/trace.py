"""Traces the user's model into one static graph of ATen operations, with parameters and buffers as inputs.

The model is built with fake tensors (no memory, see `initialise`) and exported in training mode for
micro-batches of m samples. Regions are flattened, in-place operations are rewritten as functional ones where
nothing else reads the change, and new values of buffers are returned. What a graph cannot hold is refused by
name, such as control flow on values, gradient hooks and state kept between calls (see docs/tracing.md).

Uses torch.export in non-strict mode: checked with torch 2.13.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind

from ..data import Batches, open_dataset
from ..errors import UntraceableModel, UserCodeError
from ..initialisation.initialise import Recording, record
from ..precision import Precision, autocast
from ..torch_private.fake_tensors import FakeTensor
from ..torch_private.pytree import TreeSpec
from ..training import Training, build_module, call_user_code, set_training_mode
from .calling import forward_call
from .constants import settle_constants
from .exporting import export
from .flow import gradient_flow, outputs_with_gradient, reached_parameters
from .functional import functionalise
from .graph_text import digest, form, graph_lines
from .layouts import keep_copies, refuse_strided_parts
from .recurrent import split_layers
from .refusals import SPARSE, refuse_operations
from .regions import flatten
from .scan import refuse_unheld
from .source import stack_line
from .updates import BufferUpdate, isolate, settle


@dataclass(frozen=True)
class TracedModel:
    """The forward pass of one micro-batch as a graph, and what its inputs are."""

    graph: fx.Graph
    owner: nn.Module
    """Holds the submodules that `get_attr` nodes name (bodies of no_grad regions)."""
    parameters: Mapping[str, str]
    """{placeholder: the parameter's canonical name (the first of its names in the model's order)}."""
    buffers: Mapping[str, str]
    constants: Mapping[str, str]
    inputs: Mapping[str, str]
    """{placeholder: entry of the batch}."""
    tensors: Mapping[str, Tensor]
    """{canonical name: fake parameter, buffer or constant}, parameters first, in the model's order."""
    parameter_names: tuple[str, ...]
    trainable: frozenset[str]
    persistent_buffers: frozenset[str]
    aliases: Mapping[str, str]
    """{further name of a tied parameter or buffer: its canonical name}."""
    out_spec: TreeSpec
    microbatch_size: int
    updates: Mapping[str, BufferUpdate]
    """Canonical name of a buffer that forward changes -> the node that gives its new value, and how the new
    values of a step's micro-batches combine."""
    recording: Recording = field(repr=False)
    precision: Precision = "fp32"
    """Values have the types that autocast gives them; sections run under it, too."""
    graph_hash: str = ""
    """SHA-256 of operations, arguments, shapes, types and names; equal in every process of one torch
    version."""
    evaluating: tuple[str, ...] = ()
    """The outermost modules that `Training.model` put in evaluation mode."""

    def initial(self, name: str) -> Tensor:
        """The initial value of a parameter, buffer or constant: a pure function of (seed, name). New CPU
        tensor."""
        return self.recording.tensor(self.tensors[name], name)


def load_exporter() -> None:
    """Import torch.export's dependencies, which it otherwise does at first use: a second, and 100 MB."""
    torch.export.export(nn.Identity(), (torch.zeros(1),), strict=False)


def trace(training: Training, m: int, seed: int = 0, precision: Precision = "fp32") -> TracedModel:
    """Trace `training.model` for micro-batches of `m` samples, computed in `precision`.

    Raises `UserCodeError` if the model or data raises or they do not fit together, `UntraceableModel` naming
    the call if the model cannot be one graph.
    """
    dataset = open_dataset(training, seed)
    batch = Batches(dataset, seed, m, m).micro_batch(0, 0)
    try:
        built, recording = call_user_code("Training.model", record, lambda: build_module(training), seed)
    except UserCodeError as error:
        if "Cannot access storage of Sparse" in error.message:
            raise UserCodeError(f"Training.model: it makes {SPARSE}", error.traceback) from error
        if "UninitializedParameter" not in error.message:
            raise
        raise UserCodeError(
            "Training.model: a lazy module has no shapes before its first call; give the sizes",
            error.traceback,
        ) from error
    model: object = built
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"Training.model: expected a torch.nn.Module, got {type(model).__name__}")
    _refuse_scripted(model)
    evaluating = set_training_mode(model)
    refuse_unheld(model)
    call = forward_call(model, batch, training.forward_kwargs)
    with recording.fake_mode:
        fakes = {name: torch.empty(batch[name].shape, dtype=batch[name].dtype) for name in call.inputs}
    with autocast("cpu", precision):  # so that fake tensors have the types that autocast gives
        program = export(model, call.arguments(fakes), recording.fake_mode)
        return _describe(program, model, recording, m, training, batch, precision, evaluating)


def _describe(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    recording: Recording,
    m: int,
    training: Training,
    batch: Mapping[str, Tensor],
    precision: Precision,
    evaluating: tuple[str, ...],
) -> TracedModel:
    names = _tied_names(model)
    groups = _placeholders(program, names)
    parameters, buffers = groups[InputKind.PARAMETER], groups[InputKind.BUFFER]
    inputs = groups[InputKind.USER_INPUT]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None, "an exported program says how its outputs nest"
    refuse_operations(program.graph_module)
    constants = settle_constants(
        program, model, recording.fake_mode, groups[InputKind.CONSTANT_TENSOR], {**parameters, **buffers}
    )
    wanted = {place for place, name in parameters.items() if model.get_parameter(name).requires_grad}
    flatten(program.graph, wanted)
    split_layers(program.graph, precision)
    refuse_strided_parts(program.graph, {**parameters, **buffers, **constants})
    changes = isolate(program.graph, buffers)
    successors = functionalise(program.graph, {**parameters, **buffers, **constants}, inputs)
    successors = {**keep_copies(program.graph), **successors}
    updates = settle(program.graph, changes, successors, inputs, training.average_buffers)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    held = program.constants
    tensors |= {name: value for name in constants.values() if isinstance(value := held[name], Tensor)}
    flowing = gradient_flow(program.graph, wanted)
    outputs = outputs_with_gradient(training.loss, program.graph, out_spec, batch, flowing)
    reached = reached_parameters(program.graph, flowing, outputs)
    traced = TracedModel(
        graph=program.graph,
        owner=program.graph_module,
        parameters=parameters,
        buffers=buffers,
        constants=constants,
        inputs=inputs,
        tensors=tensors,
        parameter_names=tuple(name for name, _ in model.named_parameters()),
        trainable=frozenset(parameters[place] for place in reached),
        persistent_buffers=frozenset(names[name] for name in model.state_dict() if name in names)
        & frozenset(name for name, _ in model.named_buffers()),
        aliases={name: first for name, first in names.items() if name != first},
        out_spec=out_spec,
        microbatch_size=m,
        updates=updates,
        recording=recording,
        precision=precision,
        evaluating=evaluating,
    )
    return replace(traced, graph_hash=hashlib.sha256(_canonical_text(traced).encode()).hexdigest())


def _tied_names(model: nn.Module) -> dict[str, str]:
    """{each name of a parameter or buffer: the first name of the same tensor}, in the model's order."""
    parameters = model.named_parameters(remove_duplicate=False)
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in (*parameters, *model.named_buffers(remove_duplicate=False))
    }


def _placeholders(
    program: torch.export.ExportedProgram, names: Mapping[str, str]
) -> dict[InputKind, dict[str, str]]:
    """{kind of input: {placeholder: canonical name}}."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    groups: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for node in program.graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        if isinstance(spec.arg, ConstantArgument):  # of `Training.forward_kwargs`: already in the graph
            continue
        target = spec.target if spec.target is not None else node.name
        groups[spec.kind][node.name] = names.get(target, target)
    for kind in (InputKind.PARAMETER, InputKind.BUFFER):
        _join_tied(program.graph, groups[kind])
    for kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
        for place in groups[kind]:
            _refuse_object(program, place, groups[kind][place])
    return groups


def _join_tied(graph: fx.Graph, names: dict[str, str]) -> None:
    """Merge the several placeholders that torch.export makes for a tied tensor."""
    first: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in names and first.setdefault(names[node.name], node) is not node:
            node.replace_all_uses_with(first[names.pop(node.name)])
            graph.erase_node(node)


def _refuse_object(program: torch.export.ExportedProgram, place: str, name: str) -> None:
    node = next(node for node in program.graph.nodes if node.name == place)
    line = next((stack_line(user) for user in node.users), None)
    kind = type(program.constants.get(name)).__name__
    if "Generator" in kind or any("generator" in user.kwargs for user in node.users):
        raise UntraceableModel(
            "forward draws from a torch.Generator of its own, whose state would be lost. Draw from the "
            "global one, which Makara seeds for each micro-batch and section",
            line,
        )
    raise UntraceableModel(f"forward uses {name}, a {kind}, which is no tensor. Use tensors", line)


def _refuse_scripted(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"its module {name!r} is" if name else "the model is"
            raise UserCodeError(
                f"Training.model: {which} scripted or traced by torch.jit, which torch.export does not read. "
                "Return it without torch.jit.script or torch.jit.trace"
            )


def _canonical_text(traced: TracedModel) -> str:
    lines = [
        f"m {traced.microbatch_size}",
        f"precision {traced.precision}",
        f"outputs {traced.out_spec}",
    ]
    for name in traced.parameter_names:
        tensor = traced.tensors[name]
        lines.append(f"parameter {name} {form(tensor)} {name in traced.trainable}")
    known = {**traced.parameters, **traced.buffers, **traced.constants, **traced.inputs}
    lines += graph_lines(traced.graph, traced.owner, known)
    numbers = {node: number for number, node in enumerate(traced.graph.nodes)}
    lines += [
        f"update {name} %{numbers[update.node]} {update.kind}" for name, update in traced.updates.items()
    ]
    for name in traced.constants.values():
        value = traced.tensors[name]
        if not isinstance(value, FakeTensor):
            lines.append(f"constant {name} {digest(value)}")
    return "\n".join(lines)
