"""Optimizers by section against one for the whole model: bit for bit, given the same gradients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from in_process import same_bits
from makara.checkpoint.tensors import pack, unpack
from makara.model.errors import UserCodeError
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections.ranges import RangeRuntime
from models import tied_gpt
from optimizers import OPTIMIZERS
from torch import Tensor, nn
from whole_runtime import whole_runtime

SEED, STEPS = 3, 4


@cache
def gpt() -> tuple[Training, Sections]:
    """One block trains its matrices only, another one its vectors."""
    base = tied_gpt()

    def build() -> nn.Module:
        model = base.model()
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() > 1
            parameter.requires_grad_(not name.startswith("blocks.1." if not matrix else "blocks.2."))
        return model

    training = dataclasses.replace(base, model=build)
    traced = trace(training, 2, SEED)
    return training, split(traced, choose_cuts(traced, 9))


def runtime_of(training: Training) -> RangeRuntime:
    return whole_runtime(gpt()[1], training, SEED)


def gradients(step: int) -> dict[str, Tensor]:
    _, chain = gpt()
    generator = torch.Generator().manual_seed(step)
    shapes = {name: chain.traced.tensors[name].shape for name in chain.trainable_names}
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}


def whole_model(training: Training) -> dict[str, nn.Parameter]:
    """The parameters after as many steps of one optimizer that holds them all."""
    _, chain = gpt()
    parameters = {name: nn.Parameter(chain.traced.initial(name)) for name in chain.trainable_names}
    optimizer = training.optimizer(list(parameters.items()))
    initial = [float(group["lr"]) for group in optimizer.param_groups]
    for step in range(STEPS):
        factors: Any = [1.0] * len(initial) if training.schedule is None else training.schedule(step)
        if training.schedule is not None:
            for group, rate, factor in zip(optimizer.param_groups, initial, factors, strict=True):
                group["lr"] = rate * factor
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        optimizer.step()
    return parameters


def moved(runtime: RangeRuntime, training: Training) -> RangeRuntime:
    """The same sections on another worker, as a peer's packed state gives them."""
    other = RangeRuntime(runtime.chain, training, SEED)
    for index, section in runtime.sections.items():
        tensors, scalars = section.state()
        tensors, metadata = unpack(pack(tensors, {"scalars": json.dumps(scalars)}))
        other.host(index, initialise=False).load_state(tensors, json.loads(metadata["scalars"]))
    return other


def in_sections(training: Training) -> dict[str, Tensor]:
    runtime = runtime_of(training)
    for step in range(STEPS):
        found = gradients(step)
        for section in runtime.sections.values():
            section.apply(step, {name: found[name].clone() for name in section.info.trainable})
        runtime = moved(runtime, training)
    weights: dict[str, Tensor] = {}
    for section in runtime.sections.values():
        for name, parameter in section.trainable.items():
            assert name not in weights or same_bits(weights[name], parameter.detach()), "hosts agree"
            weights[name] = parameter.detach()
    return weights


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sections_that_move_after_every_step_equal_one_whole_optimizer(name: str) -> None:
    training = dataclasses.replace(gpt()[0], optimizer=OPTIMIZERS[name], schedule=None)
    expected, found = whole_model(training), in_sections(training)
    assert expected.keys() == found.keys()
    assert [n for n in expected if not same_bits(expected[n].detach(), found[n])] == []


@pytest.mark.parametrize("name", ["groups", "groups-by-name"])
def test_a_schedule_by_group_reaches_the_same_group_in_every_section(name: str) -> None:
    training = dataclasses.replace(
        gpt()[0], optimizer=OPTIMIZERS[name], schedule=lambda step: (1 / (step + 1), 0.5**step)
    )
    expected, found = whole_model(training), in_sections(training)
    assert [n for n in expected if not same_bits(expected[n].detach(), found[n])] == []


def test_some_section_has_no_matrix_and_some_group_is_empty() -> None:
    training = dataclasses.replace(gpt()[0], optimizer=OPTIMIZERS["groups"])
    sizes = [
        [len(group["params"]) for group in section.optimizer.param_groups]
        for section in runtime_of(training).sections.values()
        if section.optimizer is not None
    ]
    assert all(len(groups) == 2 for groups in sizes)
    assert any(groups[0] == 0 for groups in sizes)
    assert any(groups[1] == 0 for groups in sizes)


def test_a_section_without_trainable_parameters_has_no_optimizer() -> None:
    base = tied_gpt()

    def build() -> nn.Module:
        model = base.model()
        for parameter in model.get_submodule("blocks").parameters():
            parameter.requires_grad_(False)
        return model

    training = dataclasses.replace(base, model=build, schedule=None)
    traced = trace(training, 2, SEED)
    chain = split(traced, choose_cuts(traced, 9))
    runtime = RangeRuntime(chain, training, SEED)
    frozen = [s.index for s in chain.sections if s.parameters and not s.trainable]
    assert frozen
    for index in frozen:
        section = runtime.host(index)
        assert section.optimizer is None
        section.apply(0, {})
        assert section.state()[1] == {}


class Global(torch.optim.SGD):
    """Keeps what belongs to no parameter, in `where`."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, lr=0.1)
        self.where = where

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.where == "state":
            self.state["total"] = torch.zeros(1)  # pyright: ignore[reportArgumentType]
        elif self.where == "wrapped":
            self.base = torch.optim.Adam(self.param_groups)
            self.base.step()
        else:
            self.history = [torch.zeros(1)]


@pytest.mark.parametrize(("where", "named"), [("state", "total"), ("self", "history"), ("wrapped", "base")])
def test_state_that_belongs_to_no_parameter_is_refused(where: str, named: str) -> None:
    training = dataclasses.replace(gpt()[0], optimizer=lambda n: Global(n, where), schedule=None)
    section = runtime_of(training).sections[1]
    section.apply(0, {name: torch.zeros_like(p) for name, p in section.trainable.items()})
    with pytest.raises(UserCodeError, match=f"tensors in '{named}'"):
        section.state()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda named: [p for _, p in named], "expected one torch Optimizer, got list of "),
        (lambda named: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "was not given"),
        (lambda named: torch.optim.SGD(named, lr=-1.0), "Invalid learning rate"),
    ],
)
def test_a_faulty_optimizer_is_a_user_error(optimizer: Callable[..., Any], message: str) -> None:
    training = dataclasses.replace(gpt()[0], optimizer=optimizer)
    with pytest.raises(UserCodeError, match=message):
        runtime_of(training)
