"""Each section lives on as many VMs as the job asks for, as long as there are VMs enough."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from calibrations import uniform
from makara.morphing import Choice, Infeasible, Request, Slot, choose, stage_table
from makara.morphing.copies import copies_of, least_vms, most_copies, spread
from makara.morphing.placement import Roster
from makara.morphing.stages import Mode
from makara.pipeline import Range
from makara.simulator import Calibration


def slots(num_vms: int, per_vm: int, memory_bytes: int = 10_000) -> list[Slot]:
    return [Slot(f"v{vm}.{i}", f"v{vm}", memory_bytes) for vm in range(num_vms) for i in range(per_vm)]


def asked(calibration: Calibration, workers: list[Slot], num: int = 8, **change: Any) -> Request:
    return Request(
        calibration=calibration,
        num_sections=calibration.num_sections,
        num_micro_batches=num,
        workers=workers,
        generation=1,
        **change,
    )


def copies(request: Request) -> int:
    answer = choose(request)
    assert isinstance(answer, Choice), answer
    vm_of = {slot.worker: slot.vm for slot in request.workers}
    return copies_of(answer.plan, [vm_of[worker] for worker in answer.workers])


def memory_for(calibration: Calibration, sections: int) -> int:
    """What a worker needs for so many sections and recomputation, at most."""
    table = stage_table(calibration)
    starts = range(calibration.num_sections - sections + 1)
    return max(table.memory(start, start + sections, Mode(recompute=True)).least_bytes for start in starts)


@pytest.mark.parametrize("unequal", ["off", "auto"])
@pytest.mark.parametrize("tolerated", [1, 2])
def test_every_section_lives_on_enough_vms_from_n0_times_as_many_on(tolerated: int, unequal: str) -> None:
    seen = 0
    for seed in range(40):
        rng = random.Random(seed)
        per_vm, num = rng.choice([1, 1, 2, 4]), rng.randint(2, 9)
        calibration = uniform(num, forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(num)))
        memory = memory_for(calibration, rng.randint(1, num))
        least = least_vms(calibration, memory, per_vm, recompute=True, on_host=False)
        assert least is not None
        for num_vms in range(least, (tolerated + 1) * least + 3):
            workers = slots(num_vms, per_vm, memory)
            request = asked(
                calibration,
                workers,
                rng.randint(3, 9),
                tolerated_failures=tolerated,
                unequal_pipelines=unequal,
            )
            found = copies(request)
            # Fewer VMs may do as well, where a VM's workers do not divide evenly by the stages.
            assert found >= min(tolerated + 1, num_vms // least), (seed, num_vms, least)
            seen += 1
    assert seen > 150


def test_n0_is_the_fewest_vms_that_there_is_a_plan_for() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        per_vm, num = rng.choice([1, 2, 3]), rng.randint(1, 8)
        sizes = tuple(rng.randint(20, 200) for _ in range(num))
        calibration = uniform(
            num,
            state_bytes=sizes,
            gradient_bytes=tuple(size // 2 for size in sizes),
            cut_bytes=tuple(rng.choice([4, 150]) for _ in range(num - 1)),  # more sections may need less
        )
        memory = rng.randint(150, 900)
        recompute = rng.choice([True, False])
        least = least_vms(calibration, memory, per_vm, recompute=recompute, on_host=False)
        mode = "auto" if recompute else "off"
        fits = [
            num_vms
            for num_vms in range(1, num + 1)
            if isinstance(choose(asked(calibration, slots(num_vms, per_vm, memory), recompute=mode)), Choice)
        ]
        assert least == min(fits, default=None), seed


def test_few_micro_batches_go_to_different_vms() -> None:
    assert copies(asked(uniform(2), slots(3, 4), 2, tolerated_failures=1)) >= 2


def test_a_pipeline_that_does_not_divide_a_vm_leaves_workers_idle_for_a_second_copy() -> None:
    calibration = uniform(3)
    memory = memory_for(calibration, 1)
    request = asked(calibration, slots(2, 4, memory), tolerated_failures=1)
    assert copies(replace(request, tolerated_failures=0)) == 1
    assert copies(request) == 2


def test_a_shape_with_too_few_copies_is_rejected_and_says_why() -> None:
    answer = choose(asked(uniform(4), slots(4, 1), tolerated_failures=1))
    assert isinstance(answer, Choice)
    rejected = {row.shape: row.rejected for row in answer.candidates}
    assert rejected["3x1"] == ("a section would live on 1 VM, resilience.tolerated_failures asks for 2 VMs")
    assert rejected["4x1"] == rejected["3x1"]


def test_too_few_vms_have_as_many_copies_as_can_be_had() -> None:
    calibration = uniform(4)
    memory = memory_for(calibration, 2)
    found = [copies(asked(calibration, slots(n, 1, memory), tolerated_failures=2)) for n in range(2, 9)]
    assert found[:5] == [1, 1, 2, 2, 3]
    nothing = choose(asked(calibration, slots(1, 1, memory), tolerated_failures=2))
    assert isinstance(nothing, Infeasible)


def test_slow_workers_do_not_take_the_second_copy_away() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        per_vm, num = rng.choice([1, 2, 3]), rng.randint(1, 6)
        calibration = uniform(num)
        memory = memory_for(calibration, rng.randint(1, num))
        least = least_vms(calibration, memory, per_vm, recompute=True, on_host=False)
        assert least is not None
        workers = [
            replace(slot, slowdown=rng.choice([1.0, 1.0, 2.0])) for slot in slots(2 * least, per_vm, memory)
        ]
        held = {slot.worker: Range(0, num) for slot in workers if rng.random() < 0.5}
        assert copies(asked(calibration, workers, 6, tolerated_failures=1, holding=held)) >= 2, seed


def test_a_grid_is_spread_over_as_many_vms_as_can_be() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        depth = rng.randint(1, 5)
        workers = [
            Slot(f"v{vm}.{i}", f"v{vm}", 1)
            for vm in range(rng.randint(1, 6))
            for i in range(rng.randint(1, 6))
        ]
        most = most_copies(workers, depth)
        stages = [Range(stage, stage + 1) for stage in range(depth)]
        for replicas in range(1, len(workers) // depth + 1):
            placed = spread(Roster(workers, {}), depth * replicas, stages, {}, ())
            assert len(set(placed)) == depth * replicas
            hosts = min(len({slot.vm for slot in placed[stage::depth]}) for stage in range(depth))
            assert hosts >= min(replicas, most), (seed, replicas)
