"""transformers, peft and diffusers train as they come: stand-ins that do what these libraries do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from makara.model.data import Batches
from makara.model.errors import UntraceableModel
from makara.model.libraries import parameters_of_forward, turn_off_caches
from makara.model.tracing.trace import TracedModel, trace
from makara.model.training import Training
from makara.worker.check.eager import EagerModel
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Numbers:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), index / 8.0), "mask": torch.ones(4)}


class Cache:
    """As transformers' caches of keys and values: no tensor, and known to no pytree."""


Cache.__module__ = "transformers.cache_utils"


class Generator(nn.Module):
    """As a text model of transformers: its config says whether it returns a cache."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.layer = config, nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> dict[str, Any]:
        assert mask is not None, "an entry of the samples got lost"
        out = {"out": self.layer(x) * mask}
        return {**out, "cache": Cache()} if more.get("use_cache", self.config.use_cache) else out


Generator.__module__ = "transformers.models.text"


class Pictured(nn.Module):
    """As a model with pictures: its own forward names no use_cache, and checks the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.text = Generator(SimpleNamespace(use_cache=True))

    def forward(self, x: Tensor, mask: Tensor, **more: Any) -> dict[str, Any]:
        torch._check_tensor_all(mask > 0)  # pyright: ignore[reportPrivateUsage]
        return self.text(x, mask, **more)


class Wrapper(nn.Module):
    """As peft's wrapper without a task: its forward names nothing."""

    def __init__(self, base: nn.Module, further: bool = False) -> None:
        super().__init__()
        self.base, self.further = base, further

    def get_base_model(self) -> nn.Module:
        return self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


Wrapper.__module__ = "peft.peft_model"


class TaskWrapper(Wrapper):
    """As peft's wrapper for a task: its forward names some of the arguments."""

    def forward(self, x: Tensor | None = None, **kwargs: Any) -> Any:
        return self.base(x=x, **kwargs)


TaskWrapper.__module__ = "peft.peft_model"


class Denoised(OrderedDict[str, Any]):
    """As diffusers' outputs, which are registered without names of their parts."""

    @property
    def sample(self) -> Tensor:
        return self["sample"]


pytree.register_pytree_node(
    Denoised,
    pytree._dict_flatten,  # pyright: ignore
    lambda values, context: Denoised(zip(context, values, strict=True)),
    serialized_type_name="tests.Denoised",
)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Denoised, dict[str, Denoised]]:
        return Denoised(sample=self.layer(x)), {"inner": Denoised(sample=x)}


def training_of(model: Callable[[], nn.Module], loss: Callable[..., Tensor], **more: Any) -> Training:
    return Training(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        dataset=Numbers,
        **more,
    )


def traced_with_eager(training: Training) -> TracedModel:
    """The trace, when the user's own module takes a step, too."""
    traced = trace(training, 2)
    result = EagerModel(training, traced, Batches(Numbers(), 0, 2, 2)).step(0)
    assert result.gradients.keys() == traced.trainable
    return traced


def of_out(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return output["out"].square().mean()


@pytest.mark.parametrize(
    "model",
    [
        Pictured,
        lambda: Generator(SimpleNamespace(use_cache=True)),
        lambda: Wrapper(Pictured()),
        lambda: TaskWrapper(Wrapper(Pictured())),
    ],
    ids=["with pictures", "text", "wrapped", "wrapped twice"],
)
def test_models_that_cache_by_themselves_and_their_wrappers_train(
    model: Callable[[], nn.Module],
) -> None:
    """Found: refused for a cache by default, a check of values, or a forward that names no argument."""
    assert set(traced_with_eager(training_of(model, of_out)).inputs.values()) == {"x", "mask"}


def test_a_cache_that_is_asked_for_is_refused_with_the_line_that_turns_it_off() -> None:
    training = training_of(Pictured, of_out, forward_kwargs={"use_cache": True})
    with pytest.raises(UntraceableModel, match=r'forward_kwargs=\{"use_cache": False\}'):
        trace(training, 2)


class Config(SimpleNamespace):
    """As a config of transformers."""


Config.__module__ = "transformers.configuration_utils"


class Own(nn.Module):
    """A module of the user's own, with a config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def test_a_models_cache_is_turned_off_in_a_copy_of_the_users_config() -> None:
    config = Config(use_cache=True)
    model = nn.ModuleList([Own(config), Generator(config)])
    turn_off_caches(model)
    first, second = (part.config for part in model)
    assert first is second
    assert (first.use_cache, config.use_cache) == (False, True)


def test_a_module_of_the_users_own_keeps_its_config() -> None:
    """Found: any module's config.use_cache was set to False."""
    config = SimpleNamespace(use_cache=True)
    own = Own(config)
    turn_off_caches(own)
    assert own.config is config
    assert config.use_cache


def test_only_wrappers_of_peft_are_looked_through() -> None:
    class Open(Wrapper):
        pass

    Open.__module__ = "train"
    assert list(parameters_of_forward(TaskWrapper(Pictured()))) == ["x", "mask", "more"]
    assert list(parameters_of_forward(Open(Pictured()))) == ["args", "kwargs"]


def test_outputs_that_a_library_registered_without_names_are_traced() -> None:
    """Found: refused in torch's own words."""
    traced_with_eager(training_of(Denoiser, lambda output, _: output[0].sample.square().mean()))
