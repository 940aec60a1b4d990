"""The rest of a step that was cut off, simulated; and what of a step is done at an instant."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from calibrations import uniform
from hypothesis import given, settings
from hypothesis import strategies as st
from makara.pipeline import Plan, Range, grid
from makara.pipeline.contributions import Pairs, micro_batches_of
from makara.pipeline.operations import Kind
from makara.pipeline.plan import RestOfStep
from makara.pipeline.rest_of_step import rest_of_step
from makara.simulator import Link, StepProgress, simulate
from makara.simulator.backends import INTERPRETED, compiled
from makara.simulator.pipelines import Kernels
from makara.simulator.simulation import cluster_of, simulate_with
from plans import crossing_plans, grids, stages

WIRE = Link(latency_s=0.1, bytes_per_s=20.0)


@pytest.fixture(scope="module")
def fast() -> Kernels:
    pytest.importorskip("numba")
    return compiled()


def rest_after(
    plan: Plan, progress: StepProgress, at_s: float, dead: set[int], then: Plan | None = None
) -> RestOfStep:
    """What `then` has to do of a step of `plan` in which these workers died."""
    done = progress.at(at_s)
    held, known = [0] * plan.num_sections, 0
    for worker, own in enumerate(done):
        if worker not in dead:
            known |= own.losses
            for section, bits in own.contributions.items():
                held[section] |= bits
    every = (1 << plan.num_micro_batches) - 1
    missing = {(k,): Pairs((k,), (every & ~bits,)) for k, bits in enumerate(held)}
    return rest_of_step(
        then or plan, missing, list(micro_batches_of(every & ~known)), [1] * plan.num_sections
    )


@given(crossing_plans() | grids(), st.floats(0, 1))
def test_what_is_done_at_an_instant_is_what_the_timeline_shows(plan: Plan, fraction: float) -> None:
    calibration = uniform(plan.num_sections, inter_vm=WIRE)
    step, progress = simulate(plan, calibration), StepProgress(plan, calibration)
    assert progress.time_s == step.time_s
    at_s = fraction * step.time_s
    added: set[tuple[int, int, int]] = set()
    losses: set[tuple[int, int]] = set()
    for span in step.timeline:
        path = plan.path_of(span.operation.micro_batch)
        hop = path.hops[span.operation.stage]
        ended = round(span.stop_s * 1e9) <= round(at_s * 1e9)
        if ended and span.operation.kind in (Kind.BACKWARD, Kind.WEIGHT):
            added |= {(span.worker, span.operation.micro_batch, section) for section in hop.range.sections}
        if ended and span.operation.kind is Kind.FORWARD and span.operation.stage == len(path.hops) - 1:
            losses.add((span.worker, span.operation.micro_batch))
    done = progress.at(at_s)
    assert added == {
        (worker, micro_batch, section)
        for worker, own in enumerate(done)
        for section, bits in own.contributions.items()
        for micro_batch in micro_batches_of(bits)
    }
    assert losses == {(worker, m) for worker, own in enumerate(done) for m in micro_batches_of(own.losses)}


@given(crossing_plans() | grids())
def test_the_rest_of_a_step_of_which_nothing_is_held_is_the_step(plan: Plan) -> None:
    calibration = uniform(plan.num_sections, inter_vm=WIRE)
    assert simulate(RestOfStep.of(plan, plan.paths), calibration) == simulate(plan, calibration)


@given(grids(), st.floats(0, 1), st.integers(0, 1 << 30))
def test_a_rest_lets_go_of_all_memory_and_takes_no_operation_twice(
    plan: Plan, fraction: float, seed: int
) -> None:
    calibration = uniform(plan.num_sections, inter_vm=WIRE)
    progress = StepProgress(plan, calibration)
    chance = random.Random(seed)
    dead = {worker for worker in range(plan.num_workers) if chance.random() < 0.3}
    rest = rest_after(plan, progress, fraction * progress.time_s, dead)
    step = simulate(rest, calibration)
    assert [own[-1][1] for own in step.memory] == [100 * len(span) for span in rest.ranges]
    operations = [span.operation for span in step.timeline]
    assert len(operations) == len(set(operations))


@settings(max_examples=40)
@given(crossing_plans() | grids(), st.floats(0, 1), st.integers(0, 1 << 30))
def test_compiled_code_simulates_a_rest_alike(fast: Kernels, plan: Plan, fraction: float, seed: int) -> None:
    calibration = uniform(plan.num_sections, inter_vm=replace(WIRE, jitter_s=0.3))
    progress = StepProgress(plan, calibration)
    chance = random.Random(seed)
    dead = {worker for worker in range(plan.num_workers) if chance.random() < 0.3}
    rest = rest_after(plan, progress, fraction * progress.time_s, dead)
    cluster = cluster_of(rest, calibration, None, None)
    one = simulate_with(INTERPRETED, rest, cluster, seed=1, timeline=True)
    assert simulate_with(fast, rest, cluster, seed=1, timeline=True) == one


def test_a_death_at_the_end_costs_one_stage_of_one_pipeline() -> None:
    """Three stages, two pipelines, four micro-batches each; F = 1, B = 2, no wire. All is done when a worker
    of stage 1 dies: its four contributions are run again by both pipelines, two each. Stage 2 adds nothing,
    and gives stage 1 gradients of its inputs, which are taken for half of a backward."""
    plan = grid(stages(3), 2, 8)
    calibration = uniform(3, input_s=(), weight_s=(), optimizer_s=(0.0,) * 3)
    progress = StepProgress(plan, calibration)
    rest = rest_after(plan, progress, progress.time_s, {1})
    assert [(path.open_from, path.held, len(path.micro_batches)) for path in rest.paths] == [
        (1, frozenset({2}), 2)
    ] * 2
    step = simulate(rest, calibration)
    ran = [
        (span.operation.kind, span.start_s, span.stop_s)
        for span in step.timeline
        if span.worker == 2 and span.stop_s > span.start_s
    ]
    assert [kind for kind, _, _ in ran] == [Kind.FORWARD, Kind.BACKWARD] * 2
    assert {(kind, round(stop - start, 6)) for kind, start, stop in ran} == {
        (Kind.FORWARD, 1.0),
        (Kind.BACKWARD, 1.0),
    }
    assert step.pipeline_s == pytest.approx(7.0, abs=1e-6)


def test_a_step_of_which_all_is_held_takes_its_end_alone() -> None:
    plan = grid([Range(0, 2), Range(2, 4)], 2, 4)
    calibration = uniform(4, inter_vm=WIRE)
    progress = StepProgress(plan, calibration)
    whole = simulate(plan, calibration)
    rest = rest_after(plan, progress, progress.time_s, set())
    assert rest.paths == ()
    step = simulate(rest, calibration)
    assert step.pipeline_s == 0
    assert 0 < step.time_s < whole.time_s
    assert {closing.kind for closing in step.closings} == {closing.kind for closing in whole.closings}


def test_the_later_the_death_the_shorter_the_rest() -> None:
    """Three pipelines of three stages and a long step: a worker dies, and two pipelines go on."""
    calibration = uniform(9, inter_vm=WIRE)
    thirds = [Range(0, 3), Range(3, 6), Range(6, 9)]
    before, after = grid(thirds, 3, 36), grid(thirds, 2, 36)
    progress = StepProgress(before, calibration)
    rests = [
        simulate(rest_after(before, progress, at * progress.time_s, {4}, after), calibration).pipeline_s
        for at in (0.2, 0.4, 0.6, 0.8)
    ]
    assert rests == sorted(rests, reverse=True)
    whole_s = simulate(after, calibration).pipeline_s
    assert rests[0] < whole_s
    # A ninth of the contributions is lost, a third of the step's forwards with most of their backwards.
    assert rests[-1] < whole_s / 2
