"""Plans around whole pipelines, who takes which place in them, and where their other pipelines are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from calibrations import uniform
from makara.morphing import (
    Before,
    Choice,
    Prospect,
    Request,
    Slot,
    choose,
    copies_in,
    loading_s,
    place_in,
    plan_of,
    reformed,
    stage_table,
    worths,
)
from makara.morphing.assignment import cheapest
from makara.morphing.keeping.recutting import recut
from makara.morphing.keeping.whole import whole_pipelines
from makara.morphing.stages import WHOLE, Mode
from makara.morphing.templates import TemplateStage, stage_costs, template_of
from makara.pipeline import Plan, Range, grid
from makara.simulator import Calibration, Link

AMPLE = 1 << 40


def some_span(draw: random.Random, num: int) -> Range:
    start = draw.randrange(num)
    return Range(start, draw.randint(start + 1, num))


def lacking(held: Range | None, wanted: Range, sizes: Sequence[int]) -> int:
    return sum(sizes[section] for section in wanted.sections if held is None or section not in held)


def alone(number: int, memory_bytes: int = AMPLE) -> Slot:
    """A worker with a VM of its own."""
    return Slot(f"w{number}", f"vm{number}", memory_bytes)


def test_the_cheapest_assignment_is_that_of_all_permutations() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        size = draw.randint(0, 6)
        costs = [[draw.choice((0, 1, 2, 7, 1 << 130)) for _ in range(size)] for _ in range(size)]
        found = cheapest(costs)
        assert sorted(found) == list(range(size))
        least = min(
            sum(costs[row][column] for row, column in enumerate(columns))
            for columns in itertools.permutations(range(size))
        )
        assert sum(costs[row][column] for row, column in enumerate(found)) == least, f"seed {seed}"


def test_workers_are_placed_so_that_the_fewest_bytes_move() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        num = draw.randint(1, 8)
        sizes = [draw.randint(1, 20) for _ in range(num)]
        wanted = [some_span(draw, num) for _ in range(draw.randint(1, 5))]
        slots = [alone(number) for number in range(len(wanted))]
        holding = {slot.worker: some_span(draw, num) for slot in slots if draw.random() < 0.8}

        def moved(
            placed: Sequence[Slot],
            wanted: Sequence[Range] = wanted,
            holding: Mapping[str, Range] = holding,
            sizes: Sequence[int] = sizes,
        ) -> int:
            pairs = zip(placed, wanted, strict=True)
            return sum(lacking(holding.get(slot.worker), span, sizes) for slot, span in pairs)

        placed = place_in(wanted, slots, holding, sizes)
        assert {slot.worker for slot in placed} == {slot.worker for slot in slots}
        assert moved(placed) == min(map(moved, itertools.permutations(slots))), f"seed {seed}"


def test_the_last_stage_does_not_recompute_and_may_take_more_sections() -> None:
    table = stage_table(uniform(14, forward_s=(1.0,) * 14, backward_s=(2.0,) * 14))
    stages = TemplateStage(Range(0, 5), 1), TemplateStage(Range(5, 14), 1)
    mode = Mode(recompute=True)
    template = template_of(table, stages, 1, AMPLE, mode)
    assert template is not None
    slots = [alone(0), alone(1)]
    holding = {slots[0].worker: Range(0, 6), slots[1].worker: Range(6, 14)}
    found = recut(template, slots, holding, [1] * 14, stage_costs(table, AMPLE, mode), 8, slack=1.0)
    assert found is not None
    assert [stage.range for stage in found] == [Range(0, 6), Range(6, 14)]


def test_a_pipeline_is_cut_where_its_workers_lack_least() -> None:
    seen = 0
    for seed in range(200):
        draw = random.Random(seed)
        num = draw.randint(3, 7)
        times = [draw.uniform(0.5, 1.5) for _ in range(num)]
        calibration = uniform(num, forward_s=tuple(times), backward_s=tuple(2 * time_s for time_s in times))
        sizes = [draw.randint(1, 20) for _ in range(num)]
        costs = stage_costs(stage_table(calibration), AMPLE)
        bounds = [0, *sorted(draw.sample(range(1, num), draw.randint(1, num - 2))), num]
        stages = tuple(TemplateStage(Range(*ends), 1) for ends in itertools.pairwise(bounds))
        template = template_of(stage_table(calibration), stages, 1, AMPLE)
        assert template is not None
        slots, slack = [alone(number) for number in range(len(stages))], draw.choice((1.0, 1.2))
        holding = {slot.worker: some_span(draw, num) for slot in slots if draw.random() < 0.8}
        orders = [slots]
        if len(holding) == len(slots):
            ends = {slot: (holding[slot.worker].start, holding[slot.worker].stop) for slot in slots}
            orders.append(sorted(slots, key=ends.__getitem__))

        def work(spans: Sequence[Range], times: Sequence[float] = times) -> float:
            return max(sum(times[section] for section in span.sections) for span in spans)

        def least(
            spans: Sequence[Range],
            orders: Sequence[Sequence[Slot]],
            holding: Mapping[str, Range] = holding,
            sizes: Sequence[int] = sizes,
        ) -> int:
            return min(
                sum(lacking(holding.get(s.worker), span, sizes) for s, span in zip(order, spans, strict=True))
                for order in orders
            )

        own = [stage.range for stage in stages]
        every = [
            [Range(*ends) for ends in itertools.pairwise((0, *cuts, num))]
            for cuts in itertools.combinations(range(1, num), len(stages) - 1)
        ]
        allowed = [spans for spans in every if work(spans) <= work(own) * slack * (1 + 1e-9)]
        fewest = min(least(spans, orders) for spans in allowed)
        found = recut(template, slots, holding, sizes, costs, share=8, slack=slack)
        if found is None:
            assert fewest >= least(own, [slots]), f"seed {seed}"
        else:
            spans = [stage.range for stage in found]
            assert spans in allowed
            assert least(spans, orders) == fewest < least(own, [slots]), f"seed {seed}"
            seen += 1
    assert seen > 50


SLOW_WIRES = uniform(  # a section takes 25 s to a new host of it, sums and messages hardly anything
    12,
    inter_vm=Link(latency_s=0.0, bytes_per_s=2e6),
    gradient_bytes=(1,) * 12,
    state_bytes=(50_000_001,) * 12,
    cut_bytes=(0,) * 11,
    grad_cut_bytes=(0,) * 11,
)
SOON, LATE = 300.0, 1e5  # seconds
FOUR_SECTIONS = -1 + min(
    stage_table(SLOW_WIRES).memory(start, start + 5, mode).least_bytes
    for start in range(8)
    for mode in (WHOLE, Mode(recompute=True))
)


def asked(calibration: Calibration, slots: Sequence[Slot], holding: Mapping[str, Range]) -> Request:
    return Request(
        calibration=calibration,
        num_sections=calibration.num_sections,
        num_micro_batches=48,
        workers=slots,
        generation=3,
        holding=holding,
        unequal_pipelines="auto",
        tolerated_failures=1,
    )


def after(
    before: Plan, dead: Sequence[int], calibration: Calibration, memory_bytes: int = AMPLE
) -> tuple[Request, Before]:
    """A question for the workers of `before` but those that are dead."""
    slots = [alone(rank, memory_bytes) for rank in range(before.num_workers) if rank not in dead]
    holding = {f"w{rank}": span for rank, span in enumerate(before.ranges)}
    return asked(calibration, slots, holding), Before(before, [f"w{n}" for n in range(before.num_workers)])


def chain(*sizes: int) -> tuple[TemplateStage, ...]:
    """Stages of so many sections."""
    bounds = [0, *itertools.accumulate(sizes)]
    return tuple(TemplateStage(Range(*ends), 1) for ends in itertools.pairwise(bounds))


def test_pipelines_that_lost_nobody_are_whole() -> None:
    before = plan_of([chain(3, 3, 6), chain(3, 4, 5), chain(4, 4, 4)], [16, 16, 16])
    assert whole_pipelines(*after(before, [], uniform(12))) == [
        chain(3, 3, 6),
        chain(3, 4, 5),
        chain(4, 4, 4),
    ]
    assert whole_pipelines(*after(before, [4], uniform(12))) == [chain(3, 3, 6), chain(4, 4, 4)]
    assert whole_pipelines(*after(before, [1, 4, 8], uniform(12))) == []


def test_survivors_of_two_pipelines_with_the_same_cuts_make_a_whole_one() -> None:
    before = grid([Range(0, 4), Range(4, 8), Range(8, 12)], 2, 8)
    assert whole_pipelines(*after(before, [1, 5], uniform(12))) == [chain(4, 4, 4)]


def test_workers_of_a_vm_that_host_the_same_are_one_stage() -> None:
    calibration = uniform(4)
    stages = (TemplateStage(Range(0, 2), 2), TemplateStage(Range(2, 4), 2))
    before = plan_of([stages, stages], [8, 8])
    slots = [Slot(f"w{rank}", f"vm{rank // 2}", AMPLE) for rank in range(8)]
    workers = [slot.worker for slot in slots]
    holding = dict(zip(workers, before.ranges, strict=True))
    request = asked(calibration, [slot for slot in slots if slot.vm != "vm1"], holding)
    assert whole_pipelines(request, Before(before, workers)) == [stages]


def begins_s(choice: Choice, request: Request) -> float:
    return loading_s(choice.plan.ranges, choice.workers, request.calibration, request.holding)


@pytest.mark.parametrize("dead", [[1], [0, 5], []])
@pytest.mark.parametrize("ends_s", [SOON, LATE])
def test_plans_around_whole_pipelines_are_worth_more_than_the_fastest(dead: list[int], ends_s: float) -> None:
    """Without a death, two newcomers are there."""
    before = plan_of([chain(3, 3, 3, 3), chain(4, 4, 4), chain(4, 4, 4)], [18, 15, 15])
    request, ran = after(before, dead, SLOW_WIRES, FOUR_SECTIONS)
    if not dead:
        newcomers = [alone(number, FOUR_SECTIONS) for number in (10, 11)]
        request = asked(SLOW_WIRES, [*request.workers, *newcomers], request.holding)
    best = choose(request)
    assert isinstance(best, Choice)
    found = reformed(request, ran, best.plan, best.predicted_s, ends_s)
    times = [(choice.predicted_s, begins_s(choice, request)) for choice in (best, *found)]
    offers = [Prospect(samples_per_s=96 / step_s, begins_s=load_s) for step_s, load_s in times]
    fastest, *others = worths(offers, ends_s)
    assert others == sorted(others, reverse=True)
    assert all(other > fastest for other in others)
    if ends_s == SOON:
        assert times[1][1] < times[0][1], "it moves less"
    for choice in found:
        assert len(set(choice.workers)) == choice.plan.num_workers <= len(request.workers)
        assert copies_in(choice, request.workers) >= 2
        assert choice.candidate.rejected is None


def test_where_pipelines_may_not_be_unequal_none_is_re_formed() -> None:
    before = grid([Range(0, 6), Range(6, 12)], 3, 12)
    request, ran = after(before, [0], uniform(12))
    best = choose(request)
    assert isinstance(best, Choice)
    for no in ({"unequal_pipelines": "off"}, {"pipeline_parallel_degree": 2}, {"holding": {}}):
        values = {"unequal_pipelines": "auto"} | no
        other = Request(
            calibration=request.calibration,
            num_sections=12,
            num_micro_batches=12,
            workers=request.workers,
            generation=3,
            **({"holding": request.holding} | values),
        )
        assert reformed(other, ran, best.plan, best.predicted_s, ends_s=1e6) == []


@pytest.mark.parametrize("dead", ["vm0", "vm3", "vm5"])
def test_a_vm_of_two_devices_is_lost_and_the_others_form_again(dead: str) -> None:
    slots = [Slot(f"w{rank}", f"vm{rank // 2}", FOUR_SECTIONS) for rank in range(14)]
    first = choose(asked(SLOW_WIRES, slots, {}))
    assert isinstance(first, Choice)
    holding = dict(zip(first.workers, first.plan.ranges, strict=True))
    living = [slot for slot in slots if slot.vm != dead]
    request, ran = asked(SLOW_WIRES, living, holding), Before(first.plan, first.workers)
    best = choose(request)
    assert isinstance(best, Choice)
    found = reformed(request, ran, best.plan, best.predicted_s, SOON)
    for choice in found:
        assert {slot.worker for slot in living} >= set(choice.workers)
        assert len(set(choice.workers)) == choice.plan.num_workers
        assert copies_in(choice, living) >= 2
    assert found or begins_s(best, request) < SOON / 2
