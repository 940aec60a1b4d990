"""Folders in Hugging Face's format: each family is what its files hold, and trains as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from makara.model.data import Batches
from makara.model.initialisation.initialise import record
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker.check.sectioned_step import SectionedModel
from pretrained import FAMILIES, Folder, every_tensor, plain_loop

WAYS = ({}, {"dtype": torch.bfloat16}, {"dtype": "auto", "low_cpu_mem_usage": True, "device_map": None})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    made: dict[str, Folder] = {}

    def of(family: str) -> Folder:
        if family not in made:
            made[family] = Folder(family, tmp_path_factory.mktemp("pretrained"))
        return made[family]

    return of


@pytest.mark.parametrize("way", WAYS, ids=["fp32", "bf16", "as saved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_loaded_model_is_that_of_plain_pytorch(
    folder: Callable[[str], Folder], family: str, way: dict[str, Any]
) -> None:
    """Found: buffers that are in no file, such as rotary frequencies, could not be made."""
    stored = folder(family)
    ours, recording = record(lambda: stored.load(**way), seed=0)
    theirs = stored.load(**way)
    made = dict(every_tensor(ours))
    for name, wanted in every_tensor(theirs):
        torch.testing.assert_close(
            recording.tensor(made[name], name), wanted.detach(), rtol=0, atol=0, msg=name
        )
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_trains_in_sections_as_in_a_plain_loop(
    folder: Callable[[str], Folder], family: str, dtype: torch.dtype
) -> None:
    training = folder(family).training(dtype=dtype)
    traced = trace(training, 2)
    chain = split(traced, choose_cuts(traced, None))
    assert chain.num_sections > 1
    batches = Batches(training.dataset(), 0, 4, 2)
    micro_batches = [dict(batches.micro_batch(0, i)) for i in range(2)]
    theirs = plain_loop(training, micro_batches, steps=2)
    ours = SectionedModel(chain, training, batches, 0)
    for _ in range(2):
        ours.apply(ours.step())
    # A gradient of bf16 is rounded when it is added to that of the other micro-batch; Makara adds in fp32.
    exact = dtype is torch.float32
    weights = ours.weights()
    for name, wanted in theirs.named_parameters():
        size = float(wanted.detach().float().square().mean().sqrt())
        bound = 1e-5 * size + 1e-7 if exact else 2**-6 * size
        torch.testing.assert_close(
            weights[name],
            wanted.detach(),
            rtol=1e-5 if exact else 2**-6,
            atol=bound,
            msg=name,
        )
