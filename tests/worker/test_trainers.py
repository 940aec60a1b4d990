"""Real trainer processes that form, step, lose each other and go on: the end is always the reference's."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from makara.checkpoint import (
    load_manifest,
    open_generation,
    open_store,
    read_head,
    read_parts,
)
from makara.checkpoint.tensors import unpack
from makara.model.precision import Precision
from makara.model.training import load_entrypoint
from makara.morphing import Rerouted, TemplateStage, plan_of, reroute
from makara.pipeline import Hop, Plan, Range, grid
from makara.pipeline.plan import Path as Route
from makara.protocol.messages import TRAINER_PROTOCOL, CheckpointRef, JobSettings, Miscount, Phase, Recipe
from makara.worker.profiling.profiling import profile
from reference import run_reference
from trainer_processes import BUNDLE, Fleet, settings

STEPS = 12
SECTIONS = 8
MICRO_BATCHES = 8


@cache
def recipe_of(entrypoint: str, precision: str = "fp32") -> Recipe:
    job = settings(Path("/unused"), entrypoint=entrypoint, precision=precision)
    return profile(load_entrypoint(BUNDLE, entrypoint), job).recipe


@cache
def reference(
    entrypoint: str, numerics: str, steps: int = STEPS, precision: Precision = "fp32"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, state) of the uninterrupted run in this process."""
    recipe = recipe_of(entrypoint, precision)
    return run_reference(
        load_entrypoint(BUNDLE, entrypoint),
        microbatch_size=recipe.microbatch_size,
        num_micro_batches=recipe.num_micro_batches,
        cuts=recipe.cuts,
        steps=steps,
        seed=7,
        numerics="exact" if numerics == "exact" else "fast",
        precision=precision,
        device=recipe.device_kind,
    )


class Run:
    """One job on a fleet, and the store that its checkpoints go to."""

    def __init__(self, folder: Path, steps: int = STEPS, **changes: object) -> None:
        self.job: JobSettings = settings(folder, steps=steps, **changes)
        self.recipe = recipe_of(self.job.entrypoint, self.job.precision)
        self.store = open_store(self.job.store.uri)
        self.fleet = Fleet(folder, self.job, self.recipe)

    def plan(
        self, generation: int, cuts: Sequence[int], replicas: int = 1, *, recompute: bool = False
    ) -> Plan:
        """A grid whose stages are cut before the sections `cuts`; opens the generation in the head."""
        open_generation(self.store, self.job.job, generation)
        bounds = [0, *cuts, self.recipe.num_sections]
        stages = [Range(a, b) for a, b in pairwise(bounds)]
        return grid(
            stages, replicas, self.recipe.num_micro_batches, generation=generation, recompute=recompute
        )

    def published(self) -> list[CheckpointRef]:
        head = read_head(self.store, self.job.job)
        assert head is not None
        return list(head.manifests)

    def finish(self, *workers: str) -> dict[str, torch.Tensor]:
        """Wait for the end; the final checkpoint's tensors."""
        self.fleet.wait_phase(Phase.FINISHED, *workers)
        checkpoint = self.published()[0]
        assert checkpoint.step == self.job.steps
        manifest = load_manifest(self.store, self.job.job, checkpoint)
        assert manifest.data_position == self.job.steps * self.job.global_batch_size
        files = read_parts(self.store, manifest.parts)
        return {name: tensor for data in files.values() for name, tensor in unpack(data)[0].items()}

    def steps(self) -> list[int]:
        return sorted({metrics.step for metrics in self.fleet.metrics})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.fleet.close()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(wanted)
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not differing


SHAPES = {
    "one worker": ([], 1, False),
    "P that does not divide K": ([3, 6], 1, False),
    "recompute": ([2, 5], 1, True),
    "D that does not divide N": ([], 3, False),
    "2x3, uneven stages": ([5], 3, True),
}


