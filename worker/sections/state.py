"""A section's state as named tensors and scalars: what a checkpoint has, and what a peer gets.

weights/<name>              each parameter
buffers/<name>              each persistent buffer
statistics/<name>           each other buffer that changes in training
optimizer/<name>/<key>      the optimizer's state of a parameter: a tensor, or else a scalar
groups/<section>/<n>/<key>  settings that the optimizer changed in its nth parameter group (self: in itself)
scales/<name>               `numerics: exact`: float64, the scale of the next step
job/loss_scale              fp16: the loss scale of the next step, equal in every section
job/good_steps              fp16: the number of consecutive steps without overflow

The step, the data's position and the recipe of a checkpoint are in its manifest (`checkpoint/manifest.py`).
Of a step that was cut off, peers also get sums of gradients (`worker/recovery/kept_step.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...model.errors import RecipeMismatch, UserCodeError
from .loss_scale import LossScale

Scalar = int | float | bool | str | None

_PLAIN = (int, float, bool, str, type(None))
_LOSS_SCALE = "job/loss_scale"
_GOOD_STEPS = "job/good_steps"


def section_state(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    scales: Mapping[str, float],
    loss_scale: LossScale | None,
) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """(tensors, scalars). The tensors are live: copy them before the next step changes them.

    `buffers` have the names of the state. Raises `UserCodeError` if the optimizer keeps state that is neither
    tensor nor scalar.
    """
    tensors: dict[str, Tensor] = {f"weights/{name}": value.detach() for name, value in parameters.items()}
    tensors |= buffers
    scalars: dict[str, Scalar] = {}
    for name, parameter in parameters.items():
        state: dict[str, Any] = dict(optimizer.state.get(parameter, {})) if optimizer is not None else {}
        for key, value in state.items():
            full = f"optimizer/{name}/{key}"
            if isinstance(value, Tensor):
                tensors[full] = value.detach()
            elif value is None or isinstance(value, int | float | bool | str):
                scalars[full] = plain(value)
            else:
                raise UserCodeError(
                    f"Training.optimizer: its state {key!r} of {name!r} is a {type(value).__name__}; "
                    "only tensors and numbers can be saved"
                )
    tensors |= {f"scales/{name}": torch.tensor(scale, dtype=torch.float64) for name, scale in scales.items()}
    if loss_scale is not None:
        scalars |= {_LOSS_SCALE: loss_scale.scale, _GOOD_STEPS: loss_scale.good_steps}
    return tensors, scalars


def plain(value: Scalar) -> Scalar:
    """The value as a transfer in JSON gives it: numpy's float64 is a float then, and a member of an IntEnum
    an int."""
    return value if type(value) in _PLAIN else cast(Scalar, json.loads(json.dumps(value)))


def is_reproducible(entry: str) -> bool:
    """Whether an entry has the same bits on all hosts of its section. Attributes of an optimizer may not: it
    may note there how long a step took. An attribute that its update reads shows in the weights."""
    kind, _, rest = entry.partition("/")
    return kind != "groups" or rest.split("/")[1] != "self"


def entry_owner(entry: str) -> str:
    """The parameter or buffer of an entry: `optimizer/block.0.weight/exp_avg` -> `block.0.weight`; empty for
    entries of the whole job, `group_owner` of the section for its optimizer's groups."""
    kind, _, rest = entry.partition("/")
    if kind == "job":
        return ""
    if kind == "groups":
        return group_owner(int(rest.partition("/")[0]))
    return rest.rpartition("/")[0] if kind == "optimizer" else rest


def group_owner(section: int) -> str:
    """`entry_owner` of the settings of a section's parameter groups."""
    return f"groups/{section}"


def load_section_state(
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    loss_scale: LossScale | None,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Scalar],
) -> tuple[dict[str, float], LossScale | None]:
    """Load a state into parameters, buffers and optimizer; returns the scales and the loss scale.

    `loss_scale` None: the state must have none. Raises `RecipeMismatch` if a tensor is missing, has another
    shape or type, or belongs to nothing here.
    """
    targets: dict[str, Tensor] = {f"weights/{name}": value for name, value in parameters.items()}
    targets |= buffers
    known = (*(f"optimizer/{name}/" for name in parameters), *(f"scales/{name}" for name in parameters))
    job = () if loss_scale is None else (_LOSS_SCALE, _GOOD_STEPS)
    for name in [*tensors, *scalars]:
        if name not in targets and name not in job and not name.startswith(known):
            raise RecipeMismatch(f"state {name!r}: this section has no such tensor")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(_fitting(name, target, tensors))
    for name, parameter in parameters.items():
        prefix = f"optimizer/{name}/"
        saved: dict[str, Any] = {
            key.removeprefix(prefix): _placed(optimizer, parameter, key.removeprefix(prefix), value)
            for key, value in {**tensors, **scalars}.items()
            if key.startswith(prefix)
        }
        if optimizer is not None:
            optimizer.state.pop(parameter, None)
            if saved:
                optimizer.state[parameter] = saved
    scales = {
        n.removeprefix("scales/"): float(value) for n, value in tensors.items() if n.startswith("scales/")
    }
    return scales, None if loss_scale is None else _loss_scale(scalars)


def _loss_scale(scalars: Mapping[str, Scalar]) -> LossScale:
    scale, good_steps = scalars.get(_LOSS_SCALE), scalars.get(_GOOD_STEPS)
    if not isinstance(scale, int | float) or not isinstance(good_steps, int):
        raise RecipeMismatch(f"state {_LOSS_SCALE!r}: {scale!r} and {good_steps!r}; fp16 needs both numbers")
    return LossScale(float(scale), good_steps)


def _fitting(name: str, target: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if name not in tensors:
        raise RecipeMismatch(f"state {name!r}: missing")
    value = tensors[name]
    if value.shape != target.shape or value.dtype != target.dtype:
        raise RecipeMismatch(
            f"state {name!r}: {value.dtype}{list(value.shape)} does not fit "
            f"{target.dtype}{list(target.shape)}"
        )
    return value


def _placed(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter, key: str, value: Any) -> Any:
    """A copy on the device where `Optimizer.load_state_dict` would put it: step counters stay on the CPU."""
    if not isinstance(value, Tensor):
        return value
    groups = optimizer.param_groups if optimizer is not None else []
    on_device = any(group.get("capturable") or group.get("fused") for group in groups)
    if key == "step" and not on_device:
        return value.detach().cpu().clone()
    return value.detach().to(parameter.device, copy=True)
