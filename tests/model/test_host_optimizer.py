"""The optimizer in host memory: the same bits as on the device, and state that moves between both."""

from __future__ import annotations

import pytest
import torch
from in_process import same_bits
from makara.model.data import Batches
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.worker.sections.ranges import RangeRuntime
from models import Tokens, tied_gpt
from whole_runtime import gradients_of, whole_runtime

STEPS = 4


@pytest.fixture(scope="module")
def chain() -> Sections:
    traced = trace(tied_gpt(), 2, 3)
    return split(traced, choose_cuts(traced, 3))


def trained(chain: Sections, on_host: list[bool]) -> RangeRuntime:
    """After a step with the optimizer in each of these places."""
    runtime = whole_runtime(chain, tied_gpt(), 3)
    batch = Batches(Tokens(), 3, 8, 2).micro_batch(0, 0)
    for step, place in enumerate(on_host):
        runtime.place_optimizers(on_host=place)
        runtime.forward(step, 0, 0, chain.num_sections, {}, batch, keep=True)
        total = gradients_of(runtime)
        for section in runtime.sections.values():
            section.apply(step, total, torch.tensor(0.5))
    return runtime


@pytest.mark.parametrize(
    "places", [[True] * STEPS, [False, True, True, False], [True, False, True, True]], ids=str
)
def test_updates_on_the_host_give_the_bits_of_the_device(chain: Sections, places: list[bool]) -> None:
    plain, moved = trained(chain, [False] * STEPS), trained(chain, places)
    for index, section in plain.sections.items():
        other = moved.sections[index]
        assert other.optimizer_on_host == places[-1]
        for name, parameter in section.parameters.items():
            assert same_bits(parameter, other.parameters[name])
        (tensors, scalars), (found, numbers) = section.state(), other.state()
        assert scalars == numbers
        assert set(tensors) == set(found)
        assert all(same_bits(tensor, found[name]) for name, tensor in tensors.items())


def test_the_device_keeps_no_optimizer_state(chain: Sections) -> None:
    runtime = trained(chain, [True])
    section = runtime.sections[1]
    assert section.optimizer is not None
    updated = {id(p) for group in section.optimizer.param_groups for p in group["params"]}
    assert not updated & {id(parameter) for parameter in section.parameters.values()}


def test_a_section_that_comes_later_is_placed_like_the_others(chain: Sections) -> None:
    runtime = RangeRuntime(chain, tied_gpt(), 3)
    runtime.place_optimizers(on_host=True)
    assert runtime.host(0).optimizer_on_host
