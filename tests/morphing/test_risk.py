"""What deaths cost a plan, and that the choice weighs it."""

from __future__ import annotations

import itertools
import operator
import random
from dataclasses import replace
from math import comb
from typing import Any

import pytest
from calibrations import uniform
from makara.morphing import Choice, Request, Risk, Slot, choose
from makara.morphing import risk as risk_module
from makara.morphing.templates import TemplateStage
from makara.morphing.unequal import plan_of
from makara.pipeline import Range, grid
from makara.simulator import Link

RISK = Risk(losses_per_s=0.01, mean_size=2.0, redo_s=30.0, redo_steps=5.5)


def probability(num_vms: int, sets: list[frozenset[int]], mean_size: float) -> float:
    """That a loss takes all of one of these sets of VMs: by trying all losses."""
    again = 1 - 1 / mean_size
    weights = {size: again ** (size - 1) for size in range(1, num_vms + 1)}
    found = 0.0
    for size, weight in weights.items():
        losses = [frozenset(vms) for vms in itertools.combinations(range(num_vms), size)]
        hit = sum(any(one <= loss for one in sets) for loss in losses)
        found += weight / sum(weights.values()) * hit / len(losses)
    return found


@pytest.mark.parametrize("mean_size", [1.0, 1.5, 3.0])
def test_hosts_are_lost_as_often_as_all_losses_that_there_may_be_say(mean_size: float) -> None:
    risk = Risk(losses_per_s=1.0, mean_size=mean_size, redo_s=1.0, redo_steps=0.0)
    for num_vms in range(1, 9):
        for hosts in ((1,), (2,), (3,), (1, 1), (2, 2), (1, 2), (1,) * 4, (2, 2, 3), (2,) * 4, (4, 4)):
            if sum(hosts) <= num_vms:
                bounds = [0, *itertools.accumulate(hosts)]
                sets = [frozenset(range(first, stop)) for first, stop in itertools.pairwise(bounds)]
                wanted = probability(num_vms, sets, mean_size)
                assert risk.lost(hosts, num_vms, 5.0) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("mean_size", [1.0, 2.0, 4.0])
def test_hosts_that_sections_share_are_lost_as_often_as_all_losses_say(mean_size: float) -> None:
    """Found: they counted as apart, so that there were more such losses than losses, or fewer than none."""
    chance = random.Random(20)
    for _ in range(100):
        depths = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        cuts = [[0, *sorted(chance.sample(range(1, 4), depth - 1)), 4] for depth in depths]
        stages = [[TemplateStage(Range(*pair), 1) for pair in itertools.pairwise(each)] for each in cuts]
        plan = plan_of(stages, [1] * len(stages))
        others = chance.randint(0, 2)
        vm_of = [f"{chance.choice([rank, rank // 2])}" for rank in range(plan.num_workers)]
        names = sorted({*vm_of, *(f"other{n}" for n in range(others))})
        hosting = [frozenset(names.index(vm_of[rank]) for rank in plan.hosts(k)) for k in range(4)]
        risk = Risk(losses_per_s=1.0, mean_size=mean_size, redo_s=1.0, redo_steps=0.0)
        wanted = probability(len(names), hosting, mean_size)
        assert risk.lost_by(plan, vm_of, len(names), 5.0) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_hosts_of_sections_that_lie_far_apart_are_priced_without_trying_all_losses() -> None:
    """Each VM hosts an early and a late section: whether any of them is lost would have to be remembered."""
    num_vms, depth = 60, 30
    plan = grid([Range(k, k + 1) for k in range(depth)], 4, 4)
    chance, vm_of = random.Random(3), list[str]()
    for replica in range(4):
        early, late = list(range(15)), list(range(15))
        chance.shuffle(late)
        vm_of += [f"{replica} {number}" for number in early + late]
    risk = Risk(losses_per_s=1.0, mean_size=4.0, redo_s=1.0, redo_steps=0.0)
    half = risk.lost([4] * 15, num_vms, 1.0)  # of the early sections alone
    assert half < risk.lost_by(plan, vm_of, num_vms, 1.0) < 3 * half


