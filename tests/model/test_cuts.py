"""Which cuts are chosen: the model's blocks, the user's marks, K as asked; never sections of microseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from makara.model.errors import UserCodeError
from makara.model.partition.balanced import best_cuts
from makara.model.partition.cuts import MAX_SMALL_SECTIONS
from makara.model.partition.flops import compute_nodes
from makara.model.partition.partition import Sections, choose_cuts, sections_for_workers, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from models import Tokens, tied_gpt
from torch import Tensor, nn


class HeavyHead(nn.Module):
    """Ten small blocks between much heavier ends."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
            for _ in range(10)
        )
        self.expand, self.head = nn.Linear(16, end), nn.Linear(end, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.expand(x))


def starts(chain: Sections) -> list[str]:
    return [section.label.split(" ")[0] for section in chain.sections]


def chain_of(
    training: Training, num_sections: int | None = None, marks: Sequence[str] | None = None
) -> Sections:
    traced = trace(training, 2)
    return split(traced, choose_cuts(traced, num_sections, marks=marks))


def test_every_block_is_a_section_with_the_embedding_in_the_first_and_the_head_in_the_last() -> None:
    chain = chain_of(tied_gpt(layers=12))
    assert starts(chain) == ["embed", *(f"blocks.{number}" for number in range(1, 12))]
    assert chain.sections[-1].label.startswith("blocks.11 .. head (models.py:")


def test_a_deep_but_tiny_model_does_not_get_a_section_for_each_block() -> None:
    chain = chain_of(tied_gpt(layers=20))
    assert chain.num_sections == MAX_SMALL_SECTIONS
    named = {f"blocks.{number}" for number in range(20)} | {"embed"}
    assert set(starts(chain)) <= named, "every cut is between two blocks"


def test_a_tiny_model_is_cut_for_as_many_workers_as_the_job_may_get() -> None:
    traced = trace(tied_gpt(layers=20), 2)
    for workers, num_sections in ((8, 16), (16, 16), (18, 18), (20, 20), (200, 20)):
        assert len(choose_cuts(traced, workers=workers)) + 1 == num_sections
    assert choose_cuts(traced, 5, workers=20) == choose_cuts(traced, 5)
    assert [sections_for_workers(traced, workers) for workers in (1, 16, 18)] == [0, 0, 18]


def test_ends_much_heavier_than_a_block_are_sections_of_their_own() -> None:
    light = chain_of(dataclasses.replace(tied_gpt(), model=lambda: HeavyHead(32)))
    assert light.num_sections == 10
    heavy = chain_of(dataclasses.replace(tied_gpt(), model=lambda: HeavyHead(200)))
    assert heavy.num_sections == 11
    assert starts(heavy)[-1] == "expand"


def test_marks_decide_where_sections_begin() -> None:
    chain = chain_of(tied_gpt(), marks=["blocks.2", "blocks.3.norm2", "head"])
    assert starts(chain) == ["embed", "blocks.2", "blocks.3.norm2", "head"]
    assert chain_of(tied_gpt(), 2, marks=["blocks.1"]).num_sections == 2
    assert chain_of(tied_gpt(), marks=[]).num_sections == 1


@pytest.mark.parametrize(
    ("marks", "num_sections", "message"),
    [
        (["block.2"], None, r"no module 'block\.2' runs .* did you mean 'blocks\.2'"),
        (["embed"], None, "'embed' is where the model begins"),
        (["blocks.1", "blocks.1.norm1"], None, r"'blocks\.1' and 'blocks\.1\.norm1' begin at the same"),
        (["blocks.1", "blocks.2"], 6, "2 marks make 3 sections, but parallelism.num_sections is 6"),
    ],
)
def test_a_mark_that_cannot_be_is_named(marks: list[str], num_sections: int | None, message: str) -> None:
    with pytest.raises(UserCodeError, match=f"Training.cuts: .*{message}"):
        choose_cuts(trace(tied_gpt(), 2), num_sections, marks=marks)


def test_marks_are_a_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"Training\.cuts: expected a list of names, got str"):
        dataclasses.replace(tied_gpt(), cuts="blocks.1")


def test_prices_given_move_the_cuts() -> None:
    traced = trace(tied_gpt(layers=8), 2)
    nodes = compute_nodes(traced.graph)
    late = [0.0 if position < len(nodes) // 2 else 1.0 for position in range(len(nodes))]
    assert choose_cuts(traced, 2, work=late)[0] > choose_cuts(traced, 2)[0]


def test_a_model_of_one_operation_is_one_section() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, image: Tensor) -> Tensor:
            return self.layer(image)

    class Images(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"image": torch.full((12,), float(index))}

    training = dataclasses.replace(tied_gpt(), model=One, dataset=Images)
    assert chain_of(training).num_sections == 1
    assert chain_of(training).sections[0].label.startswith("layer (test_cuts.py:")


def test_the_best_cuts_are_the_best_of_all() -> None:
    """Against every choice, on small cases with work of all kinds, one heavy atom among them."""
    generator = torch.Generator().manual_seed(5)
    for case in range(20):
        shares = torch.rand(9, generator=generator).tolist()
        shares[case % 9] *= 1 + 10 * (case % 2)
        work = [0.0, *torch.tensor(shares, dtype=torch.float64).cumsum(0).tolist()]
        places = list(range(1, 9))
        for wanted in range(1, 9):
            mean = work[-1] / wanted

            def price(cuts: Sequence[int], mean: float = mean, work: list[float] = work) -> float:
                return sum(((work[b] - work[a]) / mean - 1) ** 2 for a, b in pairwise([0, *cuts, 9]))

            found = best_cuts(places, dict.fromkeys(places, 4), work, wanted)
            least = min(price(cuts) for cuts in combinations(places, wanted - 1))
            assert price(found) == pytest.approx(least), (case, wanted)
