"""Memory: what calls hold is measured phase by phase, and a worker's peak is made up of it."""

from __future__ import annotations

import torch
from calibrations import frozen_beginning, uniform
from makara.pipeline import Range, grid
from makara.simulator import simulate, sizes_of
from makara.worker.profiling.footprint import Footprint, Footprints
from plans import stages


def test_each_phase_tells_its_peak_and_what_it_kept() -> None:
    with Footprints("cpu") as memory:
        kept = torch.empty(1000)
        memory.mark()
        brief = torch.empty(2000)
        del brief
        memory.mark()
        del kept
        memory.mark()
    assert memory.phases == [Footprint(4000, 4000), Footprint(8000, 0), Footprint(0, -4000)]


def test_a_backward_is_given_what_it_frees() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    with Footprints("cpu") as memory:
        output = [torch.tanh(weight).sum()]
        memory.mark()
        gradient = torch.autograd.grad(output.pop(), weight)[0]
        memory.mark()
    forward, backward = memory.phases
    assert forward.kept_bytes >= gradient.nbytes
    assert backward.kept_bytes <= 0  # the gradient in place of the activation


def test_a_peak_is_state_and_snapshot_and_the_larger_of_pipeline_and_update() -> None:
    plan = grid(stages(1), 1, 1)
    with_snapshot = uniform(1, snapshot_bytes=(7,))
    assert simulate(plan, uniform(1)).peak_bytes == (110,)
    assert simulate(plan, with_snapshot).peak_bytes == (110 + 7 + 7,)
    updating = uniform(1, reduced_bytes=(25,), update_peak_bytes=(9,))
    assert simulate(plan, updating).peak_bytes == (100 + 25 + 9,)


def test_a_backward_frees_section_after_section() -> None:
    sizes = sizes_of(uniform(3, backward_peak_bytes=(15, 20, 4)))
    assert sizes.backward_peak(Range(0, 3)) == 20 - 10
    assert sizes.backward_peak(Range(0, 2)) == 20


def test_a_range_that_is_frozen_in_part_keeps_what_enters_the_rest() -> None:
    sizes = sizes_of(uniform(4, **frozen_beginning(4, 2), cut_bytes=(3, 4, 5), batch_bytes=(7, 7, 7, 7)))
    assert sizes.kept(Range(0, 3)) == 10
    assert sizes.held(Range(0, 3)) == 7 + 4
    assert sizes.held(Range(1, 3)) == 7 + 4 - 3  # beyond the inputs
    assert sizes.forward_peak(Range(0, 4)) == 4 + 2 * 10
    assert sizes.brief_forward_peak(Range(0, 4)) == 4 + 10 + 5
    assert sizes.forward_peak(Range(0, 2)) == 10 + 3


def test_snapshots_of_devices_with_their_own_memory_are_not_counted_there() -> None:
    sizes = sizes_of(uniform(2, snapshot_bytes=(7, 7), device_kind="cuda"))
    assert sizes.snapshot([(0, 1), (1, 1)]) == 0
