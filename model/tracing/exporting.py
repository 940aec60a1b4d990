"""Runs torch.export so that the graph is faithful to a training forward.

By itself it silently drops the backward of custom functions and hooks, loses `no_grad` inside `autocast`,
turns off an autocast for an absent device, and bakes in random numbers of Python and state kept between
calls. What a graph cannot hold is refused, with the user's line.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from ..errors import TooFewSamples, UntraceableModel
from ..patching import replaced
from ..torch_private.exporting import (
    AUTOCAST_PASS,
    EXPORTER,
    FRAME_FILTER,
    GRAD_MODE_PASS,
    SNAPSHOT,
    TENSOR_CHECK,
    VALUE_CHECKS,
)
from ..torch_private.fake_tensors import FakeTensor, FakeTensorMode, in_active_mode
from ..torch_private.storages import storage_key
from ..tracebacks import first_line, users_part
from .attributes import Attributes, watched
from .graph_text import graph_lines
from .guards import guards, python_randomness
from .outputs import checked_outputs
from .source import is_library, user_call

Program = torch.export.ExportedProgram

TRANSFORM = (
    "transforms of torch.func (vmap, grad, jvp) and associative_scan, built on them, are not traced: "
    "write their result out, with operations that take a further dimension (broadcasting, einsum, cumsum) or "
    "a loop"
)
_HINTS = (
    (
        ("data-dependent", "DataDependent"),
        "control flow on a tensor's values has no single graph: use torch.where or a mask",
    ),
    (("functorch", "BatchedTensor"), TRANSFORM),
    (
        ("Device Propagation", "compiled with CUDA", "linked with support for"),
        "forward names a device: take that of an input (x.device), as sections run where Makara puts them",
    ),
    (
        ("but got FakeTensor",),
        "a size follows from the values of a tensor, as those of a packed sequence do from its lengths: keep "
        "the padded shape, and mask outputs or select them by the lengths (torch.gather)",
    ),
    ((".numpy()",), "NumPy sees no values while the model is traced: use tensor operations"),
)

_ONE_VALUE = "Expected more than 1 value per channel when training"  # by torch.nn.functional.batch_norm
_TOO_FEW = (
    "batch norm cannot be trained on a micro-batch with one value per channel. Set "
    "training.global_batch_size and parallelism.microbatch_size to 2 or more (makara check: "
    "--microbatch-size 2), or use another norm (GroupNorm, LayerNorm)"
)


def export(model: nn.Module, arguments: Mapping[str, Any], fake_mode: FakeTensorMode) -> Program:
    """Export `model`'s forward; `no_grad` and `autocast` regions are marked in its graph.

    `fake_mode`: of the model's fake tensors. Raises `UntraceableModel` naming the operation, the user's line
    and what to change.
    """
    generators = _python_generators()
    with watched(model) as attributes:
        try:
            program = _export(model, arguments)
        except UntraceableModel as error:
            _refuse_written(attributes, error)
            raise
    if _python_generators() != generators:
        _refuse_python_randomness(model, arguments)
    if attributes.changed:
        _refuse_state(model, arguments, fake_mode, program, attributes)
    return program


def _export(model: nn.Module, arguments: Mapping[str, Any]) -> Program:
    try:
        with ExitStack() as stack:
            for change in (*_changes(), _quiet(), guards(), checked_outputs(model)):
                stack.enter_context(change)
            return torch.export.export(model, (), dict(arguments), strict=False)
    except UntraceableModel:
        raise
    except Exception as error:
        if _ONE_VALUE in str(error):
            raise TooFewSamples(_TOO_FEW, user_call(error), users_part(error)) from error
        raise UntraceableModel(_explain(error), user_call(error), users_part(error)) from error


def _explain(error: Exception) -> str:
    said = f"{type(error).__name__}: {first_line(error)}"
    for words, hint in _HINTS:
        if any(word in f"{type(error).__name__} {error}" for word in words):
            return f"the model cannot be traced: {hint}{_of_library(error)} ({said})"
    return f"the model cannot be traced: {said}"


def _of_library(error: Exception) -> str:
    if "site-packages" not in (user_call(error) or ""):
        return ""
    return (
        "; in a library, perhaps a setting avoids the line (no layer drop, another loss), or leaving out the "
        "entry of the samples that it is about (labels, with the loss in Training.loss)"
    )


def _python_generators() -> str:
    return repr((random.getstate(), np.random.get_state()))


def _refuse_python_randomness(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    with watched(model), python_randomness() as drawn:
        _export(model, arguments)
    raise UntraceableModel(
        "forward draws a random number from Python or NumPy, which would be the same in every step. "
        "Draw it with torch, as a tensor (torch.rand(()))",
        next(iter(drawn), None),
    )


def _refuse_written(attributes: Attributes, error: UntraceableModel) -> None:
    if names := attributes.written():
        raise UntraceableModel(
            f"forward changes {_listed(names)} in place, a tensor that is neither parameter nor buffer. "
            "Register it as a buffer (register_buffer)",
            attributes.line() or error.call,
        ) from error


def _refuse_state(
    model: nn.Module,
    arguments: Mapping[str, Any],
    fake_mode: FakeTensorMode,
    first: Program,
    attributes: Attributes,
) -> None:
    """Trace a second call, which begins with the attributes that the first one left; refuse if it differs."""
    problem = UntraceableModel(
        f"forward keeps state from call to call in {_listed(attributes.names())}, so a micro-batch would "
        "depend on the ones before. Compute from arguments alone, or make it a buffer (register_buffer) and "
        "declare how its changes combine (Training.average_buffers)",
        attributes.line(),
    )
    kept = attributes.keep(model, fake_mode)
    try:
        with watched(model):
            second = _export(model, arguments)
    except UntraceableModel as error:
        raise problem from error
    finally:
        attributes.restore(model)
    if _text(first) != _text(second) or _reads(second, kept):
        raise problem


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _text(program: Program) -> list[str]:
    known = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    return [str(program.call_spec.out_spec), *graph_lines(program.graph, program.graph_module, known)]


def _reads(program: Program, tensors: list[torch.Tensor]) -> bool:
    """Whether the graph uses one of `tensors` (as a constant)."""
    kept = {storage_key(tensor) for tensor in tensors}
    used = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    return any(
        isinstance(value := program.constants.get(spec.target or ""), torch.Tensor)
        and storage_key(value) in kept
        for spec in program.graph_signature.input_specs
        if spec.arg.name in used
    )


def _changes() -> list[AbstractContextManager[None]]:
    """The changes to torch while a forward is exported."""
    init: Callable[..., None] = torch.autocast.__init__
    snapshot: Callable[..., Any] = getattr(*SNAPSHOT)

    def init_for_cpu(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, **rest: Any
    ) -> None:
        init(self, "cpu", torch.get_autocast_dtype(device_type) if dtype is None else dtype, **rest)

    def snapshot_of_trace(value: Any, *rest: Any, **named: Any) -> Any:
        """A conversion that changes nothing, such as `constant.to(x.device)`, gives the constant itself,
        which is of the mode in which the model was built."""
        return snapshot(in_active_mode(value) if isinstance(value, FakeTensor) else value, *rest, **named)

    return [
        # These passes turn regions into higher-order ones, and lose some (see `regions`).
        replaced(*GRAD_MODE_PASS, _unchanged),
        replaced(*AUTOCAST_PASS, _unchanged),
        # Regions of any device are traced as regions of the CPU; when run, they apply to the real device.
        replaced(torch.autocast, "__init__", init_for_cpu),
        # torch.distributions would read the values of their arguments to validate them.
        replaced(*VALUE_CHECKS, False),
        # So would a model that checks its arguments (transformers' with pictures): sections do not check.
        replaced(*TENSOR_CHECK, _unchecked),
        replaced(*FRAME_FILTER, _users_frames),
        replaced(*SNAPSHOT, snapshot_of_trace),
    ]


def _unchecked(*_: object) -> None: ...


def _unchanged(program: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
    return program, signature


def _users_frames(_: fx.Tracer, frames: traceback.StackSummary) -> traceback.StackSummary:
    """The lines of all the user's functions; torch records only functions named `forward`."""
    first = next((n for n, frame in enumerate(frames) if frame.name == "forward"), len(frames))
    return traceback.StackSummary.from_list(
        [frame for frame in frames[first:] if frame.name == "forward" or not is_library(frame.filename)]
    )


@contextmanager
def _quiet() -> Generator[None]:
    """Keep torch from printing the partial graph when it fails, which does not help a user."""

    def say_nothing(*_: object, **__: object) -> None: ...

    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    setattr(EXPORTER, "print", say_nothing)  # noqa: B010
    try:
        yield
    finally:
        delattr(EXPORTER, "print")
        log.setLevel(level)
