"""Weights that a model reads from files: the usual ways work, and nothing is read too early."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from makara.model.errors import UntraceableModel
from makara.model.initialisation.initialise import record
from makara.model.tracing.trace import trace
from makara.model.training import Training
from models import Tokens
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, load, nn
from torch.nn import functional as F

WIDTH = 16


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder, model = tmp_path_factory.mktemp("stored"), net()
    state = model.state_dict()
    torch.save(state, folder / "weights.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(model, folder / "model.pt")
    (folder / "weights.pickle").write_bytes(pickle.dumps(state))
    (folder / "model.pickle").write_bytes(pickle.dumps(model))
    save_file(state, folder / "weights.safetensors")
    return folder, state


def unpickled(path: Path) -> Any:
    return pickle.loads(path.read_bytes())  # noqa: S301 (as users do)


def by_torch(folder: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(folder / "weights.pt"))
    return model


def by_torch_on_a_gpu(folder: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(folder / "weights.pt", map_location="cuda:0"))
    return model


def by_an_old_file(folder: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(folder / "legacy.pt"))
    return model


def by_an_open_file(folder: Path) -> nn.Module:
    model = net()
    with open(folder / "weights.pt", "rb") as file:
        model.load_state_dict(torch.load(file))
    return model


def assigned(folder: Path) -> nn.Module:
    model = net()
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
    return model


def assigned_to_meta(folder: Path) -> nn.Module:
    with torch.device("meta"):
        model = net()
    model.load_state_dict(torch.load(folder / "weights.pt"), assign=True)
    return model


def pickled_whole(folder: Path) -> nn.Module:
    model: nn.Module = torch.load(folder / "model.pt", weights_only=False)
    return model


def by_the_imported_name(folder: Path) -> nn.Module:
    """Found: a KeyError without words."""
    model = net()
    model.load_state_dict(load(folder / "weights.pt"))
    return model


def by_pickle(folder: Path) -> nn.Module:
    """Found: an error about the storages of devices."""
    model = net()
    model.load_state_dict(unpickled(folder / "weights.pickle"))
    return model


def by_pickle_whole(folder: Path) -> nn.Module:
    return unpickled(folder / "model.pickle")


def by_safetensors(folder: Path) -> nn.Module:
    model = net()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    return model


def by_load_model(folder: Path) -> nn.Module:
    model = net()
    load_model(model, folder / "weights.safetensors")
    return model


def by_safe_open(folder: Path) -> nn.Module:
    model = net()
    with safe_open(folder / "weights.safetensors", "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(name))
    return model


def by_slices(folder: Path) -> nn.Module:
    model = net()
    with safe_open(folder / "weights.safetensors", "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            part = file.get_slice(name)
            parameter[:2].copy_(part[:2])
            parameter[2:].copy_(part[2:])
    return model


def changed_in_place(folder: Path) -> nn.Module:
    """What a file holds stays as it is when the user writes to what was read from it."""
    model, state = net(), torch.load(folder / "weights.pt")
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(state[name])
        state[name].mul_(2)
        with torch.no_grad():
            parameter.copy_(state[name])
            parameter.div_(2)
    return model


WAYS: tuple[Callable[[Path], nn.Module], ...] = (
    by_torch,
    by_torch_on_a_gpu,
    by_an_old_file,
    by_an_open_file,
    assigned,
    assigned_to_meta,
    pickled_whole,
    by_the_imported_name,
    by_pickle,
    by_pickle_whole,
    by_safetensors,
    by_load_model,
    by_safe_open,
    by_slices,
    changed_in_place,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_parameter_is_what_the_file_holds(
    stored: tuple[Path, dict[str, Tensor]], way: Callable[[Path], nn.Module]
) -> None:
    folder, state = stored
    model, recording = record(lambda: way(folder), seed=0)
    for _ in range(2):  # it can be made any number of times
        for name, parameter in model.named_parameters():
            assert torch.equal(recording.tensor(parameter, name), state[name]), name


def test_tensors_that_share_memory_in_the_file_do_so_in_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    torch.save(model, tmp_path / "model.pt")
    built, _ = record(lambda: torch.load(tmp_path / "model.pt", weights_only=False), seed=0)
    assert built[0].weight is built[1].weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("part", self.table[1:])


@pytest.mark.parametrize("strict", [True, False])
def test_a_tied_model_is_loaded_by_load_model_of_safetensors(tmp_path: Path, strict: bool) -> None:
    """Found: a missing key head.weight, as all fake tensors lay at address 0."""
    theirs = Tied()
    save_model(theirs, tmp_path / "tied.safetensors")

    def build() -> nn.Module:
        model = Tied()
        load_model(model, tmp_path / "tied.safetensors", strict=strict)
        return model

    built, recording = record(build, seed=0)
    made = built.state_dict(keep_vars=True)
    for name, value in theirs.state_dict().items():
        assert torch.equal(recording.tensor(made[name], name), value), name
    assert made["head.weight"] is made["embed.weight"]


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_tied_model_loads_a_state_dict_as_in_plain_pytorch(
    tmp_path: Path, strict: bool, assign: bool
) -> None:
    torch.save(Tied().state_dict(), tmp_path / "tied.pt")
    save_file(
        {name: value.clone() for name, value in Tied().state_dict().items()}, tmp_path / "tied.safetensors"
    )
    for file, read in (("tied.pt", lambda path: torch.load(path)), ("tied.safetensors", load_file)):

        def build(file: str = file, read: Callable[..., Any] = read) -> nn.Module:
            model = Tied()
            model.load_state_dict(read(tmp_path / file), strict=strict, assign=assign)
            return model

        theirs = build().state_dict()
        built, recording = record(build, seed=0)
        for name, value in built.state_dict(keep_vars=True).items():
            assert torch.equal(recording.tensor(value, name), theirs[name]), (file, name)


def test_addresses_of_fake_tensors_tell_what_shares_memory() -> None:
    addresses: dict[str, int] = {}

    def build() -> nn.Module:
        whole, other = torch.zeros(4, 4), torch.zeros(4)
        addresses.update(whole=whole.data_ptr(), row=whole[1].data_ptr(), other=other.data_ptr())
        addresses.update(storage=whole[1].untyped_storage().data_ptr(), none=torch.zeros(0).data_ptr())
        return nn.Linear(1, 1)

    record(build, seed=0)
    assert addresses["row"] - addresses["whole"] == 16
    assert addresses["storage"] == addresses["whole"] != 0
    assert abs(addresses["other"] - addresses["whole"]) > 64
    assert addresses["none"] == 0


def test_a_module_is_built_on_the_meta_device_and_emptied_before_it_is_initialised() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            layer = nn.Linear(3, 3)
        layer.to_empty(device="cpu")
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer

    built, recording = record(build, seed=0)
    assert torch.equal(recording.tensor(built.weight, "weight"), torch.ones(3, 3))


def test_weights_left_on_the_meta_device_are_refused() -> None:
    """Found: they were traced, and their values were meta tensors."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return net()

    with pytest.raises(UntraceableModel, match=r"0\.0\.weight is still on the meta device.*assign=True"):
        record(build, seed=0)


