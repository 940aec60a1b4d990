"""The choice of the next plan: always an answer, balanced by time, within memory, stable."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from calibrations import frozen_beginning, uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.morphing import Choice, Infeasible, Request, Slot, choose, place
from makara.morphing.balance import Split, balance, split_micro_batches
from makara.morphing.bounds import AllReduceCosts, Bound
from makara.morphing.stages import Mode, stage_table
from makara.pipeline import Plan, Range, Schedule, grid
from makara.simulator import Calibration, Link, simulate


def slots(count: int, memory_bytes: int = 10_000, per_vm: int = 1) -> list[Slot]:
    return [Slot(f"w{i}", f"vm{i // per_vm}", memory_bytes) for i in range(count)]


def request(calibration: Calibration, workers: list[Slot], **change: Any) -> Request:
    values: dict[str, Any] = {
        "calibration": calibration,
        "num_sections": calibration.num_sections,
        "num_micro_batches": 8,
        "workers": workers,
        "generation": 3,
    }
    return Request(**(values | change))


def chosen(answer: Choice | Infeasible) -> Choice:
    assert isinstance(answer, Choice), answer
    return answer


@st.composite
def halves(draw: st.DrawFn, num_sections: int) -> dict[str, Any]:
    """What `uniform` takes: halves that together take some more or less than the 2 s of a whole backward, or
    none, as in a calibration of an earlier version."""
    if draw(st.booleans()):
        return {"input_s": (), "weight_s": ()}
    first = draw(st.sampled_from([0.0, 1.0]))  # in a job nobody waits for the first section's I
    return {
        "input_s": (first, *(draw(st.integers(1, 9)) / 8 for _ in range(num_sections - 1))),
        "weight_s": tuple(draw(st.integers(0, 9)) / 8 for _ in range(num_sections)),
        "pending_bytes": tuple(draw(st.integers(0, 20)) for _ in range(num_sections)),
        "backward_peak_bytes": tuple(draw(st.integers(0, 20)) for _ in range(num_sections)),
    }


@st.composite
def requests(draw: st.DrawFn) -> Request:
    num_sections = draw(st.integers(1, 6))
    sizes = st.integers(0, 50)
    calibration = uniform(
        num_sections,
        forward_s=tuple(draw(st.integers(1, 9)) / 8 for _ in range(num_sections)),
        state_bytes=tuple(draw(sizes) for _ in range(num_sections)),
        activation_bytes=tuple(draw(sizes) for _ in range(num_sections)),
        inter_vm=Link(latency_s=0.1, bytes_per_s=draw(st.sampled_from([1000.0, 20.0]))),
        **frozen_beginning(num_sections, draw(st.just(0) | st.integers(0, num_sections - 1))),
        **draw(halves(num_sections)),
        operation_s=draw(st.sampled_from([0.0, 0.125])),
        message_s=draw(st.sampled_from([0.0, 0.25])),
        collective_s=draw(st.sampled_from([0.0, 0.5])),
    )
    workers = [
        Slot(
            f"w{i}",
            f"vm{draw(st.integers(0, 3))}",
            draw(st.integers(20, 300)),
            draw(st.sampled_from([1.0, 1.0, 1.3])),
        )
        for i in range(draw(st.integers(0, 7)))
    ]
    return request(
        calibration,
        workers,
        num_micro_batches=draw(st.integers(1, 7)),
        schedule=draw(st.sampled_from(list(Schedule))),
        recompute=draw(st.sampled_from(["auto", "on", "off"])),
        halves=draw(st.sampled_from(["auto", "on", "off"])),
        pipeline_parallel_degree=draw(st.none() | st.integers(1, 4)),
        data_parallel_degree=draw(st.none() | st.integers(1, 4)),
        memory_limit_bytes=draw(st.none() | st.integers(50, 300)),
    )


@given(requests())
@settings(max_examples=60, deadline=None)
def test_there_is_always_an_answer_and_a_plan_fits(asked: Request) -> None:
    answer = choose(asked)
    if isinstance(answer, Infeasible):
        assert answer.reason
        return
    plan = answer.plan
    assert (plan.num_micro_batches, plan.generation) == (asked.num_micro_batches, asked.generation)
    assert len(set(answer.workers)) == plan.num_workers == len(answer.workers)
    assert answer == choose(asked)
    for row in answer.candidates:
        # What is estimated to fit does fit when played.
        assert not (row.rejected or "").startswith("it needs")
        assert row.rejected is not None or row.predicted_s is not None
    best = min(
        row.predicted_s for row in answer.candidates if row.predicted_s is not None and not row.rejected
    )
    # 1 % may go to whole backwards, and 1 % to a narrower window.
    assert best <= answer.predicted_s <= 1.01**2 * best


def anything(start: int, stop: int) -> bool:
    return True


def every_split(num_sections: int, depth: int) -> list[tuple[Range, ...]]:
    return [
        tuple(Range(a, b) for a, b in itertools.pairwise((0, *cuts, num_sections)))
        for cuts in itertools.combinations(range(1, num_sections), depth - 1)
    ]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.booleans())
@settings(max_examples=60)
def test_the_slowest_stage_is_as_fast_as_any_split_makes_it(times: list[int], recompute: bool) -> None:
    table = stage_table(uniform(len(times), forward_s=tuple(float(time) for time in times)))
    splits = balance(table, len(times), recompute=recompute, fits=anything)
    assert set(splits) == set(range(1, len(times) + 1))

    def slowest(stages: tuple[Range, ...]) -> int:
        return max(table.work_ns(span.start, span.stop, recompute) for span in stages)

    for depth, split in splits.items():
        assert slowest(split.stages) == min(map(slowest, every_split(len(times), depth)))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(1, 30),
    st.sampled_from([None, 1.3, 2.5]),
)
@settings(max_examples=60)
def test_with_memory_as_a_bound_too_and_a_slow_stage(
    sections: list[tuple[int, int]], capacity: int, slowdown: float | None
) -> None:
    times, sizes = zip(*sections, strict=True)
    table = stage_table(uniform(len(times), forward_s=tuple(float(time) for time in times)))

    def fits(start: int, stop: int) -> bool:
        return sum(sizes[start:stop]) <= capacity

    def slowest(split: Split) -> int:
        return max(
            table.work_ns(span.start, span.stop, True, slowdown or 1.0 if number == split.slow else 1.0)
            for number, span in enumerate(split.stages)
        )

    splits = balance(table, len(times), recompute=True, fits=fits, slowdown=slowdown)
    for depth in range(1, len(times) + 1):
        every = [
            Split(stages, slow)
            for stages in every_split(len(times), depth)
            if all(fits(span.start, span.stop) for span in stages)
            for slow in ([None] if slowdown is None else range(depth))
        ]
        assert (depth in splits) == bool(every)
        assert not every or slowest(splits[depth]) == min(map(slowest, every))


def test_a_heavy_head_shortens_its_stage_and_the_last_stage_does_not_pay_for_recomputation() -> None:
    """Sections of F=1, B=2; the last has a head of as much work as two more of them."""
    calibration = uniform(12, forward_s=(1.0,) * 11 + (3.0,), backward_s=(2.0,) * 11 + (6.0,))

    def last_stage(recompute: bool) -> int:
        table = stage_table(calibration)
        return len(balance(table, 2, recompute=recompute, fits=anything)[2].stages[1])

    assert last_stage(False) == 5  # 7 sections' work on either side
    assert last_stage(True) == 6  # 6 that recompute take 24, 8 that do not take 24 as well


def test_a_frozen_beginning_gets_more_sections_to_a_stage_and_the_plan_says_so() -> None:
    """A frozen section takes 1 s of a stage, another 3 s and 4 s when it is recomputed."""
    frozen = frozen_beginning(6, 4) | {"backward_s": (0.0,) * 4 + (2.0,) * 2}
    answer = chosen(
        choose(request(uniform(6, **frozen), slots(3), pipeline_parallel_degree=3, recompute="on"))
    )
    assert answer.plan.frozen == 4
    assert answer.plan.ranges == (Range(0, 4), Range(4, 5), Range(5, 6))
    table = stage_table(uniform(6, **frozen))
    assert not table.recomputes(4, recompute=True)
    assert table.recomputes(5, recompute=True)


def test_a_stage_that_is_frozen_in_part_is_chosen_by_what_it_recomputes() -> None:
    calibration = uniform(6, **frozen_beginning(6, 4), backward_s=(0.0,) * 4 + (2.0,) * 2)
    table = stage_table(calibration)
    assert table.work_ns(2, 5, recompute=True) == (3 + 1 + 2) * 1_000_000_000
    assert table.work_ns(2, 4, recompute=True) == 2 * 1_000_000_000


def test_memory_too_small_for_a_section_is_named() -> None:
    calibration = uniform(4, state_bytes=(10**6, 10**6, 10**6, 812 * 10**6))
    answer = choose(request(calibration, slots(4, memory_bytes=500 * 10**6)))
    assert isinstance(answer, Infeasible)
    assert "section 3 needs 812 MB, the workers have 500 MB" in answer.reason


def test_a_section_that_is_too_big_is_named_with_its_line_and_what_to_change() -> None:
    labels = tuple(f"layers.{section} (model.py:{80 + section})" for section in range(4))
    weights = uniform(4, state_bytes=(10**6, 10**6, 10**6, 812 * 10**6), labels=labels)
    assert why(weights) == (
        "no split of the model fits: section 3, layers.3 (model.py:83), needs 812 MB, the workers have "
        "500 MB; cut the model finer there (Training.cuts, or parallelism.num_sections, now 4), or take "
        "VMs with more memory"
    )
    activations = uniform(4, activation_bytes=(10, 900 * 10**6, 10, 10), labels=labels)
    assert "layers.1 (model.py:81), needs 900 MB" in why(activations)
    assert "lower parallelism.microbatch_size, now 2, or cut the model finer" in why(activations)


def why(calibration: Calibration) -> str:
    answer = choose(request(calibration, slots(4, memory_bytes=500 * 10**6)))
    assert isinstance(answer, Infeasible)
    return answer.reason


def test_memory_forces_depth() -> None:
    answer = chosen(choose(request(uniform(4), slots(4), memory_limit_bytes=260)))
    assert answer.plan.shape == "2x2"
    assert max(row.peak_bytes or 0 for row in answer.candidates if not row.rejected) <= 260


def test_workers_with_too_little_memory_are_left_out() -> None:
    answer = chosen(choose(request(uniform(2), [*slots(2), Slot("tiny", "vm9", 10)])))
    assert "tiny" not in answer.workers


def test_an_expensive_allreduce_makes_pipelines_deeper() -> None:
    cheap = uniform(4)
    costly = uniform(4, gradient_bytes=(1000,) * 4, inter_vm=Link(latency_s=0.0, bytes_per_s=50.0))
    assert chosen(choose(request(cheap, slots(4)))).plan.shape == "1x4"
    assert chosen(choose(request(costly, slots(4)))).plan.shape == "4x1"


def test_fixed_degrees_are_kept_or_said_to_be_impossible() -> None:
    assert chosen(choose(request(uniform(4), slots(6), pipeline_parallel_degree=3))).plan.shape == "3x2"
    assert chosen(choose(request(uniform(4), slots(6), data_parallel_degree=2))).plan.shape in (
        "1x2",
        "2x2",
        "3x2",
    )
    for degrees, message in [
        (
            {"pipeline_parallel_degree": 5},
            "pipeline_parallel_degree: 5, but the model is cut into 4 sections",
        ),
        ({"pipeline_parallel_degree": 5}, "parallelism.num_sections, or more names in Training.cuts"),
        ({"data_parallel_degree": 9}, "data_parallel_degree: 9"),
        ({"pipeline_parallel_degree": 2, "data_parallel_degree": 4}, "need 8 workers, there are 6"),
    ]:
        answer = choose(request(uniform(4), slots(6), **degrees))
        assert isinstance(answer, Infeasible)
        assert message in answer.reason


def test_more_workers_than_can_be_used_and_none_at_all() -> None:
    assert chosen(choose(request(uniform(2), slots(9), num_micro_batches=2))).plan.num_workers <= 4
    assert isinstance(choose(request(uniform(2), [])), Infeasible)


@given(requests(), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_no_plan_beats_its_bound(asked: Request, recompute: bool, seed: int) -> None:
    draw = random.Random(seed)
    may_split = asked.calibration.has_halves and asked.schedule is not Schedule.GPIPE and not recompute
    halves = may_split and draw.random() < 0.8
    table = stage_table(asked.calibration, asked.schedule)
    splits = balance(table, asked.num_sections, recompute=True, fits=anything)
    for depth, split in splits.items():
        replicas = draw.randint(1, asked.num_micro_batches)
        window = draw.choice([None, 1, 2])
        plan = grid(
            split.stages,
            replicas,
            asked.num_micro_batches,
            schedule=asked.schedule,
            window=window,
            recompute=recompute,
            halves=halves,
            frozen=asked.calibration.frozen,
        )
        factors = [draw.choice([1.0, 1.5, 2.5]) for _ in range(depth)]
        slowdown = [factor * draw.choice([1.0, 1.0, 1.7]) for _ in range(replicas) for factor in factors]
        played = simulate(plan, asked.calibration, slowdown=slowdown, seed=seed)
        bound = Bound(
            table,
            split.stages,
            Mode(recompute, halves),
            slowdown=factors,
            window=window,
        )
        rings = AllReduceCosts(table, replicas, asked.num_micro_batches)
        fullest = -(-asked.num_micro_batches // replicas)
        assert bound.step_ns(fullest, rings) <= played.time_s * 1e9 * (1 + 1e-6) + 1
        assert bound.pipeline_ns(fullest) <= played.pipeline_s * 1e9 * (1 + 1e-6) + 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 9))
def test_micro_batches_are_dealt_so_that_the_last_replica_ends_as_soon_as_can_be(
    paces: list[tuple[int, int]], more: int
) -> None:
    num = len(paces) + more

    def ends(shares: tuple[int, ...]) -> int:
        return max(fixed + share * each for share, (fixed, each) in zip(shares, paces, strict=True))

    shares = split_micro_batches(num, paces)
    every = [s for s in itertools.product(range(1, more + 2), repeat=len(paces)) if sum(s) == num]
    assert shares in every
    assert ends(shares) == min(map(ends, every))


def test_equal_replicas_are_dealt_evenly_the_first_ones_more() -> None:
    assert split_micro_batches(11, [(5, 3)] * 4) == (3, 3, 3, 2)


def test_what_cannot_win_is_not_played_and_says_why() -> None:
    answer = chosen(choose(request(uniform(4), slots(4))))
    assert answer.plan.shape == "1x4"
    skipped = [row for row in answer.candidates if row.predicted_s is None]
    assert skipped
    assert all(row.rejected and "its work alone takes" in row.rejected for row in skipped)


def test_the_window_is_the_narrowest_that_costs_no_time() -> None:
    # With links that cost nothing two micro-batches for each stage are enough; these links need more.
    fast = chosen(choose(request(uniform(4), slots(4), num_micro_batches=64, pipeline_parallel_degree=4)))
    assert fast.plan.window == 8
    link = Link(latency_s=0.2, bytes_per_s=4 / 1.5, jitter_s=0.5)
    slow = uniform(4, grad_cut_bytes=(4,) * 3, inter_vm=link)
    asked = request(slow, slots(4), num_micro_batches=64, pipeline_parallel_degree=4, halves="off")
    answer = chosen(choose(asked))
    assert answer.plan.window in (12, 16)
    tried = {row.window: row for row in answer.candidates}
    assert "the best plan takes" in (tried[8].rejected or "")
    peaks = {window: row.peak_bytes or 0 for window, row in tried.items()}
    assert 0 < peaks[answer.plan.window] < peaks[None]


def test_memory_bounds_the_window() -> None:
    tight = chosen(
        choose(
            request(
                uniform(2),
                slots(2, memory_bytes=135),
                num_micro_batches=16,
                pipeline_parallel_degree=2,
                recompute="off",
            )
        )
    )
    assert tight.plan.window in (1, 2, 3)


@pytest.mark.parametrize(
    ("memory_bytes", "first", "window"), [(220, Range(0, 2), 1), (240, Range(0, 1), 2), (260, Range(0, 2), 2)]
)
def test_stages_are_unequal_where_that_lets_more_micro_batches_be_in_flight(
    memory_bytes: int, first: Range, window: int
) -> None:
    """Two in flight of 3 and 9 s a stage pass faster than one at a time of 6 and 6 s, though not than two."""
    calibration = uniform(
        4,
        activation_bytes=(10, 60, 10, 10),
        state_bytes=(50,) * 4,
        parameter_bytes=(10,) * 4,
        gradient_bytes=(20,) * 4,
    )
    fixed = {"pipeline_parallel_degree": 2, "recompute": "off", "halves": "off"}
    answer = chosen(choose(request(calibration, slots(2, memory_bytes), num_micro_batches=16, **fixed)))
    assert (answer.plan.ranges[0], answer.plan.window) == (first, window)
    assert answer.predicted_s < {1: 200.0, 2: 150.0}[window]


@pytest.mark.parametrize(("recompute", "expected"), [("on", True), ("off", False), ("auto", False)])
def test_recompute_is_as_asked_and_auto_only_for_memory(recompute: str, expected: bool) -> None:
    roomy = chosen(choose(request(uniform(2), slots(2), pipeline_parallel_degree=2, recompute=recompute)))
    assert roomy.plan.recompute is expected


def test_auto_recomputes_where_memory_leaves_too_small_a_window() -> None:
    # Without recomputation one micro-batch in flight fits; with it, all of them.
    calibration = uniform(2, activation_bytes=(100, 10), cut_bytes=(1,), grad_cut_bytes=(1,))
    answer = chosen(
        choose(
            request(calibration, slots(2, memory_bytes=230), num_micro_batches=32, pipeline_parallel_degree=2)
        )
    )
    assert answer.plan.recompute


def one_pipeline(**change: Any) -> Request:
    """Four stages, 18 micro-batches of F = I = W = 1 s."""
    calibration = uniform(4, **change.pop("calibration", {}))
    return request(calibration, slots(4), **{"num_micro_batches": 18, "pipeline_parallel_degree": 4} | change)


def test_halves_are_chosen_where_they_shorten_a_step() -> None:
    halved, whole = (chosen(choose(one_pipeline(halves=halves))) for halves in ("auto", "off"))
    assert halved.plan.halves
    assert halved.candidate.halves
    assert not whole.plan.halves
    assert (halved.candidate.pipeline_s, whole.candidate.pipeline_s) == (18 * 3 + 3, 18 * 3 + 3 * 3)


@pytest.mark.parametrize(
    "change",
    [
        {"pipeline_parallel_degree": 1},  # nobody waits for an I
        {"calibration": {"input_s": (), "weight_s": ()}},  # of an earlier version
        {"calibration": {"weight_s": (1.4,) * 4}},  # I and W take 20 % longer than B
        {"num_micro_batches": 1000},  # 6 s of 3010 s
        {"recompute": "on"},
        {"schedule": Schedule.GPIPE},
        {"schedule": Schedule.ONE_F_ONE_B},
    ],
)
def test_backwards_stay_whole_where_halves_cannot_be_or_save_less_than_a_hundredth(
    change: dict[str, Any],
) -> None:
    assert not chosen(choose(one_pipeline(**change))).plan.halves


def test_on_halves_backwards_whether_it_pays_or_not() -> None:
    dear = {"weight_s": (1.4,) * 4}
    assert chosen(choose(one_pipeline(calibration=dear, halves="on"))).plan.halves
    assert not chosen(choose(one_pipeline(calibration=dear, halves="on", recompute="on"))).plan.halves


def test_a_pending_w_keeps_activations_so_that_little_memory_leaves_backwards_whole() -> None:
    # 100 bytes of state; of each micro-batch in flight 10 of activations, and 90 that an I leaves.
    pending = {"pending_bytes": (90,) * 4}
    assert chosen(choose(one_pipeline(calibration=pending))).plan.halves
    for memory_bytes in (230, 260):
        tight = one_pipeline(calibration=pending, memory_limit_bytes=memory_bytes, recompute="off")
        assert not chosen(choose(tight)).plan.halves


@given(requests(), st.integers(1, 6), st.sampled_from([60, 200, 10_000]))
@settings(max_examples=25, deadline=None)
def test_no_shape_with_or_without_halves_is_faster_than_the_choice(
    asked: Request, num_workers: int, memory_bytes: int
) -> None:
    """Every P and D by itself, with halves wherever they can be and without, on workers that are alike."""
    free = replace(
        asked,
        workers=slots(num_workers, memory_bytes),
        pipeline_parallel_degree=None,
        data_parallel_degree=None,
        recompute="off",
        halves="auto",
    )
    answer = choose(free)
    if isinstance(answer, Infeasible):
        return
    for depth, halves in itertools.product(range(1, free.num_sections + 1), ("on", "off")):
        for replicas in range(1, num_workers // depth + 1):
            fixed = replace(free, pipeline_parallel_degree=depth, data_parallel_degree=replicas)
            other = choose(replace(fixed, halves=halves))
            if isinstance(other, Choice):
                assert answer.predicted_s <= other.predicted_s * 1.01**2


@pytest.mark.parametrize(
    ("offload", "device_kind", "memory_bytes", "expected"),
    [
        ("auto", "cuda", 150, False),
        ("auto", "cuda", 90, True),
        ("auto", "cpu", 150, False),
        ("on", "cuda", 150, True),
        ("on", "cpu", 150, False),
        ("off", "cuda", 150, False),
    ],
)
def test_optimizer_state_goes_to_the_host_where_nothing_fits_otherwise(
    offload: str, device_kind: str, memory_bytes: int, expected: bool
) -> None:
    # A section's state is 100 bytes, 50 of them the optimizer's.
    calibration = uniform(2, optimizer_bytes=(50, 50), device_kind=device_kind)
    asked = request(calibration, slots(2, memory_bytes=memory_bytes), optimizer_offload=offload)
    plan = chosen(choose(asked)).plan
    assert plan.optimizer_on_host is expected
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("offload", "device_kind"), [("off", "cuda"), ("auto", "cpu"), ("on", "cpu")])
def test_without_the_host_too_little_memory_is_too_little(offload: str, device_kind: str) -> None:
    calibration = uniform(2, optimizer_bytes=(50, 50), device_kind=device_kind)
    asked = request(calibration, slots(2, memory_bytes=90), optimizer_offload=offload)
    assert isinstance(choose(asked), Infeasible)


@st.composite
def mixed(draw: st.DrawFn) -> Request:
    """Workers of different speeds, with room enough."""
    num_sections = draw(st.integers(1, 5))
    calibration = uniform(
        num_sections,
        forward_s=tuple(draw(st.integers(1, 4)) / 2 for _ in range(num_sections)),
        inter_vm=Link(latency_s=0.01, bytes_per_s=draw(st.sampled_from([10.0, 1000.0]))),
    )
    per_vm = draw(st.integers(1, 2))
    workers = [
        Slot(f"w{i}", f"vm{i // per_vm}", 10_000, draw(st.sampled_from([1.0, 1.0, 1.0, 1.3, 2.5])))
        for i in range(draw(st.integers(1, 8)))
    ]
    return request(calibration, workers, num_micro_batches=draw(st.integers(1, 12)))


@given(mixed())
@settings(max_examples=30, deadline=None)
def test_slow_workers_never_make_a_plan_slower_than_without_them_or_than_dealt_evenly(
    asked: Request,
) -> None:
    found = chosen(choose(asked))
    speeds = [slot.slowdown for slot in asked.workers]
    fast = [slot for slot in asked.workers if slot.slowdown == min(speeds)]
    assert found.predicted_s <= chosen(choose(replace(asked, workers=fast))).predicted_s * 1.01
    by_speed = sorted(asked.workers, key=lambda slot: slot.slowdown)
    splits = balance(stage_table(asked.calibration), asked.num_sections, recompute=False, fits=anything)
    for depth, split in splits.items():
        replicas = min(len(by_speed) // depth, asked.num_micro_batches)
        if not replicas:
            continue
        placed = place(by_speed[: depth * replicas], split.stages, {}, ())
        naive = simulate(
            grid(split.stages, replicas, asked.num_micro_batches),
            asked.calibration,
            vm_of=[slot.vm for slot in placed],
            slowdown=[slot.slowdown for slot in placed],
        )
        assert found.predicted_s <= naive.time_s * 1.01


def test_pipelines_with_slow_workers_get_fewer_micro_batches_and_few_pipelines_have_them() -> None:
    workers = [Slot(f"w{i}", f"vm{i}", 10_000, slowdown=2.0 if i in (1, 4) else 1.0) for i in range(6)]
    asked = request(uniform(2), workers, num_micro_batches=24, pipeline_parallel_degree=2)
    found = chosen(choose(asked))
    assert found.plan.shape == "2x3"
    assert [len(path.micro_batches) for path in found.plan.paths] == [10, 10, 4]
    assert set(found.workers[4:]) == {"w1", "w4"}
    assert found.candidate.predicted_s == found.predicted_s


def test_a_slow_worker_in_the_only_pipeline_takes_fewer_sections() -> None:
    workers = [*slots(3), Slot("slow", "vm9", 10_000, slowdown=2.0)]
    found = chosen(choose(request(uniform(7), workers, num_micro_batches=30, pipeline_parallel_degree=4)))
    sizes = {worker: len(span) for worker, span in zip(found.workers, found.plan.ranges, strict=True)}
    assert sizes == {"w0": 2, "w1": 2, "w2": 2, "slow": 1}
    assert found.candidate.slow_stage == found.workers.index("slow")


def test_sums_over_fewer_replicas_may_save_more_than_their_work_costs() -> None:
    costly = uniform(1, gradient_bytes=(400,), inter_vm=Link(latency_s=0.3, bytes_per_s=1000.0))
    found = chosen(choose(request(costly, slots(8), num_micro_batches=8)))
    assert found.plan.shape == "1x4"
    for replicas in range(1, 9):
        fixed = request(costly, slots(8), num_micro_batches=8, data_parallel_degree=replicas)
        assert chosen(choose(fixed)).predicted_s >= found.predicted_s


def test_replicas_that_would_save_no_round_are_left_out() -> None:
    # Five workers take two rounds for eight micro-batches, as four do.
    assert chosen(choose(request(uniform(1), slots(5)))).plan.shape == "1x4"


def test_a_slow_worker_is_the_one_left_over() -> None:
    workers = [Slot("slow", "vm9", 10_000, slowdown=2.0), *slots(4)]
    answer = chosen(choose(request(uniform(2), workers, pipeline_parallel_degree=2)))
    assert "slow" not in answer.workers


def test_neighbours_share_a_vm_and_replicas_do_not() -> None:
    stages = [Range(0, 1), Range(1, 2)]
    placed = place(slots(4, per_vm=2), stages, {}, [1, 1])
    assert [slot.vm for slot in placed] == ["vm0", "vm0", "vm1", "vm1"]


def test_workers_stay_with_the_sections_they_hold() -> None:
    stages = [Range(0, 1), Range(1, 2)]
    holding = {"w0": Range(1, 2), "w1": Range(0, 1), "w3": Range(0, 1)}
    placed = place(slots(4), stages, holding, [1, 1])
    assert all(
        stages[rank % 2] == holding.get(slot.worker, stages[rank % 2]) for rank, slot in enumerate(placed)
    )


def test_who_holds_the_model_keeps_what_would_take_longest_to_send_not_what_is_resident() -> None:
    """Sums of gradients are resident, and go nowhere."""
    calibration = uniform(2, state_bytes=(100, 60), gradient_bytes=(90, 0), snapshot_bytes=(10, 60))
    answer = chosen(
        choose(
            request(
                calibration,
                slots(2),
                holding={"w0": Range(0, 2)},
                pipeline_parallel_degree=2,
            )
        )
    )
    assert answer.workers == ("w1", "w0")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_sections": 5}, "num_sections"),
        ({"num_micro_batches": 0}, "num_micro_batches"),
        ({"pipeline_parallel_degree": 0}, "pipeline_parallel_degree"),
        ({"workers": slots(1) * 2}, "workers"),
        ({"workers": [Slot("w", "vm", 1, slowdown=0.0)]}, "workers"),
    ],
)
def test_a_request_that_cannot_be_names_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        request(uniform(4), **({"workers": slots(1)} | change))
