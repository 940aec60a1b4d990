"""Plans of unequal pipelines beside exhaustive search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from calibrations import uniform
from makara.morphing import Choice, Request, Slot, choose, stage_table, unequal_search
from makara.morphing.packing import Work
from makara.morphing.stages import WHOLE, Mode
from makara.morphing.templates import Template
from makara.morphing.unequal import Combination, combinations, plan_of, pool
from makara.pipeline import Range
from makara.simulator import Calibration, Link, simulate

AMPLE = 1 << 50


def some_calibration(seed: int) -> Calibration:
    rng = random.Random(seed)
    num = rng.randint(2, 6)
    return uniform(
        num,
        forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(num)),
        backward_s=tuple(rng.uniform(1.0, 3.0) for _ in range(num)),
        inter_vm=Link(latency_s=rng.choice([0.0, 0.2]), bytes_per_s=rng.choice([1e18, 30.0])),
    )


def multisets(sizes: list[int], num_vms: int, count: int) -> Iterator[tuple[int, ...]]:
    for found in itertools.combinations_with_replacement(sizes, count):
        if sum(found) <= num_vms:
            yield found


def least_ns(members: tuple[Template, ...], num: int) -> int:
    """The best split of `num` micro-batches, one by one: the next goes where it ends first."""
    shares = [1] * len(members)
    for _ in range(num - len(members)):
        ends = [one.time_ns(share + 1) for one, share in zip(members, shares, strict=True)]
        shares[ends.index(min(ends))] += 1
    return max(map(Template.time_ns, members, shares))


def test_combinations_are_as_good_as_every_multiset() -> None:
    seen = 0
    for seed in range(150):
        rng = random.Random(seed)
        num_vms, num = rng.randint(1, 9), rng.randint(1, 40)
        choices = pool(stage_table(some_calibration(seed)), num, num_vms, 1, AMPLE)
        tried = list[int]()
        for found in combinations(choices, num_vms, num):
            count = len(found.templates)
            tried.append(count)
            assert sum(found.shares) == num
            assert min(found.shares) >= 1
            assert found.num_vms <= num_vms
            best = min(
                least_ns(members, num)
                for sizes in multisets(list(choices), num_vms, count)
                for members in itertools.product(*(choices[size] for size in sizes))
            )
            assert found.time_ns == best, (seed, count)
            seen += 1
        most = min(num_vms // min(choices), num)
        assert sorted(tried) == list(range(1, most + 1)), (seed, "each number of pipelines once")
    assert seen > 300


def test_combinations_beside_pipelines_that_stay_are_as_good_as_every_multiset() -> None:
    seen = 0
    for seed in range(150):
        rng = random.Random(seed)
        num_vms, num = rng.randint(1, 7), rng.randint(4, 40)
        choices = pool(stage_table(some_calibration(seed)), num, num_vms, 1, AMPLE)
        beside = tuple(rng.choice(rng.choice([*choices.values()])) for _ in range(rng.randint(1, 3)))
        for found in combinations(choices, num_vms, num, beside=beside):
            count = len(found.templates) - len(beside)
            assert found.templates[: len(beside)] == beside
            assert sum(found.shares) == num
            assert min(found.shares) >= 1
            best = min(
                least_ns((*beside, *members), num)
                for sizes in multisets(list(choices), num_vms, count)
                for members in itertools.product(*(choices[size] for size in sizes))
            )
            assert found.time_ns == best, (seed, count)
            seen += 1
    assert seen > 200


TWENTY = uniform(20, activation_bytes=(1,) * 20, cut_bytes=(0,) * 19, grad_cut_bytes=(0,) * 19)


def thirteen() -> list[Slot]:
    """Workers whose memory takes twenty sections in four stages, not in three."""
    table = stage_table(TWENTY)

    def least(size: int) -> list[int]:
        return [table.memory(at, at + size, WHOLE).least_bytes for at in range(21 - size)]

    capacity = min(least(7)) - 1
    assert max(least(5)) <= capacity
    return [Slot(f"w{number}", f"w{number}", capacity) for number in range(13)]


def asked(**changes: object) -> Request:
    values: dict[str, Any] = {
        "calibration": TWENTY,
        "num_sections": 20,
        "num_micro_batches": 96,
        "workers": thirteen(),
        "generation": 5,
        "recompute": "off",
        "halves": "off",
        "unequal_pipelines": "auto",
    }
    return Request(**(values | changes))


def test_a_plan_runs_as_fast_as_its_templates_promise() -> None:
    """Thirteen workers, a model that needs four: no grid uses them all."""
    choices = pool(stage_table(TWENTY), 96, 13, 1, thirteen()[0].memory_bytes)
    assert min(choices) == 4
    best = {len(one.templates): one for one in combinations(choices, 13, 96)}[3]
    assert [one.num_vms for one in best.templates] == [5, 4, 4]
    plan = plan_of([one.stages for one in best.templates], best.shares)
    assert plan.num_workers == 13
    assert plan.shape == "5+4+4"
    simulated = simulate(plan, TWENTY, timeline=False).pipeline_s
    assert best.time_ns / 1e9 == pytest.approx(simulated, rel=0.03)


def test_unequal_pipelines_are_chosen_where_they_beat_the_best_grid() -> None:
    grids, best = choose(asked(unequal_pipelines="off")), choose(asked())
    assert isinstance(grids, Choice)
    assert isinstance(best, Choice)
    assert grids.candidate.used < 13
    assert best.candidate.shape == best.plan.shape == "5+4+4"
    assert best.candidate.used == len(set(best.workers)) == 13
    assert best.predicted_s < grids.predicted_s / 1.01
    assert best.plan.generation == 5
    assert max(simulate(best.plan, TWENTY, timeline=False).peak_bytes) <= thirteen()[0].memory_bytes
    assert {row.shape for row in best.candidates} >= {grids.candidate.shape, "5+4+4"}
    fixed = choose(asked(pipeline_parallel_degree=4))
    assert isinstance(fixed, Choice)
    assert fixed.candidate.shape == "4x3"


@pytest.mark.parametrize("idle", [0, 3])
def test_a_section_that_takes_no_time_may_be_a_stage_of_its_own(idle: int) -> None:
    """Found: a division by its time."""
    times = [1.0] * 4
    times[idle] = 0.0
    calibration = uniform(4, forward_s=tuple(times), backward_s=tuple(times))
    workers = [Slot(f"w{number}", f"vm{number}", 300) for number in range(5)]
    best = choose(asked(calibration=calibration, num_sections=4, num_micro_batches=30, workers=workers))
    assert isinstance(best, Choice)
    assert best.plan.shape == "3+2"


def test_where_memory_is_tight_unequal_pipelines_recompute_as_grids_do() -> None:
    """Found: those without recomputation, which a window of one or two slows down, seemed the fastest, and no
    others were simulated."""
    bulky = uniform(
        20,
        gradient_bytes=(60,) * 20,
        state_bytes=(120,) * 20,
        activation_bytes=(50,) * 20,
        cut_bytes=(17,) * 19,
        grad_cut_bytes=(17,) * 19,
    )
    room = min(
        stage_table(bulky).memory(start, start + 7, mode).least_bytes
        for start in range(14)
        for mode in (WHOLE, Mode(recompute=True))
    )
    workers = [Slot(f"w{number}", f"vm{number}", room - 1) for number in range(13)]
    best = choose(asked(calibration=bulky, workers=workers, recompute="auto", halves="auto"))
    assert isinstance(best, Choice)
    assert best.plan.recompute
    assert best.plan.shape == "5+4+4"


def test_workers_stay_where_they_hold_what_unequal_pipelines_need() -> None:
    before = choose(asked())
    assert isinstance(before, Choice)
    holding = dict(zip(before.workers, before.plan.ranges, strict=True))
    again = choose(asked(workers=thirteen()[::-1], holding=holding))
    assert isinstance(again, Choice)
    assert dict(zip(again.workers, again.plan.ranges, strict=True)) == holding


def test_workers_of_a_stage_take_micro_batches_in_turn() -> None:
    choices = pool(stage_table(uniform(2)), 20, 2, 3, AMPLE)
    found = max(combinations(choices, 2, 20), key=lambda one: len(one.templates))
    assert isinstance(found, Combination)
    plan = plan_of([one.stages for one in found.templates], found.shares)
    assert plan.num_workers == 6
    assert plan.ranges == (Range(0, 2),) * 6
    assert sorted(len(path.micro_batches) for path in plan.paths) == [3, 3, 3, 3, 4, 4]
    assert simulate(plan, uniform(2), timeline=False).pipeline_s == found.time_ns / 1e9 == 4 * 6.0


def test_the_search_for_unequal_pipelines_grows_about_as_the_number_of_vms() -> None:
    """Found: with the 2.7th power; 300 VMs took 36 s. Counted in cells of tables, not in seconds."""
    cells: dict[int, float] = {}
    for num_vms in (256, 512, 1024):
        calibration = uniform(12, inter_vm=Link(latency_s=0.01, bytes_per_s=1e18))
        choices = pool(stage_table(calibration), 4096, num_vms, 1, AMPLE)
        work = Work(1e12)
        found = list(combinations(choices, num_vms, 4096, precision_ns=10**6, counts=10, work=work))
        assert found, num_vms
        cells[num_vms] = 1e12 - work.cells
    assert cells[512] < 3 * cells[256]
    assert cells[1024] < 3 * cells[512]


def test_a_search_whose_work_is_used_up_leaves_the_best_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    full, grids = choose(asked()), choose(asked(unequal_pipelines="off"))
    monkeypatch.setattr(unequal_search, "_WORK", 0)
    hasty = choose(asked())
    assert isinstance(full, Choice)
    assert isinstance(grids, Choice)
    assert isinstance(hasty, Choice)
    assert full.candidate.shape == "5+4+4"
    assert hasty.plan == grids.plan