def test_a_model_of_a_library_that_reads_in_threads_is_what_its_files_hold(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    theirs = GPT2LMHeadModel(GPT2Config(**size))
    theirs.save_pretrained(tmp_path)
    ours, recording = record(lambda: GPT2LMHeadModel.from_pretrained(tmp_path), seed=0)
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert torch.equal(recording.tensor(parameter, name), wanted[name]), name


def mapped_bytes(file: Path) -> int:
    """Of the file, what this process has in memory."""
    resident, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = line.endswith(str(file))
        elif counts and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


@pytest.mark.parametrize("kind", ["weights.pt", "weights.safetensors"])
def test_only_the_parameters_that_are_made_are_read(tmp_path: Path, kind: str) -> None:
    size, file = 2048, tmp_path / kind
    state = {f"{index}.weight": torch.randn(size, size) for index in range(4)}
    save_file(state, file) if kind.endswith("safetensors") else torch.save(state, file)

    def build() -> nn.Module:
        model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(4)])
        model.load_state_dict(torch.load(file) if kind == "weights.pt" else load_file(file))
        return model

    model, recording = record(build, seed=0)
    one = size * size * 4
    assert mapped_bytes(file) < one / 2
    assert torch.equal(recording.tensor(model[2].weight, "2.weight"), state["2.weight"])
    assert mapped_bytes(file) < 2 * one


def test_a_traced_model_has_its_loaded_weights(stored: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = stored

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(48, WIDTH), by_safetensors(folder)
            self.head = nn.Linear(WIDTH, 48)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embed(tokens)))

    training = Training(
        model=Head,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten()),
        optimizer=torch.optim.AdamW,
        dataset=Tokens,
    )
    traced = trace(training, 2)
    for name, value in state.items():
        assert torch.equal(traced.initial(f"body.{name}"), value), name


def test_nothing_is_replaced_after_the_model_is_built(stored: tuple[Path, dict[str, Tensor]]) -> None:
    folder, state = stored
    record(lambda: by_torch(folder), seed=0)
    assert load is torch.load is torch.serialization.load
    for held in (torch.load(folder / "weights.pt"), unpickled(folder / "weights.pickle")):
        assert torch.equal(held["0.0.weight"], state["0.0.weight"])


def test_parameters_that_were_there_before_the_model_was_built_are_refused() -> None:
    """Found: their values, which each process draws anew, were taken for read from a file."""
    made_before = nn.Linear(4, 4)
    with pytest.raises(UntraceableModel, match=r"0\.weight was there before Training\.model"):
        record(lambda: nn.Sequential(made_before, nn.Linear(4, 4)), seed=0)
    assert type(made_before.weight.data) is Tensor  # and they stay as they were