def test_unequal_pipelines_end_with_the_bits_of_the_reference(run: Run) -> None:
    """3+2, a death, 2+2 of those who live, a newcomer, 2+3."""

    def form(number: int, depths: tuple[int, int], workers: Sequence[str]) -> None:
        equal = run.plan(number, [])  # opens the generation
        ends = [[SECTIONS * (stage + 1) // depth for stage in range(depth)] for depth in depths]
        pipelines = [
            tuple(TemplateStage(Range(*span), 1) for span in pairwise([0, *stops])) for stops in ends
        ]
        shares = [MICRO_BATCHES * depth // sum(depths) for depth in depths]
        shares[0] += MICRO_BATCHES - sum(shares)
        plan = plan_of(pipelines, shares, frozen=equal.frozen, generation=number)
        assert plan.shape == {(3, 2): "3+2", (2, 2): "2x2", (2, 3): "2+3"}[depths]
        run.fleet.prepare(plan, workers)
        run.fleet.go(number, run.published() if number > 1 else [])
        run.fleet.wait(lambda: all(run.fleet.formed(worker, number) for worker in workers))

    run.fleet.start("w0", "w1", fault="dies-when-told")
    run.fleet.start("w2", "w3", "w4")
    run.fleet.tell_to_end("w1", "34 dies")  # in its third step: the first one is taken twice, to find a scale
    form(1, (3, 2), ["w0", "w1", "w2", "w3", "w4"])
    run.fleet.await_death("w1")
    living = ["w0", "w2", "w3", "w4"]
    run.fleet.abandon(1, *living)
    run.fleet.stand("w0", 27)
    form(2, (2, 2), living)
    run.fleet.start("w5")
    run.fleet.wait_step(5, "w0")
    run.fleet.wait_standing("w0")
    run.fleet.abandon(2, *living)
    run.fleet.go_on("w0")
    form(3, (2, 3), [*living, "w5"])
    found = run.finish(*living, "w5")
    losses, state = reference("models:tied_gpt", "exact")
    assert [run.fleet.losses()[step + 1] for step in range(STEPS)] == losses
    assert_same(found, state)


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_ends_with_the_bits_of_the_reference(run: Run, shape: str) -> None:
    cuts, replicas, recompute = SHAPES[shape]
    workers = [f"w{n}" for n in range((len(cuts) + 1) * replicas)]
    run.fleet.start(*workers)
    run.fleet.form(run.plan(1, cuts, replicas, recompute=recompute), workers)
    found = run.finish(*workers)
    losses, state = reference("models:tied_gpt", "exact")
    assert [run.fleet.losses()[step + 1] for step in range(STEPS)] == losses
    assert_same(found, state)


def test_values_that_skip_stages_and_unshared_weights_keep_their_bits(tmp_path: Path) -> None:
    run = Run(tmp_path, entrypoint="models:skip_model")
    try:
        run.fleet.start("a", "b", "c")
        run.fleet.form(run.plan(1, [1, 2]), ["a", "b", "c"])
        assert_same(run.finish("a", "b", "c"), reference("models:skip_model", "exact")[1])
    finally:
        run.fleet.close()


def test_paths_that_are_no_grid_end_with_the_bits_of_the_reference(run: Run) -> None:
    """A slow and a fast pipeline of different cuts, and one micro-batch that goes from one to the other."""
    grid_plan = run.plan(1, [4])
    plan = Plan(
        num_sections=SECTIONS,
        num_micro_batches=MICRO_BATCHES,
        ranges=(Range(0, 4), Range(4, 8), Range(0, 8)),
        paths=(
            Route((Hop(0, Range(0, 4)), Hop(1, Range(4, 8))), (0, 1, 2)),
            Route((Hop(2, Range(0, 8)),), (3, 4, 5, 6)),
            Route((Hop(0, Range(0, 4)), Hop(2, Range(4, 8))), (7,)),
        ),
        generation=grid_plan.generation,
    )
    run.fleet.start("a", "b", "c")
    run.fleet.form(plan, ["a", "b", "c"])
    assert_same(run.finish("a", "b", "c"), reference("models:tied_gpt", "exact")[1])


def test_fast_sums_give_the_losses_of_one_worker_to_1e_4(tmp_path: Path) -> None:
    run = Run(tmp_path, numerics="fast")
    try:
        run.fleet.start("a", "b", "c", "d")
        run.fleet.form(run.plan(1, [4], 2), ["a", "b", "c", "d"])
        run.finish("a", "b", "c", "d")
    finally:
        run.fleet.close()
    losses, _ = reference("models:tied_gpt", "fast")
    assert [run.fleet.losses()[step + 1] for step in range(STEPS)] == pytest.approx(losses, abs=1e-4)


def test_a_planned_change_of_depth_loses_no_step_and_lets_a_donor_go(run: Run) -> None:
    run.fleet.start("a", fault="dies-when-told")
    run.fleet.start("b", "c")
    run.fleet.stand("a", 36)  # in its second step
    run.fleet.form(run.plan(1, [4]), ["a", "b"])
    run.fleet.wait_standing("a")
    run.fleet.prepare(run.plan(2, [2, 5]), ["c", "a", "b"])
    run.fleet.go(2)
    run.fleet.stand("a", 20)
    run.fleet.go_on("a")
    run.fleet.wait(lambda: all(run.fleet.formed(worker, 2) for worker in "abc"))
    formed = run.fleet.reports["a"].formed
    assert run.fleet.reports["a"].trainer_protocol == TRAINER_PROTOCOL
    assert formed is not None
    assert formed.rung == "peers"
    run.fleet.wait_standing("a")
    run.fleet.prepare(run.plan(3, []), ["b"], donors=["a", "c"])
    run.fleet.go(3)
    run.fleet.go_on("a")
    run.fleet.wait_phase(Phase.LEFT, "a", "c")
    assert_same(run.finish("b"), reference("models:tied_gpt", "exact")[1])
    assert run.steps() == list(range(1, STEPS + 1))
    assert len({(m.step, m.generation) for m in run.fleet.metrics}) == STEPS  # none was taken twice


def test_a_death_is_survived_from_peers_while_each_section_has_a_host(run: Run) -> None:
    run.fleet.start("a", "c", "d")
    run.fleet.start("b", fault="dies-when-told")
    run.fleet.tell_to_end("b", "28 dies")  # in its third step
    run.fleet.form(run.plan(1, [4], 2), ["a", "b", "c", "d"])
    run.fleet.await_death("b")
    run.fleet.abandon(1, "a", "c", "d")
    run.fleet.wait(
        lambda: all(
            run.fleet.has(w) and run.fleet.reports[w].phase in (Phase.IDLE, Phase.BROKEN) for w in "acd"
        )
    )
    done = run.fleet.reports["a"].step
    run.fleet.form(run.plan(2, [2, 6]), ["d", "c", "a"], checkpoints=run.published())
    formed = run.fleet.reports["a"].formed
    assert formed is not None
    assert formed.rung == "peers"
    assert formed.step >= done
    assert_same(run.finish("a", "c", "d"), reference("models:tied_gpt", "exact")[1])


def test_deaths_are_routed_around_and_nothing_moves(run: Run) -> None:
    """Three pipelines of two stages lose the second stage of one and the first stage of another."""
    run.fleet.start(*"abcef")
    run.fleet.start("d", fault="dies-when-told")
    whole = run.plan(1, [4], 3)
    run.fleet.stand("d", 20)  # in its third step
    run.fleet.form(whole, "abcdef")
    run.fleet.wait_standing("d")
    run.fleet.kill("d", "e")
    run.fleet.abandon(1, *"abcf")
    run.fleet.wait(
        lambda: all(
            run.fleet.has(w) and run.fleet.reports[w].phase in (Phase.IDLE, Phase.BROKEN) for w in "abcf"
        )
    )
    found = reroute(whole, [3, 4])
    assert isinstance(found, Rerouted)
    assert found.plan.shape == "2x2"
    open_generation(run.store, run.job.job, 2)
    run.fleet.form(replace(found.plan, generation=2), "abcf", checkpoints=run.published())
    assert {formed.rung for w in "abcf" if (formed := run.fleet.reports[w].formed)} == {"peers"}
    weights = run.finish(*"abcf")
    losses, state = reference("models:tied_gpt", "exact")
    assert [run.fleet.losses()[step + 1] for step in range(STEPS)] == losses
    assert_same(weights, state)


def test_the_only_host_of_a_section_dies_and_all_go_back_to_the_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval_steps=2)
    try:
        run.fleet.start("a", "c")
        run.fleet.start("b", fault="dies-when-told")
        run.fleet.stand("b", 69)  # in its fourth step
        run.fleet.form(run.plan(1, [2, 5]), ["a", "b", "c"])
        run.fleet.wait(lambda: any(report.published for report in run.fleet.reports.values()))
        run.fleet.kill("b")
        run.fleet.abandon(1, "a", "c")
        plan = run.plan(2, [3])
        base = run.published()
        run.fleet.form(plan, ["c", "a"], checkpoints=base)
        formed = run.fleet.reports["a"].formed
        assert formed is not None
        assert (formed.rung, formed.step) == ("store", base[0].step)
        assert_same(run.finish("a", "c"), reference("models:tied_gpt", "exact")[1])
    finally:
        run.fleet.close()


def test_a_scale_survives_a_gradient_of_zeros_and_goes_to_peers_and_into_checkpoints(tmp_path: Path) -> None:
    """The gradient is zero in every second step. In each generation but the last, one step is taken."""
    run = Run(tmp_path, entrypoint="models:intermittent")
    try:
        for worker in "abc":
            run.fleet.start(worker, fault="tells-attempts")
        run.fleet.hold = True
        for generation, cuts in enumerate([[1], [2], [3], [2]], 1):
            run.fleet.form(run.plan(generation, cuts), ["a", "b"], checkpoints=run.published())
            run.fleet.wait(lambda: all(run.fleet.reports[w].step == generation for w in "ab"))  # noqa: B023
            run.fleet.wait_phase(Phase.HELD, "a", "b")
        run.fleet.kill("b")
        run.fleet.abandon(4, "a")
        run.fleet.hold = False
        run.fleet.form(run.plan(5, [2]), ["c", "a"], checkpoints=run.published())
        formed = run.fleet.reports["c"].formed
        assert formed is not None
        assert (formed.rung, formed.step) == ("store", 4)
        assert_same(run.finish("a", "c"), reference("models:intermittent", "exact")[1])
        assert run.fleet.attempts() == [(0, 0), (0, 1), *((step, 0) for step in range(1, STEPS))]
    finally:
        run.fleet.close()


@pytest.mark.parametrize("times", [0, 2])
def test_a_contribution_that_is_in_the_sums_twice_or_not_at_all_is_noticed(
    tmp_path: Path, times: int
) -> None:
    run = Run(tmp_path)
    try:
        run.fleet.start("a", fault=f"adds-{times}-times-in-5")
        run.fleet.start("b", fault="tells-attempts")
        run.fleet.form(run.plan(1, [4]), ["a", "b"])
        assert_same(run.finish("a", "b"), reference("models:tied_gpt", "exact")[1])
        attempts = [(0, 0), (0, 1), *((step, 0) for step in range(1, STEPS)), (5, 1)]
        assert run.fleet.attempts() == sorted(attempts)
        told = {run.fleet.reports[worker].miscount for worker in "ab"}
        assert told == {Miscount(generation=1, step=5, attempt=0)}
    finally:
        run.fleet.close()


def test_a_miscount_that_does_not_pass_ends_with_an_error(run: Run) -> None:
    """Found: the step was redone for ever."""
    run.fleet.start("a", fault="miscounts-2")
    run.fleet.start("b", fault="tells-attempts")
    run.fleet.form(run.plan(1, [4]), ["a", "b"])
    with pytest.raises(AssertionError, match="step 2: 3 attempts did not add each micro-batch's gradients"):
        run.fleet.wait_phase(Phase.FINISHED, "b")
    assert [attempt for step, attempt in run.fleet.attempts() if step == 2] == [0, 1, 2]
    run.fleet.wait(lambda: run.fleet.reports["a"].failure is not None)  # it may fail a little later
    assert run.fleet.reports["a"].miscount == Miscount(generation=1, step=2, attempt=2)


def test_a_corrupt_checkpoint_is_passed_over_by_all_for_the_next_older(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval_steps=2)
    try:
        run.fleet.start("a", "b")
        run.fleet.form(run.plan(1, [4]), ["a", "b"])
        run.finish("a", "b")
        newest, older = run.published()[:2]
        parts = sorted((tmp_path / "store").rglob(f"sections/{newest.step}-g1/5.0.safetensors"))
        assert len(parts) == 1
        parts[0].write_bytes(parts[0].read_bytes()[:-8])
        run.fleet.start("c", "d", "e")
        run.fleet.form(run.plan(2, [2, 6]), ["c", "d", "e"], checkpoints=run.published())
        formed = run.fleet.reports["c"].formed
        assert formed is not None
        assert (formed.rung, formed.step) == ("store", older.step)
        assert_same(run.finish("c", "d", "e"), reference("models:tied_gpt", "exact")[1])
    finally:
        run.fleet.close()


def test_peers_that_fell_back_past_an_unreadable_checkpoint_keep_their_state_at_a_morph(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, checkpoint_interval_steps=2)
    try:
        run.fleet.start("a")
        run.fleet.form(run.plan(1, []), ["a"])
        run.finish("a")
        for newer in run.published()[:-1]:  # a busy machine drops some: how many there are is not known
            for part in (tmp_path / "store").rglob(f"sections/{newer.step}-g1/0.0.safetensors"):
                part.write_bytes(part.read_bytes()[:-8])
        run.fleet.start("b", "c")
        run.fleet.hold = True
        run.fleet.form(run.plan(2, [4]), ["b", "c"], checkpoints=run.published())
        run.fleet.wait_phase(Phase.HELD, "b", "c")
        run.fleet.hold = False
        held_at = run.fleet.reports["b"].step
        assert held_at < STEPS, "the unreadable checkpoints are of later steps than the workers'"
        run.fleet.form(run.plan(3, [2]), ["c", "b"], checkpoints=run.published())
        formed = run.fleet.reports["b"].formed
        assert formed is not None
        assert (formed.rung, formed.step) == ("peers", held_at)
        assert_same(run.finish("b", "c"), reference("models:tied_gpt", "exact")[1])
    finally:
        run.fleet.close()


@pytest.mark.parametrize(
    "losers", [("a",), ("b", "c"), ("a", "b", "c"), pytest.param(("b",), marks=pytest.mark.soak)]
)
def test_survivors_that_disagree_about_the_last_commit_reach_one_state(
    run: Run, losers: tuple[str, ...]
) -> None:
    """The all-reduce of step 3 happens; those who lose it hold reduced gradients and no record."""
    for worker in "abc":
        run.fleet.start(worker, fault="loses-commit-3" if worker in losers else None)
    run.fleet.form(run.plan(1, [2, 5]), ["a", "b", "c"])
    for worker in "abc":
        if worker in losers:
            run.fleet.wait_lost_commit(worker)
        else:
            run.fleet.wait_step(4, worker)
    run.fleet.abandon(1, "a", "b", "c")
    run.fleet.wait_phase(Phase.IDLE, "a", "b", "c")
    run.fleet.form(run.plan(2, [3, 6]), ["c", "a", "b"])
    starts = {report.formed.step for report in run.fleet.reports.values() if report.formed is not None}
    assert starts == {3 if len(losers) == 3 else 4}  # one witness is enough to keep the step
    assert_same(run.finish("a", "b", "c"), reference("models:tied_gpt", "exact")[1])


def test_a_silent_peer_blocks_nobody_once_the_manager_closes_the_generation(run: Run) -> None:
    run.fleet.start("a", "c")
    run.fleet.start("b", fault="dies-when-told")
    run.fleet.stand("b", 10)
    run.fleet.form(run.plan(1, [3, 6]), ["a", "b", "c"])
    run.fleet.wait_standing("b")
    run.fleet.signal(signal.SIGSTOP, "b")
    run.fleet.abandon(1, "a", "c")
    run.fleet.wait_phase(Phase.IDLE, "a", "c")
    run.fleet.forget("b")
    run.fleet.form(run.plan(2, [4]), ["a", "c"], checkpoints=run.published())
    assert_same(run.finish("a", "c"), reference("models:tied_gpt", "exact")[1])


def test_a_worker_that_was_left_out_does_not_bring_back_its_own_history(run: Run) -> None:
    """It holds every section, and more steps than the others have taken since; theirs count."""
    run.fleet.start("a", fault="dies-when-told")
    run.fleet.stand("a", 83)  # in its fifth step
    run.fleet.form(run.plan(1, []), ["a"])
    run.fleet.wait_standing("a")
    run.fleet.wait_step(4, "a")
    run.fleet.abandon(1, "a")
    run.fleet.go_on("a")
    run.fleet.wait_phase(Phase.IDLE, "a")
    run.fleet.start("b", "c")
    run.fleet.hold = True
    run.fleet.form(run.plan(2, [4]), ["b", "c"])
    run.fleet.wait_phase(Phase.HELD, "b", "c")
    run.fleet.hold = False
    held_at = run.fleet.reports["b"].step
    assert held_at < run.fleet.reports["a"].step
    run.fleet.form(run.plan(3, [4]), ["a", "b"], donors=["c"], checkpoints=run.published())
    formed = run.fleet.reports["a"].formed
    assert formed is not None
    assert (formed.rung, formed.step) == ("peers", held_at)
    assert_same(run.finish("a", "b"), reference("models:tied_gpt", "exact")[1])


def test_hold_publishes_a_checkpoint_and_stops_all_after_the_same_step(run: Run) -> None:
    run.fleet.start("a", "b")
    run.fleet.hold = True
    run.fleet.form(run.plan(1, [4]), ["a", "b"])
    run.fleet.wait_phase(Phase.HELD, "a", "b")
    held_at = {run.fleet.reports[worker].step for worker in "ab"}
    assert held_at == {run.published()[0].step}
    assert held_at != {STEPS}


def test_a_generation_whose_head_another_manager_has_opened_says_so(run: Run) -> None:
    run.fleet.start("a")
    plan = run.plan(1, [])
    open_generation(run.store, run.job.job, 7)
    run.fleet.form(plan, ["a"])
    run.fleet.wait(lambda: run.fleet.reports["a"].fenced == 1)
    assert run.published() == []


def test_survivors_that_are_to_save_only_publish_the_last_commit_and_take_no_step(run: Run) -> None:
    run.fleet.start("a")
    run.fleet.start("b", fault="dies-when-told")
    run.fleet.stand("b", 20)  # in its second step
    run.fleet.form(run.plan(1, [], 2), ["a", "b"])
    run.fleet.wait(lambda: run.fleet.has("a", step=True))
    run.fleet.kill("b")
    run.fleet.wait_phase(Phase.BROKEN, "a")
    run.fleet.saves_only = True
    run.fleet.form(run.plan(2, []), ["a"])
    run.fleet.wait_phase(Phase.HELD, "a")
    report = run.fleet.reports["a"]
    assert report.formed is not None
    assert 0 < report.formed.step < STEPS
    assert report.step == report.formed.step
    assert run.published()[0] == CheckpointRef(step=report.step, generation=2)
    run.fleet.saves_only = False
    run.fleet.form(run.plan(3, []), ["a"])
    assert_same(run.finish("a"), reference("models:tied_gpt", "exact")[1])


def test_a_trainer_with_another_model_than_the_recipes_does_not_join(tmp_path: Path) -> None:
    run = Run(tmp_path, entrypoint="models:skip_model")
    run.fleet.recipe = run.recipe.model_copy(update={"graph_hash": "0" * 64})
    try:
        # Found: two hashes of 64 digits, and nothing of code that depends on where it runs.
        why = r"graph_hash: this VM traced \w{12}, the recipe says 0{12}: .*another model where its envir"
        with pytest.raises(AssertionError, match=why):
            run.fleet.start("a")
    finally:
        run.fleet.close()
