"""timm's image models with few parameters, on small pictures."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from makara.worker import Training
from torch import nn

from . import numbers, refuse_large, training_of

_CLASSES = 5


def names() -> list[str]:
    import timm

    return timm.list_models()


def training(name: str) -> Training:
    settings = _settings(name)
    side, picture = settings.pop("side"), settings.pop("picture")

    def model() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=_CLASSES, **settings)

    return training_of(
        model,
        lambda output, batch: F.cross_entropy(
            output[0] if isinstance(output, tuple) else output, batch["target of the loss"]
        ),
        **{picture: numbers(3, side, side), "target of the loss": lambda: torch.randint(_CLASSES, ())},
    )


def _settings(name: str) -> dict[str, Any]:
    """The smallest picture that the model takes, how to ask for it, and what forward calls it."""
    import timm

    with torch.device("meta"):
        whole = timm.create_model(name, pretrained=False, num_classes=_CLASSES)
    refuse_large(whole)
    picture = next(iter(inspect.signature(whole.forward).parameters))
    usual = int(whole.default_cfg.get("input_size", (3, 224, 224))[-1])
    for settings in ({"side": 64, "img_size": 64}, {"side": 64}, {"side": usual}):
        arguments = {key: value for key, value in settings.items() if key != "side"}
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False, num_classes=_CLASSES, **arguments)
                model(torch.empty(2, 3, settings["side"], settings["side"]))
        except Exception:  # another size is tried; one that no size suits is refused by the plain step
            continue
        return {**settings, "picture": picture}
    return {"side": usual, "picture": picture}
