"""`Training`: what a job's entrypoint returns, ordinary PyTorch objects written as for one GPU."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import UserCodeError
from .libraries import turn_off_caches
from .seeds import preserved_randomness, seed64, seed_everything
from .torch_private.compiled import uncompiled
from .tracebacks import is_users, users_part

Loss = Tensor | tuple[Tensor, Tensor]
P = ParamSpec("P")
R = TypeVar("R")


class Dataset(Protocol):
    """Samples by index: `len()` and `[i]` -> dict of tensors (numbers and arrays are converted)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training run: model, loss, optimizer, dataset and options. Raises `TypeError` naming a wrong
    field."""

    model: Callable[[], nn.Module]
    """Builds the model; runs under fake tensors, and weights are then made section by section."""
    loss: Callable[[Any, dict[str, Tensor]], Loss]
    """`loss(output, batch)`: a mean, or `(sum, weight)` for masked and unequal micro-batches."""
    optimizer: Callable[[Sequence[tuple[str, nn.Parameter]]], Optimizer]
    """Called once per section with its (name, parameter) pairs, as `torch.optim` accepts them."""
    dataset: Callable[[], Dataset]
    """Opens the data: `len()` and `[i]` -> dict of tensors, all samples of one shape."""
    schedule: Callable[[int], float | Sequence[float]] | None = None
    """Maps a step to a factor on the initial learning rates, or a list with one per parameter group, in their
    order; a pure function of the step."""
    clip_grad_norm: float | None = None
    """Largest 2-norm of the whole gradient, as `torch.nn.utils.clip_grad_norm_`; None: no clipping."""
    forward_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Constants for every call of the model's forward, besides the entries of a sample (no tensors)."""
    average_buffers: Sequence[str] = ()
    """Names (`fnmatch` patterns) of buffers that forward changes and whose value after a step is the mean
    over its micro-batches. Batch norm's statistics need no declaration."""
    cuts: Sequence[str] | None = None
    """Names of modules, as in `named_modules()`, before whose first operation a section begins; None: cuts
    are found automatically."""

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer", "dataset"):
            given = getattr(self, name)
            if isinstance(given, nn.Module) and name == "model":
                raise TypeError(
                    f"Training.model: expected a function, got the module {_kind(given)}; write model=lambda:"
                    f" {_kind(given)}(...), since each VM builds the model"
                )
            if not callable(given):
                raise TypeError(f"Training.{name}: expected a function, got {_kind(given)}")
        if self.schedule is not None and not callable(self.schedule):
            raise TypeError(
                f"Training.schedule: expected a function of the step or None, got {_kind(self.schedule)}"
            )
        _check_mapping("forward_kwargs", self.forward_kwargs)
        _check_names("average_buffers", self.average_buffers)
        if self.cuts is not None:
            _check_names("cuts", self.cuts)
        clip = cast(object, self.clip_grad_norm)
        if clip is None:
            return
        if isinstance(clip, bool) or not isinstance(clip, int | float):
            raise TypeError(f"Training.clip_grad_norm: expected a number or None, got {_kind(clip)}")
        if not clip > 0:
            raise TypeError(f"Training.clip_grad_norm: expected a positive number, got {clip}")


