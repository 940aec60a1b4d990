"""The simulator: steps against sums made by hand, determinism, memory, strict reading of its inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from calibrations import frozen_beginning, uniform
from hypothesis import given, settings
from makara.pipeline import Kind, Plan, Range, grid, orders
from makara.simulator import (
    Calibration,
    Closing,
    ClosingKind,
    InvalidCalibration,
    InvalidTrace,
    Link,
    NodeChange,
    TraceEvent,
    read_trace,
    simulate,
)
from makara.simulator.calibration.data import TiedSum
from plans import crossing_plans, grids, stages

JITTERY = Link(latency_s=0.1, bytes_per_s=100.0, jitter_s=0.5)


@given(crossing_plans() | grids())
def test_every_plan_is_played_to_its_end(plan: Plan) -> None:
    step = simulate(plan, uniform(plan.num_sections, inter_vm=JITTERY), seed=3)
    assert sorted(span.operation for span in step.timeline) == sorted(
        t for order in orders(plan) for t in order
    )
    for busy, idle in zip(step.busy_s, step.idle_s, strict=True):
        assert busy + idle == pytest.approx(step.time_s)
        assert idle >= 0


@given(grids(max_micro_batches=9))
@settings(max_examples=30)
def test_replicas_played_once_are_what_they_would_be_played_each(plan: Plan) -> None:
    link = Link(latency_s=0.1, bytes_per_s=100.0)
    together = simulate(plan, uniform(plan.num_sections, inter_vm=link))
    # Slowdowns a billionth apart change nothing but that no two replicas are alike any more.
    apart = simulate(
        plan,
        uniform(plan.num_sections, inter_vm=link),
        slowdown=[1 + 1e-11 * worker for worker in range(plan.num_workers)],
    )
    assert together.timeline == apart.timeline
    assert together.peak_bytes == apart.peak_bytes


def test_jitter_is_drawn_from_the_seed() -> None:
    plan, calibration = grid(stages(3), 2, 8), uniform(3, inter_vm=JITTERY)
    assert simulate(plan, calibration, seed=1) == simulate(plan, calibration, seed=1)
    assert simulate(plan, calibration, seed=1).time_s != simulate(plan, calibration, seed=2).time_s


def test_a_message_takes_its_size_over_the_bandwidth_and_the_latency() -> None:
    calibration = uniform(2, inter_vm=Link(latency_s=0.25, bytes_per_s=8.0))
    step = simulate(grid(stages(2), 1, 1), calibration)
    # F, 4 bytes, F, B, 3 bytes, B
    assert step.pipeline_s == pytest.approx(1 + (0.5 + 0.25) + 1 + 2 + (0.375 + 0.25) + 2)
    same_vm = simulate(grid(stages(2), 1, 1), calibration, vm_of=["a", "a"])
    assert same_vm.pipeline_s == pytest.approx(6)


def test_allreduce_commit_and_optimizer_end_the_step() -> None:
    calibration = uniform(1, inter_vm=Link(latency_s=0.0, bytes_per_s=10.0))
    step = simulate(grid(stages(1), 2, 2), calibration)
    # The ring moves 2(D-1)/D of the tally's 32 bytes when both forwards are done, then of the 50 gradient
    # bytes, then of the commit's 64; the optimizer takes 0.5 s.
    assert step.pipeline_s == pytest.approx(3)
    assert step.time_s == pytest.approx(1 + 3.2 + 5 + 6.4 + 0.5)


def test_a_section_is_summed_while_the_backwards_of_others_run() -> None:
    calibration = uniform(2, inter_vm=Link(latency_s=0.5, bytes_per_s=1e9))
    step = simulate(grid([Range(0, 2)], 2, 2), calibration)
    # F is 2 s, B 4 s. Each sum takes 2 latencies: the tally ends at 3 s, section 1 at 5 s, section 0 at 7 s.
    assert step.pipeline_s == pytest.approx(6)
    assert step.time_s == pytest.approx(7 + 1 + 1)
    assert [one for one in step.closings if one.worker == 1] == [
        Closing(1, ClosingKind.LOSS_ALLREDUCE, None, 2, pytest.approx(3)),
        Closing(1, ClosingKind.GRADIENT_ALLREDUCE, 1, 4, pytest.approx(5)),
        Closing(1, ClosingKind.GRADIENT_ALLREDUCE, 0, 6, pytest.approx(7)),
        Closing(1, ClosingKind.COMMIT, None, pytest.approx(7), pytest.approx(8)),
        Closing(1, ClosingKind.UPDATE, None, pytest.approx(8), pytest.approx(9)),
    ]
    slow = uniform(2, inter_vm=Link(latency_s=1.5, bytes_per_s=1e9))
    # Section 1's last backward is over at 4 s, but the tally at 5 s; then both sums follow each other.
    assert simulate(grid([Range(0, 2)], 2, 2), slow).time_s == pytest.approx(2 + 3 + 3 + 3 + 3 + 1)


def test_gradients_of_tied_parameters_are_summed_last_over_all_their_hosts() -> None:
    link = Link(latency_s=0.0, bytes_per_s=10.0, hop_bytes_per_s=10.0)
    tied = (TiedSum(sections=(0, 1), gradient_bytes=40),)

    def sums(plan: Plan, **change: Any) -> list[tuple[int | None, float]]:
        step = simulate(plan, uniform(2, inter_vm=link, cut_bytes=(0,), grad_cut_bytes=(0,), **change))
        own = [one for one in step.closings if one.kind is ClosingKind.GRADIENT_ALLREDUCE]
        return [(one.section, round(one.stop_s - one.start_s, 6)) for one in own if one.worker == 0]

    straight, wide = grid(stages(2), 1, 2), grid([Range(0, 2)], 2, 2)
    assert sums(straight) == []
    assert sums(straight, tied_sums=tied) == [(0, 4.0)]
    assert sums(wide) == [(1, 5.0), (0, 5.0)]
    assert sums(wide, tied_sums=tied) == [(1, 1.0), (0, 1.0), (0, 4.0)]


def test_what_the_executor_adds_is_counted_where_it_adds_it() -> None:
    plan, link = grid(stages(2), 1, 1), Link(latency_s=0.25, bytes_per_s=1e18)
    plain = simulate(plan, uniform(2, inter_vm=link))
    per_operation = simulate(plan, uniform(2, inter_vm=link, operation_s=0.01))
    assert per_operation.pipeline_s == pytest.approx(plain.pipeline_s + 4 * 0.01)  # F, F, B, B
    per_message = simulate(plan, uniform(2, inter_vm=link, message_s=0.02))
    assert per_message.pipeline_s == pytest.approx(plain.pipeline_s + 2 * 0.02)
    # The tally is over before the last backward is, so of the sums only the commit's cost is seen.
    per_collective = simulate(plan, uniform(2, inter_vm=link, collective_s=0.04))
    assert per_collective.time_s == pytest.approx(plain.time_s + 0.04)
    alone = grid([Range(0, 2)], 1, 1)
    assert simulate(alone, uniform(2, collective_s=1.0)).time_s == simulate(alone, uniform(2)).time_s


def test_a_slow_worker_slows_its_own_operations() -> None:
    step = simulate(grid(stages(2), 1, 1), uniform(2), slowdown=[1.0, 2.0])
    assert step.pipeline_s == pytest.approx(1 + 2 + 4 + 2)


def test_memory_is_state_and_what_is_in_flight() -> None:
    # Without recompute the first stage keeps both micro-batches' activations, and a gradient of 3 bytes.
    kept = simulate(grid(stages(2), 1, 2), uniform(2)).peak_bytes
    assert kept[0] == 100 + 2 * 10 + 3
    # With recompute it keeps no more than one micro-batch's (stage 0 has no inputs to keep).
    assert simulate(grid(stages(2), 1, 2, recompute=True), uniform(2)).peak_bytes[0] == 100 + 10 + 3


@given(crossing_plans() | grids())
def test_memory_over_time_ends_as_it_began_and_reaches_the_peak(plan: Plan) -> None:
    step = simulate(plan, uniform(plan.num_sections, reduced_bytes=(7,) * plan.num_sections))
    for steps, peak in zip(step.memory, step.peak_bytes, strict=True):
        times = [time_s for time_s, _ in steps]
        assert times == sorted(set(times))
        assert (times[0], times[-1]) == (0, step.time_s)
        assert steps[0][1] >= steps[-1][1] > 0
        assert max(size_bytes for _, size_bytes in steps) == peak


def test_without_a_timeline_the_figures_are_the_same() -> None:
    plan, calibration = grid(stages(3), 2, 8, recompute=True), uniform(3, inter_vm=JITTERY)
    bare = simulate(plan, calibration, timeline=False)
    assert (bare.timeline, bare.closings, bare.memory) == ((), (), ())
    whole = simulate(plan, calibration)
    assert replace(whole, timeline=(), closings=(), memory=()) == bare


def test_optimizer_state_on_the_host_takes_no_memory_of_the_device() -> None:
    plan, calibration = grid(stages(2), 1, 2), uniform(2, optimizer_bytes=(60, 40))
    here = simulate(plan, calibration).peak_bytes
    there = simulate(plan, calibration.with_optimizer_on_host()).peak_bytes
    assert [a - b for a, b in zip(here, there, strict=True)] == [60, 40]


def test_sections_without_gradients_wait_for_no_allreduce() -> None:
    far = Link(latency_s=1.0, bytes_per_s=1e9)
    plan = grid([Range(0, 4)], 4, 8)
    frozen, alone = (
        simulate(plan, uniform(4, **frozen_beginning(4, number), inter_vm=far)) for number in (3, 0)
    )
    sections = [one.section for one in frozen.closings if one.kind is ClosingKind.GRADIENT_ALLREDUCE]
    assert set(sections) == {3}
    assert frozen.time_s < alone.time_s - 3 * 6


def test_a_frozen_beginning_is_not_recomputed_and_keeps_no_activations() -> None:
    calibration = uniform(4, **frozen_beginning(4, 2), backward_s=(0.0, 0.0, 2.0, 2.0))
    whole, frozen = (
        simulate(grid(stages(4), 1, 8, recompute=True, frozen=frozen), calibration) for frozen in (0, 2)
    )
    assert frozen.busy_s[0] == pytest.approx(whole.busy_s[0] - 8)
    assert frozen.busy_s[1:3] == (pytest.approx(whole.busy_s[1] - 8), whole.busy_s[2])
    unbounded = simulate(grid(stages(4), 1, 8, frozen=2), calibration)
    assert unbounded.peak_bytes[0] == 100 + 10  # while a forward runs; inputs are samples
    assert unbounded.peak_bytes[2] > 100 + 2 * 10


def test_a_step_of_a_deep_frozen_stage_takes_half_as_long_without_its_recomputation() -> None:
    calibration = uniform(4, **frozen_beginning(4, 3), backward_s=(0.0, 0.0, 0.0, 2.0))
    whole, frozen = (
        simulate(grid([Range(0, 3), Range(3, 4)], 1, 40, recompute=True, frozen=frozen), calibration).time_s
        for frozen in (0, 3)
    )
    assert frozen == pytest.approx(40 * 3 + 3 + 1.5)  # and the update of three sections
    assert whole > 2 * 40 * 3


def test_a_stage_that_is_frozen_in_part_recomputes_what_is_trained() -> None:
    calibration = uniform(4, **frozen_beginning(4, 2), backward_s=(0.0, 0.0, 2.0, 2.0))
    step = simulate(
        grid([Range(0, 3), Range(3, 4)], 1, 8, recompute=True, frozen=2), calibration, timeline=True
    )
    recomputed = sum(o.operation.kind is Kind.RECOMPUTE for o in step.timeline if o.worker == 0)
    assert recomputed > 0
    assert step.busy_s[0] == pytest.approx(8 * (3 + 2) + recomputed + 1.5)  # and the update


def test_recomputation_costs_a_forward() -> None:
    plan = grid([Range(0, 2), Range(2, 3)], 1, 1, recompute=True)
    step = simulate(plan, uniform(3))
    spent = {span.operation.kind: span.stop_s - span.start_s for span in step.timeline if span.worker == 0}
    assert spent == {
        Kind.FORWARD: pytest.approx(2),
        Kind.RECOMPUTE: pytest.approx(2),
        Kind.BACKWARD: pytest.approx(4),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [({"vm_of": ["a"]}, "vm_of"), ({"slowdown": [1.0]}, "slowdown"), ({"slowdown": [1.0, 0.0]}, "slowdown")],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(grid(stages(2), 1, 1), uniform(2), **change)
    with pytest.raises(ValueError, match="3 sections"):
        simulate(grid(stages(2), 1, 1), uniform(3))


def test_a_calibration_survives_json() -> None:
    calibration = uniform(3, inter_vm=JITTERY, operation_s=1e-4, message_s=2e-4, collective_s=3e-4)
    calibration = replace(calibration, tied_sums=(TiedSum(sections=(0, 2), gradient_bytes=20),))
    assert Calibration.from_json(json.loads(json.dumps(calibration.to_json()))) == calibration
    without = uniform(3).to_json()
    for name in ("operation_s", "message_s", "collective_s"):
        del without[name]  # as written by versions that did not measure them
    assert Calibration.from_json(without) == uniform(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_s": [1.0, -1.0]}, r"forward_s\[1\]"),
        ({"backward_s": [1.0]}, "backward_s: expected 2"),
        ({"cut_bytes": [1, 2]}, "cut_bytes: expected 1"),
        ({"state_bytes": [1.5, 2]}, r"state_bytes\[0\]"),
        ({"optimizer_s": ["a", 1]}, r"optimizer_s\[0\]"),
        ({"forward_s": 3}, "forward_s: expected a list, got 3"),
        ({"optimizer_bytes": [101, 0]}, "optimizer_bytes: they are part of state_bytes"),
        (
            {"tied_sums": [{"sections": [0, 2], "gradient_bytes": 1}]},
            r"tied_sums\[0\].sections: expected two",
        ),
        ({"tied_sums": [{"sections": [0, 1], "gradient_bytes": 51}]}, "tied_sums: they are part of gradient"),
        ({"operation_s": -1.0}, "operation_s: expected greater than or equal to 0, got -1.0"),
        ({"message_s": "1"}, "message_s: expected a valid number, got '1'"),
        ({"colour": "red"}, "colour: unknown key"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"inter_vm": {"latency_s": 1, "bytes_per_s": 0}}, r"inter_vm\.bytes_per_s"),
        ({"inter_vm": {"latency_s": None, "bytes_per_s": 1}}, r"inter_vm\.latency_s: .*, got None"),
        ({"inter_vm": {"latency_s": 1}}, r"inter_vm\.bytes_per_s: is required"),
        ({"versions": {"torch": 2}}, r"versions\.torch"),
        ({"format": 9}, "format: expected 1, got 9"),
    ],
)
def test_a_bad_calibration_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCalibration, match=message):
        Calibration.from_json(uniform(2).to_json() | change)


def test_a_trace_is_read_in_order() -> None:
    assert read_trace("0,add,a\n\n5,remove,a\n") == (
        TraceEvent(0, NodeChange.ADD, "a"),
        TraceEvent(5, NodeChange.REMOVE, "a"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add\n", "line 1: '0,add': expected 3 columns"),
        ("0,add,a\nx,add,b\n", "line 2: 'x'"),
        ("0,join,a\n", "line 1: 'join'"),
        ("0,add,\n", "line 1: the node has no name"),
        ("4,add,a\n2,add,b\n", "line 2: 2 ms comes after 4 ms"),
        ("0,add,a\n1,add,a\n", "line 2: 'a' is added, but is there already, since line 1"),
        ("0,remove,a\n", "line 1: 'a' is removed, but was never added"),
    ],
)
def test_a_bad_trace_names_the_line(text: str, message: str) -> None:
    with pytest.raises(InvalidTrace, match=message):
        read_trace(text)
