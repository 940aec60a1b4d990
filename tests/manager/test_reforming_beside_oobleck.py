"""After random deaths, what we decide beside what Oobleck's rules make of the same state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from reforming import Death, deaths, models

FEW, MANY = 100, 1000
ROUNDING = 1e-9


def some_deaths(first_seed: int, count: int) -> Iterator[Death]:
    """So many, of jobs of all models in turn."""
    every, found, seed = models(), 0, first_seed
    while found < count:
        for death in deaths(every[seed % len(every)], seed):
            yield death
            found += 1
        seed += 1


@pytest.mark.parametrize(
    ("first_seed", "count"),
    [pytest.param(0, FEW, id="few"), pytest.param(5000, MANY, id="many", marks=pytest.mark.soak)],
)
def test_what_a_death_costs_beside_oobleck(first_seed: int, count: int) -> None:
    """In no case are we worse both in the bytes that move and in goodput, in the sum better in both."""
    ours, theirs, kinds = Counter[str](), Counter[str](), Counter[str]()
    worse: list[str] = []
    for death in some_deaths(first_seed, count):
        (decision, we), (_, they) = death.ours, death.theirs
        kinds[decision.name] += 1
        if we.goodput < they.goodput * (1 - ROUNDING) and we.moved_bytes > they.moved_bytes:
            worse.append(str(death))
        model_bytes = sum(death.model.sizes)  # sums are of parts of the model, and of their speed
        for sums, one in ((ours, we), (theirs, they)):
            sums["bytes moved"] += one.moved_bytes / model_bytes
            sums["bytes received by one"] += one.most_bytes / model_bytes
            sums["samples/s"] += one.samples_per_s / they.samples_per_s
            sums["done until the next loss"] += one.done_per_s / they.samples_per_s
            sums["goodput"] += one.goodput / they.samples_per_s
    print(f"{kinds.total()} deaths from seed {first_seed} on: {dict(kinds)}")
    for name in ours:
        print(f"{name}: {ours[name]:.1f} beside {theirs[name]:.1f}")
    assert not worse, "\n".join(worse)
    assert set(kinds) == {"best", "reformed", "rerouted"}
    for name in ("bytes moved", "bytes received by one"):
        assert ours[name] < theirs[name]
    for name in ("samples/s", "done until the next loss", "goodput"):
        assert ours[name] > theirs[name]