def load_entrypoint(folder: Path | str, entrypoint: str) -> Training:
    """Call `module:function` with `folder` first on the import path, and return its `Training`.

    Python's, NumPy's and torch's CPU generators get a fixed seed meanwhile: random numbers that the user's
    file draws before `Training.model` is called may flow into weights, which must be equal in every process.

    Raises `UserCodeError` if the form is wrong, the module or function is missing, the user's code raises, or
    the result is not a `Training`.
    """
    module_name, colon, function_name = entrypoint.partition(":")
    if not colon or not module_name or not function_name:
        raise UserCodeError(f"entrypoint {entrypoint!r}: expected module:function, for example train:build")
    path = str(Path(folder).resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
        importlib.invalidate_caches()
    with preserved_randomness():
        seed_everything(seed64("entrypoint"))
        training = _imported(module_name, function_name)
    if not isinstance(training, Training):
        raise UserCodeError(
            f"entrypoint {entrypoint!r}: expected a makara.worker.Training, got {_kind(training)}"
        )
    return training


def _imported(module_name: str, function_name: str) -> object:
    """What the user's function returns."""
    entrypoint = f"{module_name}:{function_name}"
    module = call_user_code(
        f"entrypoint {entrypoint!r}: importing {module_name!r}", importlib.import_module, module_name
    )
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserCodeError(f"entrypoint {entrypoint!r}: {module_name!r} has no function {function_name!r}")
    return call_user_code(f"entrypoint {entrypoint!r}", function)


def build_module(training: Training) -> object:
    """Call `Training.model`, and strip the wrapper of `torch.compile`: Makara runs the model's own forward,
    in sections. Caches that transformers' models keep for generation are turned off."""
    model = uncompiled(training.model())
    if isinstance(model, nn.Module):
        turn_off_caches(model)
    return model


def set_training_mode(model: nn.Module) -> tuple[str, ...]:
    """Set training mode, except in modules that the user's code put in evaluation mode, such as frozen batch
    norms. Returns the names of the outermost of these.

    A model that is itself in evaluation mode is set to training mode as a whole, because `from_pretrained` of
    transformers returns every model in evaluation mode.
    """
    kept = [part for part in model.modules() if not part.training] if model.training else []
    model.train()
    for part in kept:
        part.training = False
    names = {name for name, part in model.named_modules() if not part.training}
    return tuple(
        name for name, _ in model.named_modules() if name in names and name.rpartition(".")[0] not in names
    )


def call_user_code(what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function(*args, **kwargs)`; an exception becomes a `UserCodeError` that begins with `what`."""
    try:
        return function(*args, **kwargs)
    except UserCodeError:
        raise  # it names its place
    except Exception as error:
        raise user_error(what, error) from error


def user_error(what: str, error: Exception) -> UserCodeError:
    """A `UserCodeError` from what the user's code raised, with its lines, and `what` before the message."""
    return UserCodeError(f"{what}: {type(error).__name__}: {error}{next_step(error)}", users_part(error))


def next_step(error: Exception) -> str:
    """What to do about a common error of a user's code; else nothing."""
    if any(sign in str(error) for sign in ("not compiled with CUDA", "not linked with support for cuda")):
        return ". Leave devices out of your code: Makara places the model and its batches"
    if isinstance(error, ModuleNotFoundError):
        return ". Install it here, and on VMs by `setup` in the job file (docs/job-file.md, Code)"
    return ""


def raised_by_user(error: Exception) -> bool:
    """Whether an error from a section's graph was raised by an operation of the user, wherever installed.

    Below our frames only torch and code that the model calls run there. An operation in C++ leaves no frame,
    so an error that torch itself raises is not attributed to the user; nor is running out of memory.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return any(is_users(Path(frame.filename)) for frame in traceback.extract_tb(error.__traceback__))


AS_A_WEIGHT = (
    "its second value is taken for a weight: a step's loss is the sum of the first values divided by the sum "
    "of the second. Return the loss alone, or (sum, number of what was summed), without metrics"
)


def sum_and_weight(loss: Any) -> tuple[Any, Any]:
    """The (sum, weight) that a user's loss returned: a loss without a weight is a mean and counts as 1."""
    if not isinstance(loss, tuple):
        return loss, 1.0
    values = cast(tuple[Any, ...], loss)
    if len(values) != 2:
        raise UserCodeError(
            f"Training.loss: it returns {len(values)} values; expected a scalar tensor (a mean) or (sum, "
            "weight). Return the loss alone, without logits or metrics"
        )
    total, weight = values
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise UserCodeError(f"Training.loss: a tensor of {list(weight.shape)}, {AS_A_WEIGHT}")
    elif not isinstance(weight, int | float | np.generic):
        raise UserCodeError(f"Training.loss: a {_kind(weight)}, {AS_A_WEIGHT}")
    return total, weight


def refuse_metric(weight: Any) -> None:
    """Raise `UserCodeError` where a gradient would flow through a weight, as it does from a metric."""
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise UserCodeError(f"Training.loss: computed from the model's output, {AS_A_WEIGHT}")


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"Training.{name}: expected a dict of arguments, got {_kind(value)}")
    for key, argument in cast(Mapping[object, object], value).items():
        if not isinstance(key, str):
            raise TypeError(f"Training.{name}: expected names of arguments, got {key!r}")
        if isinstance(argument, Tensor):
            raise TypeError(
                f"Training.{name}: {key!r} is a tensor; "
                "make it a buffer of the model or an entry of the samples"
            )


def _check_names(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"Training.{name}: expected a list of names, got {_kind(value)}")
    for item in cast(Sequence[object], value):
        if not isinstance(item, str):
            raise TypeError(f"Training.{name}: expected names, got {_kind(item)}")


def _kind(value: object) -> str:
    return type(value).__name__