def test_large_losses_are_weighed_about_as_if_all_were_counted() -> None:
    """Where a cloud took hundreds at once, counting losses of each size took 90 s for a plan."""
    chance = random.Random(35)
    for _ in range(30):
        num_vms, number = chance.randint(40, 150), chance.randint(1, 8)
        times = chance.randint(1, min(48, num_vms // number))
        mean_size = chance.choice([4.0, 16.0, 64.0, 9000.0])
        risk = Risk(losses_per_s=1.0, mean_size=mean_size, redo_s=1.0, redo_steps=0.0)
        weights = [(1 - 1 / mean_size) ** size for size in range(num_vms)]
        counted = [counted_out(num_vms, [number] * times, size) for size in range(1, num_vms + 1)]
        wanted = sum(map(operator.mul, weights, counted)) / sum(weights)
        assert risk.lost([number] * times, num_vms, 0.0) == pytest.approx(wanted, abs=0.02)
        used = number * times
        spared = [comb(num_vms - used, size) / comb(num_vms, size) for size in range(1, num_vms + 1)]
        wanted = 1 - sum(map(operator.mul, weights, spared)) / sum(weights)
        assert risk.touches(used, num_vms) == pytest.approx(wanted, abs=0.001)


@pytest.mark.parametrize("mean_size", [16.0, 64.0, 9000.0])
def test_large_losses_of_hosts_that_sections_share_are_weighed_about_as_if_all_were_counted(
    mean_size: float,
) -> None:
    """Found: sections that share VMs counted as if each were hit by itself."""
    risk = Risk(losses_per_s=1.0, mean_size=mean_size, redo_s=1.0, redo_steps=0.0)
    for num_vms, num_sections, number in (
        (200, 150, 6),
        (200, 150, 4),
        (160, 150, 3),
        (50, 40, 5),
        (36, 36, 2),
    ):
        hosts = [frozenset(map(str, range(k, k + number))) for k in range(num_sections - number)]
        weights = [(1 - 1 / mean_size) ** size for size in range(num_vms)]
        counted = [
            counted_in_a_row(num_vms, num_sections - 1, number, size) for size in range(1, num_vms + 1)
        ]
        wanted = sum(map(operator.mul, weights, counted)) / sum(weights)
        assert risk.lost_with(hosts, num_vms, 0.0) == pytest.approx(wanted, abs=0.01)


def counted_in_a_row(num_vms: int, used: int, number: int, size: int) -> float:
    """That a loss of this size takes `number` neighbours of `used` VMs in a row: by placing fewer than
    `number` of those lost between any two that are kept."""
    spared = 0
    for part in range(min(used, size) + 1):
        places = used - part + 1
        # Inclusion and exclusion over the places with `number` or more.
        ways = sum(
            (-1) ** full * comb(places, full) * comb(part - number * full + places - 1, places - 1)
            for full in range(min(places, part // number) + 1)
        )
        spared += ways * comb(num_vms - used, size - part)
    return 1 - spared / comb(num_vms, size)


def counted_out(num_vms: int, hosts: list[int], size: int) -> float:
    """That a loss of this size takes all of one of these sets, which share none: by counting all others."""
    spared = [1]  # of 0, 1, ... VMs of the sets, the losses that take none of them whole
    for number in hosts:
        parts = [comb(number, part) for part in range(number)]
        spared = [
            sum(
                spared[lost - part] * ways
                for part, ways in enumerate(parts)
                if 0 <= lost - part < len(spared)
            )
            for lost in range(len(spared) + number - 1)
        ]
    others = num_vms - sum(hosts)
    ways = sum(ways * comb(others, size - lost) for lost, ways in enumerate(spared) if lost <= size)
    return 1 - ways / comb(num_vms, size)


@pytest.mark.parametrize("mean_size", [3.0, 64.0, 9000.0])
def test_a_loss_of_thousands_is_weighed_with_few_calculations(
    mean_size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    risk = Risk(losses_per_s=1.0, mean_size=mean_size, redo_s=1.0, redo_steps=0.0)
    calls = 0

    def counting(*numbers: int) -> int:
        nonlocal calls
        calls += 1
        return comb(*numbers)

    monkeypatch.setattr(risk_module, "comb", counting)
    risk.lost([1] * 96, 10_000, 0.0)
    risk.touches(9_600, 10_000)
    assert calls < 1000


def test_a_plan_that_has_every_vm_once_loses_state_with_every_loss() -> None:
    risk = Risk(losses_per_s=1.0, mean_size=4.0, redo_s=1.0, redo_steps=0.0)
    assert risk.lost([1] * 100, 100, 0.0) == pytest.approx(1.0)
    assert risk.lost([50] * 100, 5000, 0.0) == pytest.approx(0.0, abs=1e-6)


def test_what_is_lost_is_told_in_seconds_and_in_steps() -> None:
    one = Risk(losses_per_s=0.01, mean_size=1.0, redo_s=30.0, redo_steps=5.5)
    assert one.lost([1, 1], 4, 2.0) == pytest.approx(0.01 * 0.5 * (30 + 11))
    assert one.lost([1] * 4, 4, 2.0) == pytest.approx(0.01 * (30 + 11))
    assert one.lost([2, 2], 4, 2.0) == 0.0


def test_hosts_that_share_a_vm_are_lost_together() -> None:
    plan = grid([Range(0, 1), Range(1, 2)], 2, 4)
    apart = RISK.lost_by(plan, ["a", "b", "c", "d"], 4, 1.0)
    assert apart == RISK.lost([2, 2], 4, 1.0)
    assert RISK.lost_by(plan, ["a", "b", "a", "b"], 2, 1.0) == RISK.lost([1, 1], 2, 1.0)
    assert RISK.lost_by(plan, ["a", "a", "b", "b"], 2, 1.0) == RISK.lost([2], 2, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("losses_per_s", -1.0), ("mean_size", 0.5), ("redo_s", float("nan")), ("redo_steps", -0.5)],
)
def test_a_field_that_cannot_be_is_named(field: str, value: float) -> None:
    given = {"losses_per_s": 1.0, "mean_size": 1.0, "redo_s": 1.0, "redo_steps": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        Risk(**given)


# ---- the choice --------------------------------------------------------------------------------------------


def request(num_workers: int, **changes: Any) -> Request:
    calibration = uniform(4, gradient_bytes=(1000,) * 4, inter_vm=Link(latency_s=0.0, bytes_per_s=50.0))
    values: dict[str, Any] = {
        "calibration": calibration,
        "num_sections": 4,
        "num_micro_batches": 8,
        "workers": [Slot(f"w{n}", f"vm{n}", 10_000) for n in range(num_workers)],
        "generation": 1,
    }
    return Request(**(values | changes))


def chosen(asked: Request) -> Choice:
    answer = choose(asked)
    assert isinstance(answer, Choice)
    return answer


def test_a_plan_without_a_second_copy_is_given_up_where_the_next_death_would_cost_more() -> None:
    assert chosen(request(4)).plan.shape == "4x1"
    seldom = Risk(losses_per_s=1e-9, mean_size=1.0, redo_s=30.0, redo_steps=5.5)
    assert chosen(request(4, risk=seldom)).plan.shape == "4x1"
    often = Risk(losses_per_s=0.05, mean_size=1.0, redo_s=300.0, redo_steps=5.5)
    safe = chosen(request(4, risk=often))
    assert min(len(safe.plan.hosts(section)) for section in range(4)) > 1
    assert safe.candidate.lost == 0.0
    row = next(row for row in safe.candidates if row.data_parallel_degree == 1 and row.predicted_s)
    assert row.lost > 0.05 * 300


# A loss of two VMs an hour is expected at first; checkpoints are made every 20 steps.
AT_FIRST = Risk(losses_per_s=1 / 3600, mean_size=2.0, redo_s=5.0, redo_steps=10.5, form_s=5.0)


def tiny(num_micro_batches: int, num_workers: int = 3, **changes: Any) -> Request:
    """A small model's: nine sections of a millisecond, sums that cost next to nothing."""
    s = 0.001
    times = {"forward_s": s, "backward_s": 2 * s, "input_s": s, "weight_s": s, "optimizer_s": s / 2}
    calibration = uniform(9, **{name: (each,) * 9 for name, each in times.items()})
    changes = {"calibration": calibration, "num_sections": 9, **changes}
    return request(num_workers, num_micro_batches=num_micro_batches, **changes)


@pytest.mark.parametrize("num_micro_batches", [32, 64])
def test_sections_have_copies_where_a_pipeline_is_faster_by_less_than_predictions_err(
    num_micro_batches: int,
) -> None:
    """Found: three local VMs ran a small model as 3x1, predicted 2 to 6 % faster than 1x3 since three do not
    divide 32 micro-batches. It was no faster, and each death went back to a checkpoint."""
    assert chosen(tiny(num_micro_batches)).plan.shape == "3x1"  # where nobody dies
    safe = chosen(tiny(num_micro_batches, risk=AT_FIRST))
    assert safe.plan.shape == "1x3"
    assert safe.candidate.copies == 3


def test_a_pipeline_without_copies_is_taken_where_it_is_surely_faster_by_more_than_deaths_cost() -> None:
    """Of 16 micro-batches a replica of three does 6, and a stage of three what is 5.3 of them."""
    deep = chosen(tiny(16, risk=AT_FIRST))
    assert deep.plan.shape == "3x1"
    assert deep.candidate.copies == 1
    often = replace(AT_FIRST, losses_per_s=1 / 60)
    assert chosen(tiny(16, risk=often)).plan.shape == "1x3"


def test_a_lead_without_copies_counts_as_ever_where_no_plan_has_copies() -> None:
    """No worker has memory for the whole model, so that each of two hosts what the other does not."""
    workers = [Slot(f"w{n}", f"vm{n}", 800) for n in range(2)]
    assert chosen(tiny(32, workers=workers, risk=AT_FIRST)).plan.shape == "2x1"


@pytest.mark.parametrize("per_vm", [2, 3, 8])
def test_grids_whose_workers_share_vms_are_weighed_as_they_are_placed(per_vm: int) -> None:
    """Found: their stages counted as apart, which with few VMs made the deepest grid gain by deaths."""
    risk = Risk(losses_per_s=1 / 600, mean_size=1.5, redo_s=200.0, redo_steps=0.0)
    workers = [Slot(f"w{n}", f"vm{n // per_vm}", 10_000) for n in range(2 * per_vm)]
    vm_of = {slot.worker: slot.vm for slot in workers}
    for depth in range(1, 5):
        answer = choose(request(0, workers=workers, risk=risk, pipeline_parallel_degree=depth))
        assert isinstance(answer, Choice)
        vms = [vm_of[worker] for worker in answer.workers]
        assert answer.candidate.lost == risk.lost_by(answer.plan, vms, 2, answer.predicted_s)
        assert all(0.0 <= row.lost < 0.34 for row in answer.candidates)


def test_deaths_are_weighed_with_the_step_of_the_workers_as_they_are_placed() -> None:
    """Found: slow workers that hold sections change places, and what deaths cost was that of before."""
    moved = 0
    for seed in range(40):
        pick = random.Random(seed)
        workers = [
            Slot(f"w{n}", f"vm{n // 2}", 10_000, pick.choice([1.0, 1.5])) for n in range(pick.randint(2, 8))
        ]
        holding = {slot.worker: Range(pick.randint(0, 1), pick.randint(2, 4)) for slot in workers}
        calibration = uniform(4, inter_vm=Link(latency_s=0.5, bytes_per_s=50.0))
        answer = chosen(request(0, workers=workers, holding=holding, calibration=calibration, risk=RISK))
        num_vms, vm_of = len({slot.vm for slot in workers}), {slot.worker: slot.vm for slot in workers}
        vms = [vm_of[worker] for worker in answer.workers]
        lost = RISK.lost_by(answer.plan, vms, num_vms, answer.predicted_s)
        assert answer.candidate.lost == pytest.approx(lost, rel=1e-12)
        moved += answer.candidate.lost > 0 and max(slot.slowdown for slot in workers) > 1
    assert moved


@pytest.mark.parametrize("per_vm", [1, 2])
def test_no_shape_is_expected_to_take_less(per_vm: int) -> None:
    """Bounds and the order of tries hide none."""
    pick = random.Random(5)
    for _ in range(60):
        risk = Risk(
            losses_per_s=10 ** pick.uniform(-5, -1),
            mean_size=pick.choice([1.0, 2.0, 4.0]),
            redo_s=pick.choice([0.0, 10.0, 300.0]),
            redo_steps=pick.choice([0.5, 5.5]),
        )
        scale = pick.choice([1.0, 50.0, 1000.0])
        calibration = uniform(
            4,
            forward_s=tuple(pick.randint(1, 9) / 8 for _ in range(4)),
            gradient_bytes=(1000,) * 4,
            inter_vm=Link(latency_s=0.01, bytes_per_s=50.0 * scale),
        )
        workers = [Slot(f"w{n}", f"vm{n // per_vm}", 10_000) for n in range(pick.randint(1, 9))]
        asked = request(0, workers=workers, calibration=calibration, risk=risk)

        def expected_s(answer: Choice) -> float:
            return answer.predicted_s * (1 + answer.candidate.lost)

        every = [
            expected_s(answer)
            for depth in range(1, 5)
            for replicas in range(1, 9)
            if isinstance(
                answer := choose(
                    request(
                        0,
                        workers=workers,
                        calibration=calibration,
                        risk=risk,
                        pipeline_parallel_degree=depth,
                        data_parallel_degree=replicas,
                    )
                ),
                Choice,
            )
        ]
        # 1 % may go to whole backwards, 1 % to a narrower window, and 5 % to copies.
        answer = chosen(asked)
        copies = 1.0 if answer.candidate.copies == 1 else 1.05
        assert expected_s(answer) <= copies * 1.01**2 * min(every) * 1.000001
