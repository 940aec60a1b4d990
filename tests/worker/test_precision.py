"""bf16 and fp16: the same bits on every shape, the user's own autocast run in eager, and loss scaling."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import agree, training_of
from eager_runs import PreciseModel, run_eager
from in_process import SEED, M, N, Workers, reference_of, same_bits
from makara.model.data import Batches
from makara.model.errors import NonFiniteGradient, RecipeMismatch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.precision import Precision
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.worker.sections.loss_scale import GROWTH_INTERVAL, LossScale
from makara.worker.sections.runtime import SectionRuntime
from models import VOCABULARY, next_token_loss, skip_model, tied_gpt, untied_mlp
from shapes import REFERENCE, Forge, Question, Shape, differing
from torch import Tensor, nn

STEPS = 3
reference = partial(reference_of, steps=STEPS)


def chain_of(training: Training, precision: Precision, num_sections: int | None = None) -> Sections:
    traced = trace(training, M, SEED, precision)
    return split(traced, choose_cuts(traced, num_sections))


def morphing(training: Training, chain: Sections, seed: int) -> tuple[list[float], Workers]:
    """Another shape, order and recomputation in every step."""
    print(f"seed {seed}")
    shuffle = random.Random(seed)
    workers = Workers(chain, training, SEED, M * N)
    losses: list[float] = []
    for step in range(STEPS):
        replicas: list[list[tuple[int, int]]] = []
        for _ in range(shuffle.randint(1, 3)):
            ends = sorted(shuffle.sample(range(1, chain.num_sections), shuffle.randint(0, 3)))
            replicas.append(list(zip([0, *ends], [*ends, chain.num_sections], strict=True)))
        workers.form(replicas)
        losses.append(workers.step(step, shuffle))
    return losses, workers


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [tied_gpt, untied_mlp, skip_model])
def test_every_shape_gives_the_reference_bits(make: Callable[[], Training], precision: Precision) -> None:
    training = make()
    chain = chain_of(training, precision)
    losses, expected = reference(training, chain)
    found, workers = morphing(training, chain, 5)
    state = workers.state()
    assert found == losses
    assert [name for name in expected if not same_bits(state[name], expected[name])] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [lambda: tied_gpt(dropout=0.0), untied_mlp])
def test_agrees_with_the_users_module_under_autocast(
    make: Callable[[], Training], precision: Precision
) -> None:
    training = make()
    chain = chain_of(training, precision)
    batches = Batches(training.dataset(), SEED, M * N, M)
    losses, state = reference(training, chain, "fast")
    eager, weights = run_eager(
        PreciseModel(training, chain.traced, batches, seed=SEED, precision=precision, loss_scale=2.0**16),
        STEPS,
    )
    assert losses == pytest.approx(eager, rel=1e-4)
    trained = {name: weight for name, weight in weights.items() if f"weights/{name}" in state}
    assert len(trained) == len(chain.parameter_names)
    for name, weight in trained.items():
        torch.testing.assert_close(state[f"weights/{name}"], weight, rtol=1e-2, atol=1e-3)


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    made = Forge(tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("entry", "precision"),
    [
        ("models:normed_mlp", "bf16"),
        ("user_models:llama", "fp16"),
        pytest.param("models:normed_mlp", "fp16", marks=pytest.mark.soak),
    ],
)
def test_real_processes_give_the_reference_bits(
    forge: Forge, tmp_path: Path, entry: str, precision: Precision
) -> None:
    shapes = (Shape(2, 1), Shape(3, 2, recompute=True))
    question = Question(entry, {}, "exact", shapes, (REFERENCE,), steps=6, precision=precision)
    endings = forge.ask(question, tmp_path)
    for shape in shapes:
        assert endings[str(shape)].losses == endings[REFERENCE].losses
        assert differing(endings[str(shape)], endings[REFERENCE]) == []


class Mixed(nn.Module):
    """A region of the user's own that is exempt from autocast, and one value of each type at the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.out.weight.t()[:, :16]
        return self.out(x)


def mixed() -> Training:
    return dataclasses.replace(untied_mlp(), model=Mixed, loss=next_token_loss)


def test_values_cross_with_the_type_that_autocast_gives_them() -> None:
    chain = chain_of(mixed(), "bf16", 2)
    assert {value.dtype for values in chain.crossing for value in values} == {"bfloat16"}
    chain = chain_of(mixed(), "fp32", 2)
    assert {value.dtype for values in chain.crossing for value in values} == {"float32"}


