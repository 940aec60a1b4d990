"""Hosts of a section whose bits differ are found, and named where most hosts agree."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.pipeline import Range, grid
from makara.pipeline.contributions import WORD
from makara.worker.execution.replicas import ReplicaCheck, compared_hosts, corruption_of, differing
from makara.worker.sections import state_hash
from makara.worker.sections.runtime import SectionRuntime
from makara.worker.sections.state_hash import ROUND, changing_hash, section_hash
from models import normed_mlp, tied_gpt
from torch import Tensor

CPU = torch.device("cpu")
SEED = 5


@cache
def model(name: str) -> tuple[Training, Sections]:
    training = {"gpt": tied_gpt, "normed": normed_mlp}[name]()
    traced = trace(training, 2, SEED)
    return training, split(traced, choose_cuts(traced))


def host(name: str = "gpt", index: int = 0) -> SectionRuntime:
    training, chain = model(name)
    section = SectionRuntime(chain, index, training, SEED)
    section.apply(0, {n: torch.full_like(p, 1e-3) for n, p in section.trainable.items()})
    return section


def whole(section: SectionRuntime) -> int:
    return section_hash(section, None, lambda piece: piece)


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit, counted over the tensor's elements in logical order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    tensor.detach().copy_(data.view(tensor.dtype).reshape(tensor.shape))


def test_each_flip_of_a_bit_changes_the_hash() -> None:
    section, draw = host(), random.Random(3)
    before = whole(section)
    tensors, _ = section.held()
    for name, tensor in tensors.items():
        bit = draw.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        assert whole(section) != before, (name, bit)
        flip(tensor, bit)
        assert whole(section) == before, name


def test_hosts_with_the_same_bits_in_another_layout_have_one_hash() -> None:
    section, other = host(), host()
    name = next(n for n, p in other.parameters.items() if p.dim() == 2)
    parameter = other.parameters[name]
    parameter.data = parameter.data.t().contiguous().t()
    assert not parameter.is_contiguous()
    assert whole(section) == whole(other)


def test_a_state_that_was_loaded_has_the_hash_of_the_one_that_was_sent() -> None:
    training, chain = model("gpt")
    for index in range(chain.num_sections):
        section = host("gpt", index)
        tensors, scalars = section.state()
        loaded = SectionRuntime(chain, index, training, SEED, initialise=False)
        loaded.load_state({name: tensor.clone() for name, tensor in tensors.items()}, scalars)
        assert whole(loaded) == whole(section)


class Timed(torch.optim.SGD):
    """Notes in itself how long its steps took, and numbers of other types than a transfer gives in its groups
    and its state."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls = getattr(self, "calls", 0) + 1
        self.last_s = random.SystemRandom().random()
        self.times = torch.tensor([self.last_s])
        for group in self.param_groups:
            group |= {"rate": np.float64(0.1), "kind": Kind.WARM, "counted": self.calls}
            for parameter in group["params"]:
                self.state[parameter]["mean"] = np.float64(0.1) + self.calls
        super().step()


class Kind(IntEnum):
    WARM = 3


def test_notes_of_an_optimizer_and_types_that_a_transfer_changes_raise_no_alarm() -> None:
    training, chain = model("gpt")
    timed = replace(training, optimizer=lambda named: Timed(named, lr=0.1))
    sections = [SectionRuntime(chain, 0, timed, SEED) for _ in range(2)]
    for section in sections:
        section.apply(0, {n: torch.full_like(p, 1e-3) for n, p in section.trainable.items()})
    tensors, scalars = sections[0].state()
    assert any(name.endswith("/self/last_s") for name in scalars), "a host that copies it gets them"
    loaded = SectionRuntime(chain, 0, timed, SEED, initialise=False)
    loaded.load_state({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(scalars)))
    assert whole(sections[0]) == whole(sections[1]) == whole(loaded)
    assert loaded.optimizer is not None
    loaded.optimizer.param_groups[0]["counted"] += 1
    assert whole(loaded) != whole(sections[0]), "numbers in groups count"


