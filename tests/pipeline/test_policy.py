"""The dispatcher: it never deadlocks, never changes the order within a kind, and deviates only as it may."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makara.pipeline import (
    Dispatcher,
    Hop,
    InvalidOrder,
    Kind,
    Operation,
    Path,
    Plan,
    Range,
    Schedule,
    grid,
    messages,
    orders,
    own_part,
    peak_in_flight,
)
from makara.pipeline.plan import RestOfStep
from makara.pipeline.policy import FORWARD as FORTH
from makara.pipeline.policy import decide
from plans import World, crossing_plans, grids, stages

F, R, B = Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD


@given(crossing_plans() | grids(), st.integers(0, 1 << 32))
def test_any_plan_finishes_under_any_delays(plan: Plan, seed: int) -> None:
    world = World(plan, random.Random(seed))
    world.play()
    assert [dispatcher.remaining for dispatcher in world.dispatchers] == [0] * plan.num_workers
    for ran, static in zip(world.ran, world.orders, strict=True):
        for kind in Kind:
            assert [task for task in ran if task.kind is kind] == [
                task for task in static if task.kind is kind
            ]
        for one, following in itertools.pairwise(ran):
            if one.kind is R:
                assert following == Operation(one.stage, B, one.micro_batch)


@given(crossing_plans() | grids(), st.integers(0, 1 << 32))
def test_each_channel_carries_the_announced_messages_in_the_announced_order(plan: Plan, seed: int) -> None:
    world = World(plan, random.Random(seed))
    world.play()
    traffic = messages(plan, world.orders)
    for worker, here in enumerate(traffic):
        for peer in range(plan.num_workers):
            for kind in (F, B):
                sent = [m.operation for m in here.sends if (m.peer, m.kind) == (peer, kind)]
                received = [m.operation for m in traffic[peer].receives if (m.peer, m.kind) == (worker, kind)]
                assert sent == received == world.delivered.get((worker, peer, kind.value), [])


@given(crossing_plans() | grids())
def test_a_worker_alone_computes_the_same_order_and_messages(plan: Plan) -> None:
    everyone = orders(plan)
    for worker, of_worker in enumerate(zip(everyone, messages(plan, everyone), strict=True)):
        assert own_part(plan, worker) == of_worker


@given(grids(), st.integers(0, 1 << 32))
def test_running_ahead_keeps_to_the_window(plan: Plan, seed: int) -> None:
    world = World(plan, random.Random(seed))
    world.play()
    for ran, static in zip(world.ran, world.orders, strict=True):
        if plan.schedule is Schedule.ONE_F_ONE_B:
            assert peak_in_flight(ran) <= peak_in_flight(static)
        if plan.window is not None:
            assert peak_in_flight(ran) <= plan.window


@pytest.mark.parametrize("schedule", [Schedule.VARUNA, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_visited_twice_keeps_to_the_window_where_the_first_visit_gets_no_gradient(
    schedule: Schedule, seed: int
) -> None:
    """Found: a micro-batch left the window before its W, as many as there are kept their activations."""
    hops = (Hop(0, Range(0, 1)), Hop(1, Range(1, 2)), Hop(1, Range(2, 3)))
    ranges, micro_batches = (Range(0, 1), Range(1, 3)), tuple(range(20))
    whole = Plan(3, 20, ranges, (Path(hops, micro_batches),), schedule, window=4, halves=True)
    rest = RestOfStep.of(whole, (Path(hops, micro_batches, open_from=2),))
    world = World(rest, random.Random(seed))
    world.play()
    for order in (world.orders[1], world.ran[1]):
        kept, most = 0, 0
        for task in order:
            kept += (task.stage == 2) * ((task.kind is F) - (task.kind is Kind.WEIGHT))
            most = max(most, kept)
        assert most <= 4


@given(crossing_plans(), st.integers(0, 1 << 32))
def test_the_same_calls_give_the_same_answers(plan: Plan, seed: int) -> None:
    first, second = World(plan, random.Random(seed)), World(plan, random.Random(seed))
    first.play()
    second.play()
    assert first.ran == second.ran


@pytest.mark.parametrize("rules", list(itertools.product([False, True], repeat=7)))
def test_an_answer_that_is_no_forward_does_not_hang_on_the_input_of_one(rules: tuple[bool, ...]) -> None:
    (
        is_planned,
        is_held,
        is_admitted,
        is_forward_recomputed,
        is_gradient_here,
        is_backward_recomputed,
        is_weight_left,
    ) = rules
    with_input, without = (
        decide(
            is_planned,
            is_held,
            is_forward_here,
            is_admitted,
            is_forward_recomputed,
            is_gradient_here,
            is_backward_recomputed,
            is_weight_left,
        )
        for is_forward_here in (True, False)
    )
    assert with_input in (FORTH, without)
    assert without != FORTH


def middle_stage(recompute: bool, **change: object) -> Dispatcher:
    plan = grid(stages(3), 1, 3, recompute=recompute, **change)  # pyright: ignore[reportArgumentType]
    return Dispatcher(plan, 1)


def test_a_late_forward_lets_a_backward_go_first() -> None:
    dispatcher = middle_stage(recompute=True)  # 1F0 1F1 ...
    dispatcher.arrived(Operation(1, F, 0))
    assert dispatcher.next() == Operation(1, F, 0)
    assert dispatcher.next() is None
    dispatcher.arrived(Operation(1, B, 0))
    assert dispatcher.next() == Operation(1, R, 0)
    assert dispatcher.next() == Operation(1, B, 0)
    dispatcher.arrived(Operation(1, F, 1))
    assert dispatcher.next() == Operation(1, F, 1)


def test_a_recomputed_micro_batch_waits_for_its_backward_whatever_is_ready() -> None:
    plan = grid(stages(3), 1, 2, recompute=True)
    order = [Operation(1, kind, m) for kind, m in [(F, 0), (R, 0), (B, 0), (F, 1), (R, 1), (B, 1)]]
    dispatcher = Dispatcher(plan, 1, order)
    dispatcher.arrived(Operation(1, F, 0))
    assert [dispatcher.next(), dispatcher.next()] == order[:2]  # nothing else could run
    dispatcher.arrived(Operation(1, F, 1))
    assert dispatcher.next() is None
    dispatcher.arrived(Operation(1, B, 0))
    assert dispatcher.next() == order[2]


@pytest.mark.parametrize(("window", "then"), [(None, "0F1"), (1, "0R0")])
def test_a_forward_goes_ahead_of_a_recomputation_that_would_wait(window: int | None, then: str) -> None:
    plan = grid(stages(2), 1, 2, recompute=True, window=window)
    order = [Operation(0, kind, m) for kind, m in [(F, 0), (R, 0), (B, 0), (F, 1), (R, 1), (B, 1)]]
    dispatcher = Dispatcher(plan, 0, order)
    assert [str(dispatcher.next()), str(dispatcher.next())] == ["0F0", then]


def test_a_forward_that_keeps_its_activations_does_not_go_ahead_of_a_recomputation() -> None:
    # Two rounds of GPipe: 0F2 is the last forward of its round and is not recomputed.
    dispatcher = Dispatcher(grid(stages(2), 1, 3, recompute=True, window=2, schedule=Schedule.GPIPE), 0)
    assert [str(dispatcher.next()) for _ in range(2)] == ["0F0", "0F1"]
    dispatcher.arrived(Operation(0, B, 1))
    assert [str(dispatcher.next()) for _ in range(2)] == ["0B1", "0R0"]


def test_a_dispatcher_begins_every_step_anew() -> None:
    plan = grid(stages(2), 1, 4, recompute=True)
    once = Dispatcher(plan, 1)
    steps: list[list[str]] = []
    for _ in range(2):
        once.reset()
        for m in range(4):
            once.arrived(Operation(1, F, m))
        steps.append([str(once.next()) for _ in range(once.remaining)])
        assert once.remaining == 0
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("window", "ahead"), [(None, Operation(0, F, 1)), (2, Operation(0, F, 1)), (1, None)]
)
def test_a_late_gradient_lets_a_forward_go_first_if_the_window_allows(
    window: int | None, ahead: Operation | None
) -> None:
    plan = grid(stages(2), 1, 2, window=window)
    order = [Operation(0, kind, m) for kind, m in [(F, 0), (B, 0), (F, 1), (B, 1)]]
    dispatcher = Dispatcher(plan, 0, order)
    assert dispatcher.next() == order[0]
    assert dispatcher.next() == ahead


def test_the_last_hop_needs_no_gradient() -> None:
    dispatcher = Dispatcher(grid(stages(1), 1, 2), 0)
    assert [str(dispatcher.next()) for _ in range(4)] == ["0F0", "0B0", "0F1", "0B1"]
    assert dispatcher.next() is None
    assert dispatcher.remaining == 0


def test_recomputes_tells_what_to_keep() -> None:
    plan = grid(stages(2), 1, 2, recompute=True)
    assert Dispatcher(plan, 0).recomputes(micro_batch=1, stage=0)
    assert not Dispatcher(plan, 1).recomputes(micro_batch=1, stage=1)


def _operation(text: str) -> Operation:
    stage, kind, micro_batch = text
    return Operation(int(stage), Kind(kind), int(micro_batch))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0F0 0F1 0B0", "leaves out"),
        ("0F0 0F0 0B0 0F1 0B1", "occurs twice"),
        ("0B0 0F0 0F1 0B1", "its forward comes later"),
        ("0F0 0R0 0F1 0B0 0B1", "must follow directly"),
        ("1F0 0F0 0F1 0B0 0B1", "no work of this worker"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(order: str, message: str) -> None:
    with pytest.raises(InvalidOrder, match=message):
        Dispatcher(grid(stages(2), 1, 2), 0, [_operation(cell) for cell in order.split()])


def test_an_input_for_somebody_else_is_refused() -> None:
    dispatcher = middle_stage(recompute=False)
    for stray in (Operation(0, F, 0), Operation(1, R, 0), Operation(1, F, 9)):
        with pytest.raises(InvalidOrder, match="does not run"):
            dispatcher.arrived(stray)


def test_hops_in_a_row_on_one_worker_need_no_message() -> None:
    plan = grid(stages(1), 1, 3)
    assert all(not traffic.sends and not traffic.receives for traffic in messages(plan, orders(plan)))
