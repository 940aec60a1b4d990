"""Initial weights: a function of (seed, tensor), distributed as the user's own code says."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from makara.model.errors import UntraceableModel
from makara.model.initialisation.initialise import Recording, record
from torch import Tensor, nn


class Zoo(nn.Module):
    """The ways in which people initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(400, 300)
        self.embedding = nn.Embedding(500, 64, padding_idx=3)
        self.norm = nn.LayerNorm(64)
        self.convolution = nn.Conv2d(16, 32, 3)
        self.attention = nn.MultiheadAttention(64, 4)
        self.scaled = nn.Linear(300, 300)
        self.orthogonal = nn.Linear(20, 20)
        self.truncated = nn.Parameter(torch.empty(100, 100))
        self.drawn = nn.Parameter(torch.randn(200, 200) * 3 + 1)
        self.register_buffer("table", torch.arange(6).float() / 2)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        self.register_buffer("listed", torch.tensor([1.0, 5.0]))
        self.register_buffer("array", torch.from_numpy(np.arange(3.0)))
        self.constant = torch.linspace(0, 1, 5)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.04, b=0.04)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.normal_(self.scaled.weight, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            self.embedding.weight[7].fill_(2.0)
            self.scaled.weight[:100].mul_(0.1)
            self.linear.bias.copy_(torch.full((300,), 0.25))


def zoo(seed: int = 0) -> tuple[Zoo, Recording]:
    return record(Zoo, seed)


def value(name: str, seed: int = 0) -> Tensor:
    model, recording = zoo(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "constant": model.constant}
    return recording.tensor(tensors[name], name).detach()


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("linear.weight", 0.0, 1 / math.sqrt(3 * 400)),  # kaiming_uniform(a=sqrt 5): U(±1/sqrt(fan_in))
        ("convolution.weight", 0.0, 1 / math.sqrt(3 * 16 * 9)),
        ("attention.in_proj_weight", 0.0, math.sqrt(2 / (64 + 192))),  # xavier_uniform
        ("drawn", 1.0, 3.0),
    ],
)
def test_the_distribution_is_the_users(name: str, mean: float, deviation: float) -> None:
    drawn = value(name)
    assert float(drawn.std()) == pytest.approx(deviation, rel=0.05)
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.05 * deviation)


def test_what_is_not_random_is_exact() -> None:
    assert torch.equal(value("norm.weight"), torch.ones(64))
    assert torch.equal(value("norm.bias"), torch.zeros(64))
    assert torch.equal(value("linear.bias"), torch.full((300,), 0.25))
    assert value("table").tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert torch.equal(value("mask"), torch.tril(torch.ones(4, 4)))
    assert value("listed").tolist() == [1.0, 5.0]
    assert value("array").tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(value("constant"), torch.linspace(0, 1, 5))


def test_changes_through_views_are_kept() -> None:
    embedding, scaled = value("embedding.weight"), value("scaled.weight")
    assert torch.equal(embedding[3], torch.zeros(64))
    assert torch.equal(embedding[7], torch.full((64,), 2.0))
    assert float(embedding[10:].std()) == pytest.approx(1.0, rel=0.05)
    assert float(scaled[:100].std()) == pytest.approx(0.1, rel=0.05)
    assert float(scaled[100:].std()) == pytest.approx(1.0, rel=0.05)


class Conjugated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        number = torch.tensor([1 + 2j, 3 - 1j])
        self.register_buffer("conjugate", number.conj())
        self.register_buffer("twice", number.conj() * 2)
        self.register_buffer("imaginary", number.conj().imag)


def test_lazy_conjugates_have_their_values() -> None:
    model, recording = record(Conjugated, 0)
    for name, buffer in Conjugated().named_buffers():
        made = recording.tensor(model.get_buffer(name), name)
        assert torch.equal(made, buffer)
        assert not made.is_conj()
        assert not made.is_neg()


def test_special_initialisers() -> None:
    orthogonal = value("orthogonal.weight")
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(20), atol=1e-5, rtol=0)
    truncated = value("truncated")
    assert float(truncated.abs().max()) <= 0.04
    assert float(truncated.std()) == pytest.approx(0.0176, rel=0.05)  # 0.02 · 0.8796 for cuts at 2 deviations


def test_numbers_read_while_building_are_real() -> None:
    assert zoo()[0].rates == pytest.approx([0.0, 0.1, 0.2])