def test_conjugate_and_negative_views_are_hashed_as_the_values_that_they_stand_for() -> None:
    section, other = host(), host()
    value = torch.tensor([1 + 2j, 3 - 4j])
    name = next(iter(section.parameters))
    for one, tensors in ((section, (value.conj(), value.conj().imag)), (other, (value, value.imag))):
        assert one.optimizer is not None
        state = one.optimizer.state[one.parameters[name]]
        state["conjugate"], state["negative"] = tensors
    assert whole(section) != whole(other)
    assert other.optimizer is not None
    state = other.optimizer.state[other.parameters[name]]
    state["conjugate"], state["negative"] = value.conj().resolve_conj(), -value.imag
    assert whole(section) == whole(other)


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_hash, "_LEAST_BYTES", 1 << 10)
    monkeypatch.setattr(state_hash, "_ROW", 1 << 3)
    monkeypatch.setattr(state_hash, "_PIECE_BYTES", 1 << 9)


@pytest.mark.usefixtures("small_portions")
def test_each_byte_is_hashed_once_in_a_round_whatever_the_portions() -> None:
    section, draw = host(index=1), random.Random(4)
    tensors, _ = section.held()
    places = [section_hash(section, step, lambda piece: piece) for step in range(ROUND)]
    assert len({place for place in places if place}) > 4, "several portions"
    for name, tensor in tensors.items():
        bit = draw.randrange(8 * tensor.nbytes)
        flip(tensor, bit)
        after = [section_hash(section, step, lambda piece: piece) for step in range(ROUND)]
        assert sum(a != b for a, b in zip(places, after, strict=True)) == 1, name
        flip(tensor, bit)


def test_bytes_that_fill_no_word_and_rows_that_fill_no_piece_count() -> None:
    draw = random.Random(6)
    for size in (1, 7, 8, 9, 8 * 8192 - 1, 8 * 8192, 8 * 8192 + 3, 3 * 8 * 8192 + 8 * 5 + 1):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8)
        before = state_hash._sum(data.numpy())
        for place in {0, size - 1, draw.randrange(size)}:
            data[place] ^= 1 << draw.randrange(8)
            assert state_hash._sum(data.numpy()) != before, (size, place)
            before = state_hash._sum(data.numpy())


def test_a_buffer_that_each_step_computes_from_itself_is_hashed_in_each_step() -> None:
    _, chain = model("normed")
    index = next(s.index for s in chain.sections if s.updates)
    section = host("normed", index)
    before = changing_hash(section)
    flip(section.buffers[section.info.updates[0]], 3)
    assert changing_hash(section) != before


def checks(sections: list[SectionRuntime], bits: list[str]) -> list[ReplicaCheck]:
    plan = grid([Range(0, 1)], len(sections), 5, generation=1)
    compared = compared_hosts(plan, bits)
    return [ReplicaCheck({0: one}, compared, rank, CPU) for rank, one in enumerate(sections)]


def compare(hosts: list[ReplicaCheck]) -> list[int]:
    """The sums of their terms, after each has hashed its whole state."""
    for one in hosts:
        one.begin(0, whole=True)
    for one in hosts:
        one.end()
    return [sum(column) & WORD for column in zip(*(one.terms() for one in hosts), strict=True)]


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 5])
def test_terms_add_up_to_zero_only_while_all_hosts_hold_the_same_bits(num_hosts: int) -> None:
    sections = [host() for _ in range(num_hosts)]
    weight = next(iter(sections[0].parameters))
    hosts = checks(sections, [""] * num_hosts)
    assert [term for one in hosts for term in one.terms()] == [0] * num_hosts, "nothing is hashed yet"
    assert compare(hosts) == [0]
    for section in sections:
        flip(section.parameters[weight], 31)  # a sign: a host's factor may be even
        assert compare(hosts) != [0]
        flip(section.parameters[weight], 31)
    assert compare(hosts) == [0]
    for one in hosts:
        one.close()


def test_hosts_of_other_bits_are_compared_among_themselves_alone() -> None:
    plan = grid([Range(0, 2)], 5, 10, generation=1)
    assert compared_hosts(plan, [""] * 5) == {0: [[0, 1, 2, 3, 4]], 1: [[0, 1, 2, 3, 4]]}
    assert compared_hosts(plan, ["a", "b", "a", "c", "b"]) == {0: [[0, 2], [1, 4]], 1: [[0, 2], [1, 4]]}
    sections = [host() for _ in range(4)]
    weight = next(iter(sections[0].parameters))
    for section in sections[2:]:
        flip(section.parameters[weight], 7)  # computed by another kind of processor
    hosts = checks(sections, ["a", "a", "b", "b"])
    assert compare(hosts) == [0]
    flip(sections[3].parameters[weight], 8)
    assert compare(hosts) != [0]
    for one in hosts:
        one.close()