class ManyReaders(nn.Module):
    """A residual stream in fp32 that many layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.readers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float()
        return sum((reader(h).float() for reader in self.readers), h)


def test_gradients_of_what_crosses_are_added_in_its_own_type() -> None:
    training = training_of(ManyReaders)
    chain = agree(training, [2], 1e-6, "bf16")
    assert [value.dtype for value in chain.crossing[0]] == ["float32"]


def test_a_region_of_the_user_that_is_exempt_from_autocast_stays_exempt() -> None:
    training = mixed()
    chain = chain_of(training, "bf16", 2)
    batches = Batches(training.dataset(), SEED, M * N, M)
    losses, _ = reference(training, chain, "fast")
    eager, _ = run_eager(PreciseModel(training, chain.traced, batches, seed=SEED, precision="bf16"), STEPS)
    assert losses == pytest.approx(eager, rel=1e-5)


def test_the_hash_tells_precisions_apart() -> None:
    hashes = {chain_of(tied_gpt(), precision).traced.graph_hash for precision in ("fp32", "bf16", "fp16")}
    assert len(hashes) == 3


def overflowing(step_of: dict[str, int]) -> Training:
    """The loss is multiplied by a number that fp16 cannot hold, in the steps that `step_of` counts."""
    base = untied_mlp()

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        step_of["calls"] += 1
        factor = 1e30 if step_of["calls"] in (step_of["bad"], step_of["bad"] + 1) else 1.0
        mean = base.loss(output, batch)
        assert isinstance(mean, Tensor)
        return mean * factor

    return dataclasses.replace(base, loss=loss)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_a_step_that_overflows_changes_nothing_and_halves_the_scale(numerics: Any) -> None:
    chain = chain_of(untied_mlp(), "fp16")
    _, before = reference(untied_mlp(), chain, numerics, steps=1)
    # `exact` computes step 0 twice; the next micro-batch after that is the first of step 1.
    bad = 2 * N + 1 if numerics == "exact" else N + 1
    _, after = reference(overflowing({"calls": 0, "bad": bad}), chain, numerics, steps=2)
    for name, tensor in before.items():
        if not name.startswith("scales/"):
            assert same_bits(after[name], tensor), name


def test_bf16_has_no_scale_and_a_gradient_that_is_not_finite_ends_it() -> None:
    training = overflowing({"calls": 0, "bad": 1})
    training = dataclasses.replace(training, loss=lambda output, batch: (output * float("inf")).sum())
    chain = chain_of(training, "bf16")
    for numerics in ("exact", "fast"):
        with pytest.raises(NonFiniteGradient, match=r"step 0: the gradient of 'layers\.0\.weight'"):
            reference(training, chain, numerics)
    with pytest.raises(NonFiniteGradient, match="even with a loss scale"):
        reference(training, chain_of(training, "fp16"), steps=60)


def test_the_scale_moves_as_gradscalers_does() -> None:
    seed = 3
    print(f"seed {seed}")
    shuffle = random.Random(seed)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    ours = LossScale()
    bad = {5, 6, 100, *shuffle.sample(range(200, 300), 3)}
    for step in range(300 + GROWTH_INTERVAL + 5):
        assert ours.scale == scaler.get_scale()
        parameter.grad = torch.full((1,), float("inf") if step in bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        ours = ours.after(step in bad)
    assert ours.scale == 2.0 ** (16 - len(bad) + 1)


def test_the_scale_is_part_of_every_sections_state() -> None:
    training = untied_mlp()
    chain = chain_of(training, "fp16")
    section = SectionRuntime(chain, 1, training, SEED)
    section.loss_scale = LossScale(2.0**9, 41)
    tensors, scalars = section.state()
    other = SectionRuntime(chain, 1, training, SEED, initialise=False)
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, scalars)
    assert other.loss_scale == LossScale(2.0**9, 41)
    with pytest.raises(RecipeMismatch, match="job/loss_scale"):
        other.load_state(tensors, {})
    with pytest.raises(RecipeMismatch, match="job/loss_scale"):
        SectionRuntime(chain_of(training, "bf16"), 1, training, SEED).load_state(tensors, scalars)


@pytest.mark.parametrize("scale", [3.0, 0.0, -2.0])
def test_only_powers_of_two_scale(scale: float) -> None:
    with pytest.raises(ValueError, match="power of two"):
        LossScale(scale)
