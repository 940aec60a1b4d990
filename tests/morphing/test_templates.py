"""Pipeline templates beside exhaustive search, published examples, and the simulation."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Iterator

import pytest
from calibrations import uniform
from makara.morphing import stage_table, templates
from makara.morphing.stages import WHOLE
from makara.morphing.templates import TemplateStage, cut_costs, stage_costs
from makara.pipeline import Range, grid
from makara.simulator import Calibration, Link, simulate, to_ns

AMPLE = 1 << 50


def random_case(seed: int) -> tuple[Calibration, int, int, int]:
    """(calibration, VMs, devices of each, bytes of a device): small enough to try every pipeline."""
    rng = random.Random(seed)
    num = rng.randint(1, 6)

    def times(most: int) -> tuple[float, ...]:
        return tuple(float(rng.randint(1, most)) for _ in range(num))

    def sizes() -> tuple[int, ...]:
        """Some larger than what is kept of the sections: then a longer stage may need less memory."""
        return tuple(rng.randint(0, rng.choice([9, 30])) for _ in range(num - 1))

    calibration = uniform(
        num,
        forward_s=times(5),
        backward_s=times(9),
        state_bytes=tuple(rng.randint(1, 9) for _ in range(num)),
        activation_bytes=tuple(rng.randint(0, 9) for _ in range(num)),
        cut_bytes=sizes(),
        grad_cut_bytes=sizes(),
        inter_vm=Link(latency_s=rng.choice([0.0, 0.3]), bytes_per_s=rng.choice([1e18, 4.0, 1.0])),
        intra_vm=Link(latency_s=0.0, bytes_per_s=rng.choice([1e18, 9.0])),
        operation_s=rng.choice([0.0, 0.1]),
    )
    devices = rng.choice([1, 1, 2, 3])
    return calibration, rng.randint(1, 6 if devices == 1 else 3), devices, rng.choice([AMPLE, 60, 35])


def every_pipeline(num: int, num_vms: int, per_vm: int) -> Iterator[tuple[TemplateStage, ...]]:
    """All ways to cut sections and to give stages devices of one VM, none left over."""
    devices = num_vms * per_vm
    for depth in range(1, min(num, devices) + 1):
        for cuts in itertools.combinations(range(1, num), depth - 1):
            spans = [Range(*pair) for pair in itertools.pairwise((0, *cuts, num))]
            for widths in itertools.product(range(1, per_vm + 1), repeat=depth):
                ends = list(itertools.accumulate(widths))
                inside = all(
                    (end - width) // per_vm == (end - 1) // per_vm
                    for end, width in zip(ends, widths, strict=True)
                )
                if ends[-1] == devices and inside:
                    yield tuple(map(TemplateStage, spans, widths))


def time_ns(
    calibration: Calibration, stages: tuple[TemplateStage, ...], per_vm: int, capacity: int, num: int
) -> int | None:
    """Of so many micro-batches, as the module's docstring defines it; None: it does not fit."""
    table, row = stage_table(calibration), calibration.num_sections + 1
    costs, cuts = stage_costs(table, capacity), cut_costs(calibration)
    places = [stage.range.start * row + stage.range.stop for stage in stages]
    if not all(costs.window[place] for place in places):
        return None
    ends = list(itertools.accumulate(stage.width for stage in stages))
    total = 0
    for number, (stage, place) in enumerate(zip(stages, places, strict=True)):
        lead = trip = 0
        for other in range(len(stages)):
            stop, near = stages[other].range.stop, ends[other] % per_vm != 0
            wire = (cuts.near_ns if near else cuts.far_ns)[stop]
            if other < number:
                lead += costs.trip_ns[places[other]] + wire
            else:
                trip += costs.trip_ns[places[other]] + wire
        near = ends[number] % per_vm != 0
        busy = (cuts.near_work_ns if near else cuts.far_work_ns)[stage.range.stop]
        most = -(-num // stage.width)
        steady = (most - 1) * max(costs.work_ns[place], busy)
        waits = most * trip // costs.window[place]
        total = max(total, lead + costs.trip_ns[place] + steady, lead + waits)
    return total


@pytest.mark.parametrize("block", range(4))
def test_templates_are_as_good_as_every_pipeline_there_is(block: int) -> None:
    seen = 0
    for seed in range(500 * block, 500 * (block + 1)):
        calibration, max_vms, per_vm, capacity = random_case(seed)
        num = random.Random(seed).choice([1, 2, 3, 7, 30, 1000])
        found = templates(stage_table(calibration), num, max_vms, per_vm, capacity)
        for num_vms in range(1, max_vms + 1):
            ways = every_pipeline(calibration.num_sections, num_vms, per_vm)
            times = {stages: time_ns(calibration, stages, per_vm, capacity, num) for stages in ways}
            best = min((each for each in times.values() if each is not None), default=None)
            template = found.get(num_vms)
            assert (template is None) == (best is None), (seed, num_vms)
            if template is not None:
                assert times[template.stages] == best == template.time_ns(num), (seed, template)
                done = template.done_by(template.time_ns(num))
                assert done >= num
                assert template.time_ns(done) <= template.time_ns(num) < template.time_ns(done + 1)
                seen += 1
    assert seen > 500


def test_published_examples_of_balanced_stages() -> None:
    """Six layers of weights 2, 4, ..., 12."""
    weights = tuple(2.0 * (number + 1) for number in range(6))
    calibration = uniform(6, forward_s=(0.0,) * 6, backward_s=weights)
    found = templates(stage_table(calibration), 24, 4, 1, AMPLE)
    cuts = {num: [stage.range.stop for stage in found[num].stages[:-1]] for num in (2, 3, 4)}
    assert cuts == {2: [4], 3: [3, 5], 4: [3, 4, 5]}


def test_two_workers_of_a_vm_take_turns_where_a_wire_between_them_is_slow() -> None:
    slow = Link(latency_s=0.0, bytes_per_s=1.0)
    calibration = uniform(2, cut_bytes=(10,), grad_cut_bytes=(10,), intra_vm=slow)
    best = templates(stage_table(calibration), 10, 1, 2, AMPLE)[1]
    assert best.stages == (TemplateStage(Range(0, 2), 2),)
    assert best.time_ns(10) == best.time_ns(9) == 5 * to_ns(6.0)
    assert templates(stage_table(uniform(2)), 10, 1, 2, AMPLE)[1].stages[0].width == 2
    fast_only_once = templates(stage_table(uniform(2)), 1, 1, 2, AMPLE)[1]
    assert fast_only_once.time_ns(1) == to_ns(6.0)


def test_memory_makes_a_stage_wait_for_micro_batches_to_come_back() -> None:
    table = stage_table(uniform(4))
    free = templates(table, 10, 4, 1, AMPLE)[4]
    one = max(table.memory(start, start + 1, WHOLE).least_bytes for start in range(4))
    tight = templates(table, 10, 4, 1, one)[4]
    assert free.time_ns(10) == to_ns(9.0 + 10 * 3.0)
    assert tight.time_ns(10) == to_ns(10 * 12.0)
    assert templates(table, 10, 4, 1, one - 1) == {}


def test_the_time_is_that_of_the_simulation() -> None:
    """Uneven sections, and a wire that costs time."""
    for seed in range(20):
        rng = random.Random(seed)
        calibration = uniform(
            9,
            forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(9)),
            backward_s=tuple(rng.uniform(1.5, 2.5) for _ in range(9)),
            inter_vm=Link(latency_s=0.02, bytes_per_s=100.0),
        )
        for num, best in templates(stage_table(calibration), 60, 9, 1, AMPLE).items():
            plan = grid([stage.range for stage in best.stages], 1, 60)
            simulated = simulate(plan, calibration, timeline=False).pipeline_s
            assert best.time_ns(60) / 1e9 == pytest.approx(simulated, rel=0.025), (seed, num)


@pytest.mark.parametrize("name", ["num_micro_batches", "max_vms", "devices_per_vm"])
def test_an_argument_that_is_not_positive_is_named(name: str) -> None:
    values = {"num_micro_batches": 1, "max_vms": 1, "devices_per_vm": 1, name: 0}
    with pytest.raises(ValueError, match=f"^{name}: 0 is not a whole number >= 1$"):
        templates(stage_table(uniform(1)), capacity_bytes=AMPLE, **values)


def test_compiled_code_finds_what_its_source_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    cases = [random_case(seed) for seed in range(100)]

    def found() -> list[object]:
        return [templates(stage_table(one), 20, vms, devices, has) for one, vms, devices, has in cases]

    own = importlib.import_module("makara.morphing.templates")
    interpreted = found()
    monkeypatch.setattr(own._COMPILER, "ready", own._compiled(in_memory=True))
    assert found() == interpreted