def test_the_minority_is_suspected_and_without_a_majority_all_hosts() -> None:
    three = {0: [[0, 1, 2]], 1: [[0, 1, 2]]}
    alike = {0: 7, 1: 8}
    assert differing(three, [alike, alike, alike]) == {}
    found = differing(three, [alike, {0: 7, 1: 9}, alike])
    assert found == {1: ({1}, True)}
    told = corruption_of(4, 6, [1], ["a", "b", "c"], found)
    assert (told.suspects, told.has_majority) == (["b"], True)
    assert differing(three, [{0: 7, 1: 1}, {0: 7, 1: 2}, {0: 7, 1: 3}]) == {1: ({0, 1, 2}, False)}
    assert differing({0: [[0, 1]]}, [{0: 1}, {0: 2}]) == {0: ({0, 1}, False)}
    told = corruption_of(4, 6, [1], ["a", "b", "c"], {})
    assert (told.suspects, told.has_majority) == ([], False)


def test_a_host_and_those_that_copied_its_state_count_once() -> None:
    """Found: a wrong host was copied, and with its copy outvoted the right one."""
    three, right, wrong = {0: [[0, 1, 2]]}, {0: 7}, {0: 9}
    copied: list[dict[int, str]] = [{}, {0: "b"}, {0: "b"}]
    assert differing(three, [right, wrong, wrong], copied) == {0: ({0, 1, 2}, False)}
    assert differing(three, [right, right, wrong], copied) == {0: ({2}, True)}, "it differs from its source"
    four: list[dict[int, str]] = [{}, {}, {0: "c"}, {0: "c"}]
    assert differing({0: [[0, 1, 2, 3]]}, [right, right, wrong, wrong], four) == {0: ({2, 3}, True)}
    assert differing(three, [right, wrong, wrong], [{}, {1: "b"}, {1: "b"}]) == {0: ({0}, True)}, (
        "another section was copied"
    )


def test_origins_count_until_all_bytes_were_compared() -> None:
    origins: list[dict[int, str]] = [{0: "a"}, {0: "a"}]
    check = ReplicaCheck({0: host()}, {0: [[0, 1]]}, 0, CPU, origins)
    for step in range(5, 5 + ROUND + 2):
        check.begin(step)
        check.end()
        assert origins == [{0: "a"}, {0: "a"}]
    check.begin(5 + ROUND + 2)
    check.end()
    check.close()
    assert origins == [{}, {}]


def test_the_hash_of_a_portion_is_not_taken_for_that_of_the_state() -> None:
    check = ReplicaCheck({0: host()}, {0: [[0, 1]]}, 0, CPU)
    check.begin(3)
    with pytest.raises(AssertionError, match="a portion is not all of the state"):
        check.begin(3, whole=True)
    check.end()
    assert check.begin(4, whole=True) is check.begin(4), "a portion is part of all"
    check.end()
    check.close()


@pytest.mark.parametrize("generations", [3, pytest.param(25, marks=pytest.mark.soak)])
def test_no_step_raises_an_alarm_whoever_was_copied_from_whom(generations: int) -> None:
    """400 steps in each generation."""
    training, chain = model("normed")
    index = next(s.index for s in chain.sections if s.updates)
    sections = [host("normed", index) for _ in range(2)]
    generator, plan = (
        torch.Generator().manual_seed(8),
        grid([Range(0, chain.num_sections)], 2, 4, generation=1),
    )
    compared = compared_hosts(plan, ["", ""])
    for generation in range(generations):
        sent = sections[generation % 2]
        tensors, scalars = sent.state()
        newcomer = SectionRuntime(chain, index, training, SEED, initialise=False)
        newcomer.load_state({name: tensor.clone() for name, tensor in tensors.items()}, scalars)
        sections = [sent, newcomer]
        hosts = [ReplicaCheck({index: one}, compared, rank, CPU) for rank, one in enumerate(sections)]
        for step in range(400):
            gradients = {n: torch.randn(p.shape, generator=generator) for n, p in sent.trainable.items()}
            statistics = {n: sent.buffers[n] + 1 for n in sent.info.updates}
            for one in hosts:
                one.begin(step, whole=step % 50 == 0)
            for one, section in zip(hosts, sections, strict=True):
                one.end()
                section.apply(step, gradients, statistics=statistics)
            assert sum(one.terms()[index] for one in hosts) & WORD == 0, (generation, step)
            assert hosts[0].hashes is not None
        for one in hosts:
            one.close()
