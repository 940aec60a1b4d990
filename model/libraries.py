"""What has to be known of transformers and peft, so that their models train as they come.

Neither is imported here: a model is recognised by the modules of its classes.

| what it does by itself | library | what is done |
|---|---|---|
| returns a cache of keys and values | transformers | its `config` becomes a copy with `use_cache` False |
| forward names few arguments or none | peft | entries go by the wrapped model's arguments, too |
| registers outputs without keys | diffusers | the keys are added (`tracing/outputs.py`) |
| checks values of tensors | transformers | the check is left out (`tracing/exporting.py`) |
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

_TRANSFORMERS = "transformers."
CACHES = (_TRANSFORMERS, "Cache")
"""Where the classes of caches are, and what is in their names."""
_WRAPPERS = "peft."


def turn_off_caches(model: nn.Module) -> None:
    """Give the models of transformers in `model` configs with `use_cache` False: training reads no cache.

    They are copies, as the user's own may be used for other models, too. Parts that share a config share its
    copy.
    """
    copies: dict[int, Any] = {}
    for part in model.modules():
        config: Any = vars(part).get("config")
        known = _is_of_transformers(part) or _is_of_transformers(config)
        if known and getattr(config, "use_cache", None) is True:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].use_cache = False
            part.config = copies[id(config)]


def parameters_of_forward(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The arguments of the model's forward, and of the model that a wrapper of peft passes them to."""
    own = inspect.signature(model.forward).parameters
    if not type(model).__module__.startswith(_WRAPPERS) or not _passes_on(own):
        return own
    base = cast(Callable[[], nn.Module], model.get_base_model)()
    further = parameters_of_forward(base)
    named = {name: parameter for name, parameter in own.items() if not _is_open(parameter)}
    return {**named, **{name: parameter for name, parameter in further.items() if name not in named}}


def _is_of_transformers(value: object) -> bool:
    return any(base.__module__.startswith(_TRANSFORMERS) for base in type(value).__mro__)


def _passes_on(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


def _is_open(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
