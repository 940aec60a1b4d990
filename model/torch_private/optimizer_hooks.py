"""The hooks that run around an optimizer's step, and how often a tensor was written; no public function
tells. Checked with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]
_MADE_BY_TORCH = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
)

OWN_FIELDS = frozenset({"defaults", "state", "param_groups", *_MADE_BY_TORCH})
"""The attributes that every optimizer has."""


def step_hooks(optimizer: Optimizer) -> dict[str, MutableMapping[int, Hook]]:
    """The hooks of this optimizer and of all, by the function that registers them; to be changed in place."""
    own: Any = vars(optimizer)
    every: Any = vars(sys.modules[Optimizer.__module__])
    return {
        "register_step_pre_hook": own["_optimizer_step_pre_hooks"],
        "register_step_post_hook": own["_optimizer_step_post_hooks"],
        "register_optimizer_step_pre_hook": every["_global_optimizer_pre_hooks"],
        "register_optimizer_step_post_hook": every["_global_optimizer_post_hooks"],
    }


def num_writes(tensor: Tensor) -> int:
    """How often the tensor was written in place."""
    return tensor._version
