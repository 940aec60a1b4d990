"""A section's optimizer: the user's own, created for the section's parameters only.

The user writes it for the whole model. So parameter groups that are empty in a section must work there, and
values that the optimizer keeps in its groups (not only in its state) must move with the section.

Changes `torch.optim.Optimizer.add_param_group` while the user's function runs: checked with torch 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...model.errors import RecipeMismatch, UserCodeError
from ...model.torch_private.pytree import tree_leaves
from ...model.training import Training, call_user_code
from .state import Scalar, plain

SAVED = (Tensor, int, float, bool, str)
"""The types of an optimizer's settings that are saved with its section."""

_TORCHS_OWN = {"params", "param_names", "param_groups", "state", "defaults"}


def make_optimizer(training: Training, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer | None:
    """Create the optimizer of these parameters; None if there are none. Raises `UserCodeError` if the user's
    function raises, returns something else, or adds other parameters."""
    if not named:
        return None
    with _empty_groups_allowed():
        made = cast(object, call_user_code("Training.optimizer", training.optimizer, list(named)))
    if not isinstance(made, Optimizer):
        raise UserCodeError(f"Training.optimizer: expected one torch Optimizer, got {_described(made)}")
    if _needs_closure(made):
        raise UserCodeError(
            f"Training.optimizer: the step of {type(made).__name__} calls a closure, to compute the loss "
            "several times in one step, and here a step computes it once. Use an optimizer whose step() "
            "needs no closure, such as AdamW"
        )
    own = {id(parameter) for _, parameter in named}
    if any(id(held) not in own for group in made.param_groups for held in group["params"]):
        raise UserCodeError(
            "Training.optimizer: the optimizer holds a parameter that the function was not given; "
            "make it of the (name, parameter) pairs that it is called with"
        )
    return made


def _needs_closure(made: Optimizer) -> bool:
    """As LBFGS does."""
    _, *parameters = inspect.signature(type(made).step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _described(made: object) -> str:
    kind = type(made).__name__
    if not isinstance(made, tuple | list | dict):
        return kind
    if any(isinstance(each, LRScheduler) for each in tree_leaves(made)):
        return (
            f"{kind} with a learning rate scheduler. Return the optimizer alone, and give the factor of each "
            "step as Training(schedule=lambda step: ...)"
        )
    return (
        f"{kind} of {len(cast(Sized, made))}. For parts that learn at other rates, give one optimizer "
        "parameter groups; networks that are trained in turns, by losses of their own (a GAN), are not "
        "supported"
    )


@contextmanager
def _empty_groups_allowed() -> Generator[None]:
    """Allow empty groups beside groups with names: torch treats an empty one as having no names, and refuses
    the mixture."""
    original = Optimizer.add_param_group

    def add(self: Optimizer, param_group: dict[str, Any]) -> None:
        params: Any = param_group["params"]
        if not isinstance(params, Tensor | set):
            params = param_group["params"] = list(params)
            has_names = any("param_names" in group for group in self.param_groups)
            named = isinstance(params[0], tuple) if params else has_names
            empty = [group for group in self.param_groups if not group["params"]]
            for group in [*empty, *([] if params else [param_group])]:
                if named:
                    group["param_names"] = []
                else:
                    group.pop("param_names", None)
        original(self, param_group)

    Optimizer.add_param_group = add
    try:
        yield
    finally:
        Optimizer.add_param_group = original


class OwnSettings:
    """Settings that an optimizer changed since it was created, in its parameter groups and attributes.

    They are entries of a section's state: `groups/<section>/<group>/<key>` and
    `groups/<section>/self/<attribute>`, without learning rates that the schedule sets.
    """

    def __init__(self, optimizer: Optimizer | None, section: int, *, scheduled: bool) -> None:
        self._optimizer = optimizer
        self._prefix = f"groups/{section}/"
        self._skipped = {*_TORCHS_OWN, *(["lr"] if scheduled else [])}
        self._places: dict[str, dict[str, Any]] = {}
        if optimizer is not None:
            self._places = {str(number): group for number, group in enumerate(optimizer.param_groups)}
            self._places["self"] = vars(optimizer)
        self._initial = {
            place: {key: _kept(value) for key, value in self._settings(place)} for place in self._places
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
        """(tensors, scalars). Raises `UserCodeError` if the optimizer keeps values that cannot be saved."""
        self._refuse_hidden_tensors()
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Scalar] = {}
        for place, initial in self._initial.items():
            for key, value in self._settings(place):
                if key in initial and _equal(value, initial[key]):
                    continue
                name = f"{self._prefix}{place}/{key}"
                if isinstance(value, Tensor):
                    tensors[name] = value.detach()
                else:
                    scalars[name] = plain(value)
        return tensors, scalars

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> set[str]:
        """Restore what `state` gave, and reset all other settings. Returns the names that it used. Raises
        `RecipeMismatch` if a group does not exist."""
        entries = {name: v for name, v in {**tensors, **scalars}.items() if name.startswith(self._prefix)}
        for place, initial in self._initial.items():
            for key in [key for key, _ in self._settings(place) if key not in initial]:
                del self._places[place][key]
            self._places[place].update({key: _kept(value) for key, value in initial.items()})
        for name, value in entries.items():
            place, _, key = name.removeprefix(self._prefix).partition("/")
            if place not in self._places:
                raise RecipeMismatch(f"state {name!r}: the optimizer has no such parameter group here")
            self._places[place][key] = _kept(value)
        return set(entries)

    def _settings(self, place: str) -> list[tuple[str, Any]]:
        """The settings that can be saved and restored: tensors, numbers, text."""
        return [
            (key, value)
            for key, value in self._places[place].items()
            if key not in self._skipped and isinstance(value, SAVED)
        ]

    def _refuse_hidden_tensors(self) -> None:
        """Raise `UserCodeError` for tensors in attributes, which would be lost with the worker."""
        if self._optimizer is None:
            return
        known = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        state: Mapping[Any, Any] = self._optimizer.state
        hidden = [str(key) for key in state if id(key) not in known]
        for key, value in vars(self._optimizer).items():
            if isinstance(value, Optimizer) and value.state and value.state is not self._optimizer.state:
                hidden.append(key)  # a wrapped optimizer
            if key not in _TORCHS_OWN and isinstance(value, dict | list | tuple | set):
                leaves: list[Any] = tree_leaves(cast(object, value))
                if any(isinstance(leaf, Tensor) and id(leaf) not in known for leaf in leaves):
                    hidden.append(key)
        if hidden:
            raise UserCodeError(
                f"Training.optimizer: it keeps tensors in {hidden[0]!r}, which belongs to no parameter; "
                "keep them in self.state[parameter], where they can be saved and moved with it"
            )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        return both and torch.equal(value.cpu(), other.cpu())
    value, other = plain(value), plain(other)
    return type(value) is type(other) and bool(value == other)
