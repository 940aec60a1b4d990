"""Optimizers from PyTorch and PyPI in two stages, of which all workers die once, beside a plain loop; or a
refusal before a step is taken. docs/model-matrix.md has the table."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import dadaptation
import pytest
import torch
from in_process import Workers
from lion_pytorch import Lion
from makara.model.data import Batches
from makara.model.errors import UserCodeError
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.check.comparison import watch_for
from makara.worker.check.findings import Report
from makara.worker.check.optimizers import check_optimizer
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree
from torch import Tensor, nn, optim
from transformers.optimization import Adafactor
from whole_runtime import whole_runtime

SEED, M, N, STEPS = 5, 2, 4, 8
SAVED, DEATH = 3, 5  # steps: the death comes after two that are lost with it


class Model(nn.Module):
    """Matrices alone, as Muon takes nothing else. Three layers, two of them of one stage, share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(5))
        self.layers[2].weight = self.layers[3].weight = self.layers[1].weight
        self.out = nn.Linear(12, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


class Data:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.sin(torch.arange(12.0) * (0.3 + 0.02 * index) + index)
        return {"x": x, "y": (x.sum() * 3).long() % 5}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def of(optimizer: Callable[..., Any]) -> Training:
    return Training(model=Model, loss=loss, optimizer=optimizer, dataset=Data)


@cache
def chain() -> Sections:
    traced = trace(of(optim.AdamW), M, SEED)
    return split(traced, choose_cuts(traced, 6))


def parameters(named: Any) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def schedule_free(kind: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    def make(named: Any) -> optim.Optimizer:
        optimizer = kind(parameters(named), **settings)
        optimizer.train()
        return optimizer

    return make


def plain_loop(training: Training) -> dict[str, Tensor]:
    module = Model()
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        parameter.data = chain().traced.initial(name)
    optimizer = training.optimizer(list(named.items()))
    batches = Batches(Data(), SEED, N * M, N * M)
    for step in range(STEPS):
        batch = batches.micro_batch(step, 0)
        loss(module(batch["x"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in named.items()}


def two_stages_and_a_death(training: Training) -> dict[str, Tensor]:
    """After the death new workers load what was saved, as from a checkpoint, and take the steps again."""
    shuffle = random.Random(SEED)
    stages = [(0, 2), (2, chain().num_sections)]
    workers = Workers(chain(), training, SEED, N * M)
    workers.form([stages])
    for step in range(SAVED):
        workers.step(step, shuffle)
    restored = Workers(chain(), training, SEED, N * M)
    restored.form([stages])
    restored.replicas = workers.replicas
    restored.form([stages])  # from the state of these
    for step in range(SAVED, DEATH):
        workers.step(step, shuffle)  # lost
    for step in range(SAVED, STEPS):
        restored.step(step, shuffle)
    (replica,) = restored.replicas
    (shared,) = chain().shared.values()
    copies = [
        section for stage in replica for section in stage.sections.values() if section.info.index in shared
    ]
    assert len(copies) == 3
    for copy in copies:
        assert torch.equal(copy.parameters["layers.1.weight"], copies[0].parameters["layers.1.weight"])
    state = restored.state()
    return {name: state[f"weights/{name}"] for name in chain().trainable_names}


class Wasteful(optim.SGD):
    """Uses its gradients as room for something else once it has read them."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(7.0)


RIGHT: dict[str, Callable[..., Any]] = {
    "SGD": lambda named: optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, all tensors at once": lambda named: optim.SGD(
        named, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "SGD that writes into gradients": lambda named: Wasteful(named, lr=0.05),
    "Adam": lambda named: optim.Adam(named, lr=1e-3),
    "AdamW": lambda named: optim.AdamW(named, lr=1e-3),
    "NAdam": lambda named: optim.NAdam(named, lr=1e-3),
    "RAdam": lambda named: optim.RAdam(named, lr=1e-3),
    "Adamax": lambda named: optim.Adamax(named, lr=1e-3),
    "Adadelta": lambda named: optim.Adadelta(named, lr=0.5),
    "ASGD": lambda named: optim.ASGD(named, lr=0.05),
    "Rprop": lambda named: optim.Rprop(named, lr=1e-3),
    "Muon": lambda named: optim.Muon(named, lr=1e-2),
    "Adafactor": lambda named: optim.Adafactor(named, lr=1e-2),
    "Adafactor of transformers": lambda named: Adafactor(parameters(named)),
    "Adafactor of transformers, fixed rate": lambda named: Adafactor(
        parameters(named), lr=1e-3, relative_step=False, scale_parameter=False, beta1=0.9
    ),
    "Lion": lambda named: Lion(parameters(named), lr=1e-3),
    "AdamWScheduleFree": schedule_free(AdamWScheduleFree, lr=1e-2, warmup_steps=4),
    "SGDScheduleFree": schedule_free(SGDScheduleFree, lr=0.1),
    "RAdamScheduleFree": schedule_free(RAdamScheduleFree, lr=1e-2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_optimizer_in_two_stages_with_a_death_is_that_of_a_plain_loop(name: str) -> None:
    training = of(RIGHT[name])
    report = Report()
    check_optimizer(training, chain(), watch_for(training, Path(__file__).parent), report)
    assert report.findings == []
    expected, found = plain_loop(training), two_stages_and_a_death(training)
    for weight, value in expected.items():
        torch.testing.assert_close(found[weight], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_an_optimizer_with_weights_for_evaluation_is_noted(name: str) -> None:
    training, report = of(RIGHT[name]), Report()
    check_optimizer(training, chain(), watch_for(training, Path(__file__).parent), report)
    (note,) = report.notes
    assert "exports hold the weights of training, not those of evaluation" in note


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_weights_for_evaluation_follow_from_what_a_checkpoint_holds(name: str) -> None:
    """As docs/precision.md says."""
    section = whole_runtime(chain(), of(RIGHT[name]), SEED).sections[1]
    for step in range(9):  # RAdam's first steps change nothing
        section.apply(step, {name: torch.ones_like(p) * (step + 1) for name, p in section.trainable.items()})
    state = {key: value.clone() for key, value in section.state()[0].items()}
    optimizer: Any = section.optimizer
    group = optimizer.param_groups[0]
    beta = group["betas"][0] if "betas" in group else group["momentum"]
    optimizer.eval()
    for weight, parameter in section.trainable.items():
        found = state[f"weights/{weight}"].lerp(state[f"optimizer/{weight}/z"], 1 - 1 / beta)
        assert torch.equal(found, parameter.detach())
        assert not torch.equal(found, state[f"weights/{weight}"])


ESTIMATING: dict[str, Callable[..., Any]] = {
    "Prodigy": lambda named: Prodigy(parameters(named), lr=1.0, d0=1e-4),
    "Prodigy as it comes": lambda named: Prodigy(parameters(named)),
    **{
        name: lambda named, name=name: getattr(dadaptation, name)(parameters(named))
        for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptLion", "DAdaptAdan")
    },
}


@pytest.mark.parametrize("name", ESTIMATING)
def test_an_optimizer_that_estimates_a_step_size_from_all_parameters_is_refused(name: str) -> None:
    training, report = of(ESTIMATING[name]), Report()
    check_optimizer(training, chain(), watch_for(training, Path(__file__).parent), report)
    (finding,) = report.findings
    assert "depends on the gradient of 'layers.0.weight' in another section" in str(finding)
    assert "Prodigy, D-Adaptation" in str(finding)


def test_lbfgs_is_refused() -> None:
    training = of(lambda named: optim.LBFGS(parameters(named)))
    with pytest.raises(UserCodeError, match="the step of LBFGS calls a closure"):
        check_optimizer(training, chain(), watch_for(training, Path(__file__).parent), Report())