def test_values_depend_on_seed_and_name_and_on_nothing_else() -> None:
    model, recording = zoo()
    first = recording.tensor(model.linear.weight, "linear.weight")
    torch.manual_seed(123)
    recording.tensor(model.scaled.weight, "scaled.weight")
    assert torch.equal(recording.tensor(model.linear.weight, "linear.weight"), first)
    assert torch.equal(value("linear.weight"), first)
    assert not torch.equal(value("linear.weight", seed=1), first)
    named = {}
    for name in ("linear", "other"):
        built, recording = record(lambda name=name: nn.ModuleDict({name: nn.Linear(400, 300)}), 0)
        named[name] = recording.tensor(built.get_parameter(f"{name}.weight"), f"{name}.weight")
    assert torch.equal(named["linear"], first)
    assert not torch.equal(named["other"], first)


def test_global_generators_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    value("drawn")
    assert torch.equal(torch.rand(1), expected)


def test_a_model_far_larger_than_memory_is_recorded_and_one_tensor_made() -> None:
    def huge() -> nn.ModuleList:
        return nn.ModuleList([nn.Linear(1 << 20, 1 << 20), nn.Linear(8, 8)])  # 4 TiB and 256 bytes

    model, recording = record(huge, 0)
    assert recording.tensor(model[1].weight, "1.weight").shape == (8, 8)


def test_a_tensor_made_elsewhere_is_refused() -> None:
    model, recording = zoo()
    with recording.fake_mode:
        stranger = torch.zeros(2)
    with pytest.raises(UntraceableModel, match="'stranger'"):
        recording.tensor(stranger, "stranger")
    assert model.rates


def test_models_of_transformers_keep_their_own_initialisation() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=500, bos_token_id=0, eos_token_id=0
    )
    model, recording = record(lambda: transformers.GPT2LMHeadModel(config), 0)
    tensors = {name: recording.tensor(p, name) for name, p in model.named_parameters()}
    assert float(tensors["transformer.wte.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(tensors["transformer.h.0.attn.c_proj.weight"].std()) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(tensors["transformer.ln_f.weight"], torch.ones(64))


def test_types_are_converted_and_devices_are_not() -> None:
    def build() -> nn.Module:
        tied = nn.ModuleList([nn.Linear(30, 30), nn.Linear(30, 30, bias=False), nn.LSTM(4, 4)])
        tied[1].weight = tied[0].weight
        tied.register_buffer("count", torch.arange(3))
        return tied.half().cuda().to("cuda:1", torch.bfloat16).to("cpu").requires_grad_(False)

    model, recording = record(build, 0)
    parameters = dict(model.named_parameters())
    assert "1.weight" not in parameters
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert model.get_buffer("count").dtype == torch.int64
    weight = recording.tensor(parameters["0.weight"], "0.weight")
    assert weight.device.type == "cpu"
    assert weight.dtype == torch.bfloat16
    assert float(weight.float().std()) == pytest.approx(1 / math.sqrt(3 * 30), rel=0.1)
    nn.Linear(2, 2).half()


class _Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online)
        self.loaded = nn.Linear(6, 8)
        self.loaded.load_state_dict(self.online[0].state_dict())
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.others = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
        )


def test_what_is_copied_from_a_weight_begins_with_its_values() -> None:
    model, recording = record(_Copies, 3)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: recording.tensor(tensor, name) for name, tensor in tensors.items()}
    for name in dict(model.online.state_dict()):
        assert torch.equal(values[f"online.{name}"], values[f"target.{name}"]), name
    assert torch.equal(values["online.0.weight"], values["loaded.weight"])
    for name in dict(model.others.layers[0].named_parameters()):
        assert torch.equal(values[f"others.layers.0.{name}"], values[f"others.layers.1.{name}"]), name
    assert not torch.equal(values["online.0.weight"], values["normed.parametrizations.weight.original1"])


def test_what_is_computed_from_a_weight_is_of_its_values() -> None:
    model, recording = record(_Copies, 3)
    norm, weight = (f"normed.parametrizations.weight.original{index}" for index in (0, 1))
    values = {name: recording.tensor(model.get_parameter(name), name) for name in (norm, weight)}
    torch.testing.assert_close(values[norm], values[weight].norm(dim=1, keepdim=True))


class _Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50))
        self.largest = float(self.weight.detach().max())
        self.first, self.second = torch.rand(()).item(), torch.rand(()).item()
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))
        self.widths = torch.unique(torch.tensor([8, 16, 8])).int().tolist()
        self.register_buffer("chosen", torch.arange(6)[torch.tensor([True, False] * 3)] + 1)


def test_values_that_are_read_while_building_are_those_of_the_tensors() -> None:
    model, recording = record(_Read, 3)
    weight = recording.tensor(model.weight, "weight")
    assert model.largest == float(weight.max())
    assert model.first != model.second
    assert model.widths == [8, 16]
    assert recording.tensor(model.get_buffer("chosen"), "chosen").tolist() == [1, 3, 5]
