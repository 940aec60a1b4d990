"""Models as users bring them, at every shape: the same bits as one plain process, and the same model as
theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shapes import EAGER, REFERENCE, Forge, Question, Shape, differing
from zoo import ZOO

SHAPES = (Shape(1, 1), Shape(2, 1), Shape(2, 2, recompute=True), Shape(3, 2))


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    made = Forge(tmp_path_factory.mktemp("forge"))
    yield made
    made.close()


@pytest.mark.parametrize("name", ZOO)
def test_every_shape_ends_with_the_bits_of_the_reference_dropout_on(
    forge: Forge, tmp_path: Path, name: str
) -> None:
    question = Question(f"zoo:{name}", {"dropout": 0.1}, "exact", SHAPES, (REFERENCE,))
    endings = forge.ask(question, tmp_path)
    reference = endings[REFERENCE]
    for shape in SHAPES:
        found = endings[str(shape)]
        assert found.losses == reference.losses, shape
        assert differing(found, reference) == [], shape


@pytest.mark.parametrize("name", ZOO)
def test_fast_sums_agree_with_the_users_own_module_and_gradient_accumulation(
    forge: Forge, tmp_path: Path, name: str
) -> None:
    question = Question("zoo:by_sgd", {"entry": name}, "fast", SHAPES, (EAGER,))
    endings = forge.ask(question, tmp_path)
    eager = endings[EAGER]
    for shape in SHAPES:
        found = endings[str(shape)]
        assert found.losses == pytest.approx(eager.losses, rel=1e-5), shape
        assert found.state.keys() >= eager.state.keys(), shape
        for entry, wanted in eager.state.items():
            # The absolute bound is for gradients that are zero but for rounding; weights are 0.02 and more.
            torch.testing.assert_close(found.state[entry], wanted, rtol=1e-5, atol=1e-7)


def test_the_comparison_sees_another_seed_and_tells_what_a_rank_raised(forge: Forge, tmp_path: Path) -> None:
    """Otherwise the others could not fail."""
    shapes = (Shape(2, 1),)
    question = Question("models:untied_mlp", {}, "exact", shapes, (REFERENCE,), steps=2)
    one = forge.ask(question, tmp_path / "one")[str(shapes[0])]
    other = forge.ask(replace(question, seed=8), tmp_path / "other")[REFERENCE]
    assert "weights/layers.0.weight" in differing(one, other)
    with pytest.raises(AssertionError, match="RuntimeError: no loss today"):
        forge.ask(replace(question, entry="models:broken_loss"), tmp_path / "broken")
