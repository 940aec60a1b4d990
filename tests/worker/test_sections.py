"""Sections at run time: forward, recompute and backward; state that comes back exactly; calibration."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from frozen_models import probe
from in_process import same_bits
from makara.model.data import Batches
from makara.model.errors import RecipeMismatch, UserCodeError
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.simulator.calibration.data import Calibration
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.sections.runtime import SectionRuntime
from models import VOCABULARY, Tokens, skip_model, tied_gpt, untied_mlp
from torch import Tensor, nn
from whole_runtime import whole_runtime

from benchmarks.calibrate import calibrate


@torch.library.custom_op("makara_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """A copy of `x`, which must be as it usually is."""
    if float(x.abs().max()) > 1e5:
        raise ArithmeticError("too much for me")
    return x.clone()


@picky.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


picky.register_autograd(lambda _, gradient: picky(gradient.contiguous()))


class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(picky(self.table(tokens)))


def picky_model() -> RangeRuntime:
    training = replace(tied_gpt(), model=Picky)
    return hosted(training, chain_of(training, 1))


def test_what_the_models_own_operation_raises_is_the_users_error() -> None:
    """Found: it was ours, and was tried again for as often as ours are."""
    runtime = picky_model()
    gradients(runtime)
    with torch.no_grad():
        runtime.sections[0].parameters["table.weight"].fill_(1e6)
    with pytest.raises(UserCodeError, match="the model's forward: ArithmeticError: too much for me") as told:
        gradients(runtime)
    assert 'raise ArithmeticError("too much for me")' in (told.value.traceback or "")


def test_what_the_gradient_of_the_models_own_operation_raises_is_the_users_error() -> None:
    runtime = picky_model()
    with torch.no_grad():
        runtime.sections[0].parameters["head.weight"].mul_(1e9)
    with pytest.raises(UserCodeError, match="the model's backward: ArithmeticError: too much for me"):
        gradients(runtime)


def test_what_torch_itself_raises_is_not_taken_for_the_users() -> None:
    runtime = picky_model()
    wrong = {name: torch.full_like(entry, VOCABULARY + 7) for name, entry in batch().items()}
    with pytest.raises(IndexError):
        runtime.forward(0, 0, 0, 1, {}, wrong, keep=False)


def chain_of(training: Training, num_sections: int | None = None) -> Sections:
    traced = trace(training, 2, 3)
    return split(traced, choose_cuts(traced, num_sections))


@cache
def gpt() -> tuple[Training, Sections]:
    training = tied_gpt()
    return training, chain_of(training, 4)


def hosted(training: Training, chain: Sections) -> RangeRuntime:
    return whole_runtime(chain, training, 3)


def batch(i: int = 0) -> dict[str, Tensor]:
    return Batches(Tokens(), 3, 8, 2).micro_batch(0, i)


def gradients(runtime: RangeRuntime, step: int = 0) -> dict[tuple[int, str], Tensor]:
    found: dict[tuple[int, str], Tensor] = {}
    runtime.forward(step, 0, 0, runtime.chain.num_sections, {}, batch(), keep=True)
    runtime.backward(0, 0, {}, lambda section, name, g: found.__setitem__((section, name), g))
    return found


def train(runtime: RangeRuntime, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        total: dict[str, Tensor] = {}
        for (_, name), g in gradients(runtime, step).items():
            total[name] = total[name] + g if name in total else g
        for section in runtime.sections.values():
            section.apply(step, {name: total[name] for name in section.info.trainable})


def test_dropout_depends_on_step_micro_batch_and_section_only() -> None:
    training, chain = gpt()
    runtime = hosted(training, chain)

    def values(step: int, i: int) -> Mapping[str, Tensor]:
        return runtime.forward(step, i, 0, 1, {}, batch(), keep=False).values

    first = values(0, 0)
    torch.manual_seed(99)
    assert all(same_bits(first[name], again) for name, again in values(0, 0).items())
    assert not any(same_bits(first[name], other) for name, other in values(1, 0).items())
    assert not any(same_bits(first[name], other) for name, other in values(0, 1).items())


def test_recompute_gives_the_same_gradients() -> None:
    training, chain = gpt()
    runtime = hosted(training, chain)
    expected = gradients(runtime)
    found: dict[tuple[int, str], Tensor] = {}
    runtime.forward(0, 0, 0, chain.num_sections, {}, batch(), keep=False)
    runtime.forward(0, 1, 0, chain.num_sections, {}, batch(1), keep=False)
    runtime.recompute(0, 0)
    runtime.backward(0, 0, {}, lambda section, name, g: found.__setitem__((section, name), g))
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], expected[key]) for key in expected)


def test_a_tied_weight_has_a_gradient_for_each_section_that_uses_it() -> None:
    training, chain = gpt()
    places = [section for section, name in gradients(hosted(training, chain)) if name == "embed.weight"]
    assert sorted(places) == [0, chain.num_sections - 1]


def test_forward_and_backward_change_no_state() -> None:
    training, chain = gpt()
    runtime = hosted(training, chain)
    before = {n: t.clone() for s in runtime.sections.values() for n, t in s.state()[0].items()}
    gradients(runtime)
    after = {n: t for s in runtime.sections.values() for n, t in s.state()[0].items()}
    assert all(same_bits(before[name], after[name]) for name in before)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
    "amsgrad": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9),
    "plain": lambda named: torch.optim.SGD(named, lr=1e-2),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "groups": lambda named: torch.optim.AdamW(
        [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "lr": 1e-3},
        ],
        lr=1e-2,
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_section_continues_exactly_from_its_state_elsewhere(name: str) -> None:
    base, chain = gpt()
    training = Training(
        model=base.model,
        loss=base.loss,
        optimizer=OPTIMIZERS[name],
        dataset=base.dataset,
        schedule=lambda step: 1 / (step + 1),
    )
    runtime = hosted(training, chain)
    train(runtime, 2)
    for section in runtime.sections.values():
        section.scales = dict.fromkeys(section.info.trainable, 2.0**30)
    other = RangeRuntime(chain, training, 3)
    for index, section in runtime.sections.items():
        tensors, scalars = section.state()
        other.host(index, initialise=False).load_state({n: t.clone() for n, t in tensors.items()}, scalars)
    train(runtime, 2, first=2)
    train(other, 2, first=2)
    for index, section in runtime.sections.items():
        (expected, numbers), (found, found_numbers) = section.state(), other.sections[index].state()
        assert expected.keys() == found.keys()
        assert numbers == found_numbers
        assert [n for n in expected if not same_bits(expected[n], found[n])] == []


def test_state_is_named_by_kind_and_parameter() -> None:
    training, chain = gpt()
    runtime = hosted(training, chain)
    train(runtime, 1)
    tensors, scalars = runtime.sections[0].state()
    assert {"weights/embed.weight", "optimizer/embed.weight/exp_avg", "buffers/positions"} <= tensors.keys()
    assert scalars == {}


@pytest.mark.parametrize("fault", ["missing", "shape", "stranger"])
def test_a_state_that_does_not_fit_is_refused(fault: str) -> None:
    training, chain = gpt()
    section = SectionRuntime(chain, 0, training, 3)
    tensors, scalars = section.state()
    if fault == "missing":
        del tensors["weights/embed.weight"]
    elif fault == "shape":
        tensors["weights/embed.weight"] = torch.zeros(2, 2)
    else:
        tensors["weights/none.weight"] = torch.zeros(2)
    with pytest.raises(RecipeMismatch, match=r"state 'weights/(embed|none)\.weight'"):
        section.load_state(tensors, scalars)


def test_an_optimizer_whose_state_cannot_be_saved_is_named() -> None:
    base, chain = gpt()

    class Hoarder(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["history"] = [1, 2]

    training = Training(
        model=base.model, loss=base.loss, optimizer=lambda n: Hoarder(n, lr=1.0), dataset=base.dataset
    )
    section = SectionRuntime(chain, 1, training, 3)
    section.apply(0, {name: torch.zeros_like(p) for name, p in section.trainable.items()})
    with pytest.raises(UserCodeError, match="'history'"):
        section.state()


def test_sections_come_and_go_in_a_running_worker() -> None:
    training, chain = gpt()
    runtime = RangeRuntime(chain, training, 3)
    section = runtime.host(1)
    assert runtime.host(1) is section
    runtime.drop(1)
    assert runtime.sections == {}
    assert runtime.host(2).info.index == 2


def test_frozen_parameters_stay_and_unused_ones_are_kept() -> None:
    training = untied_mlp()
    runtime = hosted(training, chain_of(training))
    train(runtime, 2)
    held = {n: p for s in runtime.sections.values() for n, p in s.parameters.items()}
    assert torch.equal(held["scale"], torch.full((24,), 0.5))
    assert torch.equal(held["unused"], torch.ones(3))


def test_the_learning_rate_follows_the_schedule() -> None:
    training, chain = gpt()
    section = SectionRuntime(chain, 1, training, 3)
    assert section.optimizer is not None
    rates: list[float] = []
    for step in range(5):
        section.set_lr(step)
        rates.append(section.optimizer.param_groups[0]["lr"])
    assert rates == [3e-3 * factor for factor in (0.25, 0.5, 0.75, 1.0, 1.0)]


def test_a_rate_that_all_sections_share_as_a_tensor_is_the_initial_one_of_each() -> None:
    base, chain = gpt()
    shared = torch.tensor(1e-2)
    training = replace(
        base,
        optimizer=lambda named: torch.optim.AdamW(
            [{"params": named[:1]}, {"params": named[1:]}], lr=shared, foreach=False
        ),
        schedule=lambda step: (step / 4, step / 2),
    )
    rates: list[float] = []
    for index in range(2):
        section = SectionRuntime(chain, index, training, 3)
        section.set_lr(2)
        assert section.optimizer is not None
        rates += [float(group["lr"]) for group in section.optimizer.param_groups]
        section.apply(0, {name: torch.zeros_like(p) for name, p in section.trainable.items()})
    assert rates == pytest.approx([0.5e-2, 1e-2] * 2)
    assert float(shared) == pytest.approx(1e-2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, batch: output, "scalar"),
        (lambda output, batch: 3.0, "scalar"),
        (lambda output, batch: 1 / 0, "Zero"),
    ],
)
def test_a_faulty_loss_is_a_user_error(loss: Callable[..., Tensor], message: str) -> None:
    base, chain = gpt()
    training = Training(model=base.model, loss=loss, optimizer=base.optimizer, dataset=base.dataset)
    with pytest.raises(UserCodeError, match=message):
        gradients(hosted(training, chain))


@pytest.mark.parametrize("make", [tied_gpt, skip_model])
def test_calibration_measures_every_section(make: Callable[[], Training]) -> None:
    training = make()
    chain = chain_of(training, 3)
    found = calibrate(chain, training, seed=3, numerics="exact", num_micro_batches=4, repeats=1)
    assert Calibration.from_json(found.to_json()) == found
    assert found.num_sections == 3
    assert all(seconds > 0 for seconds in (*found.forward_s, *found.backward_s, *found.optimizer_s))
    assert found.cut_bytes == tuple(sum(v.size_bytes for v in values) for values in chain.crossing)
    assert found.gradient_bytes[1] == 8 * sum(
        p.numel() for p in hosted(training, chain).sections[1].trainable.values()
    )
    assert all(size > 0 for size in found.activation_bytes)
    assert all(0 < own < whole for own, whole in zip(found.optimizer_bytes, found.state_bytes, strict=True))


@pytest.mark.parametrize("keep", [False, True])
def test_of_frozen_sections_before_others_nothing_is_recomputed_and_nothing_kept(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    training = probe()
    chain = chain_of(training, 6)
    runtime, samples = hosted(training, chain), Batches(training.dataset(), 11, 2, 2).micro_batch(0, 0)
    first = runtime.forward(0, 0, 0, 1, {}, samples, keep=True).values
    kept = [weakref.ref(value) for value in first.values()]
    ran: list[int] = []
    forward = SectionRuntime.forward

    def noted(self: SectionRuntime, *arguments: Any) -> Any:
        ran.append(self.info.index)
        return forward(self, *arguments)

    monkeypatch.setattr(SectionRuntime, "forward", noted)
    assert 1 < chain.frozen < chain.num_sections
    runtime.forward(0, 0, 1, chain.num_sections, first, samples, keep=keep)
    del first
    assert [reference() for reference in kept] == [None] * len(kept)
    found: dict[str, Tensor] = {}
    if not keep:
        runtime.recompute(0, 1)
    trained = list(range(chain.frozen, chain.num_sections))
    assert ran == [*range(1, chain.num_sections), *([] if keep else trained)]
    assert runtime.backward(0, 1, {}, lambda _, name, gradient: found.update({name: gradient})) == {}
    assert set(found) == set(chain.trainable_names)
