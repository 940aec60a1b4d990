"""Workers die within steps, and while they form again: what the others have added is kept, and the end is the
reference's bit for bit.

A failing seed reproduces the same deaths: `MAKARA_SEED=<seed> pytest tests/worker/test_kept_steps.py`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from makara.model.data import Batches
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import load_entrypoint
from makara.pipeline.plan import Path as Route
from makara.pipeline.plan import Plan
from makara.protocol.messages import Phase
from test_trainers import Run, assert_same, reference
from trainer_processes import BUNDLE, PLACES
from whole_runtime import whole_runtime

MODELS = {
    "tied weights": ("models:tied_gpt", "fp32"),
    "batch norm": ("models:normed_mlp", "fp32"),
    "fp16": ("models:tied_gpt", "fp16"),
}
MOST_WORKERS = 6


@dataclass(frozen=True)
class Length:
    """Of a history; `steps`: more than pass between the breaks, each of which comes within six steps of its
    generation, however slow the machine is."""

    num_breaks: int
    steps: int


LENGTHS = pytest.mark.parametrize(
    ("histories", "length"),
    [
        pytest.param(1, Length(3, 32), id="short"),
        pytest.param(10, Length(4, 40), id="long", marks=pytest.mark.soak),
    ],
)
JOBS = pytest.mark.parametrize(
    ("model", "numerics"),
    [
        ("batch norm", "fast"),
        ("fp16", "exact"),  # of a model with tied weights, too
        pytest.param("tied weights", "exact", marks=pytest.mark.soak),
        pytest.param("tied weights", "fast", marks=pytest.mark.soak),
        pytest.param("batch norm", "exact", marks=pytest.mark.soak),
        pytest.param("fp16", "fast", marks=pytest.mark.soak),
    ],
)
"""With the marked ones, each model with both numerics."""


def _seed() -> int:
    given = os.environ.get("MAKARA_SEED")
    return random.SystemRandom().randrange(10**9) if given is None else int(given)


class Deaths:
    """A job in which workers die at random operations."""

    fault = "dies-when-told"

    def __init__(self, run: Run, seed: int, num_breaks: int) -> None:
        self._run, self._chance, self._num_breaks = run, random.Random(seed), num_breaks
        self._generation = 0
        self._num_started = 0
        self._living: list[str] = []
        self._stands = ""  # who stands at the first operation of the newest generation, see `_stand`
        self.shapes: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Contributions kept, moved and missing, over all generations that went on with a step."""
        self.died: Counter[str] = Counter()
        """Where those died that were forming, or at the rest of a step."""

    def play(self) -> list[str]:
        """After some deaths, train on; returns the workers that do."""
        for _ in range(self._num_breaks):
            self._start()
            self._lose(self._form()[1])
            self._after_death()
        self._start()
        workers, _ = self._form()
        self._go_on()
        return workers

    def _stand(self, workers: list[str]) -> None:
        """Have one of them stand at its first operation of the generation that is about to go: no step is
        taken before it goes on."""
        self._stands = self._chance.choice(workers)
        self._run.fleet.stand(self._stands, 0)

    def _go_on(self, then: str | None = None) -> None:
        self._run.fleet.wait_standing(self._stands)
        self._run.fleet.go_on(self._stands, then)

    def _lose(self, plan: Plan) -> None:
        """The one that stands dies so many operations later."""
        self._go_on(f"{self._chance.randrange(3 * plan.num_micro_batches)} dies")
        self._run.fleet.await_death(self._stands)
        self._go_on_without(self._stands)

    def _after_death(self) -> None:
        """What a subclass has happen then."""

    def _go_on_without(self, victim: str) -> None:
        self._living.remove(victim)
        self._run.fleet.abandon(self._generation, *self._living)
        self._wait_idle()

    def _wait_idle(self) -> None:
        fleet = self._run.fleet
        over = (Phase.IDLE, Phase.BROKEN, Phase.LEFT)
        fleet.wait(lambda: all(fleet.reports[worker].phase in over for worker in self._living))

    def _start(self) -> None:
        while len(self._living) < self._chance.choice([3, MOST_WORKERS]):
            name = f"w{self._num_started}"
            self._num_started += 1
            self._run.fleet.start(name, fault=self.fault)
            self._living.append(name)

    def _form(self) -> tuple[list[str], Plan]:
        workers, donors, plan = self._choose()
        self._run.fleet.prepare(plan, workers, donors)
        self._stand(workers)
        self._run.fleet.go(plan.generation, self._run.published() if plan.generation > 1 else [])
        self._await_formed(workers, donors, plan)
        return workers, plan

    def _choose(self) -> tuple[list[str], list[str], Plan]:
        """The next generation's workers in rank order, those who only hand over, and its plan."""
        chance = self._chance
        self._generation += 1
        replicas = chance.choice([1, 2, 2, 2, 3])
        depth = chance.randint(1, len(self._living) // replicas)
        cuts = sorted(chance.sample(range(1, self._run.recipe.num_sections), depth - 1))
        plan = self._run.plan(self._generation, cuts, replicas, recompute=chance.random() < 0.3)
        plan = replace(plan, halves=chance.random() < 0.5)
        members = chance.sample(self._living, len(self._living))
        return members[: plan.num_workers], members[plan.num_workers :], plan

    def _await_formed(self, workers: list[str], donors: list[str], plan: Plan) -> None:
        fleet = self._run.fleet
        fleet.wait(lambda: all(fleet.formed(worker, plan.generation) for worker in [*workers, *donors]))
        self.shapes.add(plan.shape)
        kept = fleet.reports[workers[0]].formed.in_flight  # type: ignore[union-attr]
        if kept is not None:
            self.counts.update(kept.model_dump())


class DeathsShortOfMemory(Deaths):
    """Members have little memory, now and then."""

    fault = "short-of-memory"


class DeathsWhileForming(Deaths):
    """After each death another one, while the others form again, or begin with the rest of the step."""

    def _after_death(self) -> None:
        self._start()
        workers, donors, plan = self._choose()
        victim, fleet = self._chance.choice([*workers, *donors]), self._run.fleet
        fleet.prepare(plan, workers, donors)
        fleet.tell_to_end(victim, self._chance.choice(PLACES))
        fleet.hold = True  # where they can do without the one that dies, they take one step
        fleet.go(plan.generation, self._run.published())
        self.died[fleet.await_death(victim)] += 1
        fleet.hold = False
        self._go_on_without(victim)


def test_a_micro_batch_of_which_only_the_loss_is_missing_has_its_loss() -> None:
    """Found: nothing was kept of such a forward, its piece of the loss included."""
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    chain = split(traced, choose_cuts(traced, None))
    runtime = whole_runtime(chain, training, 7)
    batch = Batches(training.dataset(), 7, 16, 2).micro_batch(0, 3)
    whole, nothing = Route((), ()), Route((), (), open_from=chain.num_sections)
    pieces = [
        runtime.forward(0, 3, 0, chain.num_sections, {}, batch, True, path).piece for path in (whole, nothing)
    ]
    assert pieces[0] is not None
    assert pieces[0] == pieces[1]


@LENGTHS
@JOBS
def test_deaths_within_steps_cost_no_contribution_that_others_have(
    tmp_path: Path, model: str, numerics: str, histories: int, length: Length
) -> None:
    checked_history(Deaths, tmp_path, model, numerics, histories, length)


def checked_history(
    kind: type[Deaths], folder: Path, model: str, numerics: str, histories: int, length: Length
) -> None:
    """Plays so many, and goes on until one has kept something: where a lone worker always dies, none is."""
    first, kept = _seed(), 0
    for played in range(histories + 5):
        if played < histories or not kept:
            kept += _kept(kind, folder / str(played), model, numerics, first + played, length)
    assert kept > 0


@LENGTHS
@pytest.mark.parametrize(
    ("model", "numerics"),
    [
        ("tied weights", "exact"),
        pytest.param("tied weights", "fast", marks=pytest.mark.soak),
        pytest.param("batch norm", "exact", marks=pytest.mark.soak),
        pytest.param("fp16", "exact", marks=pytest.mark.soak),
    ],
)
def test_deaths_while_others_form_again_change_no_bit(
    tmp_path: Path, model: str, numerics: str, histories: int, length: Length
) -> None:
    first = _seed()
    for played in range(histories):
        _kept(DeathsWhileForming, tmp_path / str(played), model, numerics, first + played, length)


@LENGTHS
def test_members_short_of_memory_drop_some_and_change_no_bit(
    tmp_path: Path, histories: int, length: Length
) -> None:
    first = _seed()
    for played in range(histories):
        folder = tmp_path / str(played)
        _kept(DeathsShortOfMemory, folder, "tied weights", "exact", first + played, length)


def _kept(kind: type[Deaths], folder: Path, model: str, numerics: str, seed: int, length: Length) -> int:
    """Play one history, and check its end; the number of contributions that were kept."""
    entrypoint, precision = MODELS[model]
    print(f"seed {seed}")
    folder.mkdir()
    changes = {"entrypoint": entrypoint, "precision": precision, "numerics": numerics}
    run = Run(folder, length.steps, **changes, checkpoint_interval_steps=2)
    try:
        deaths = kind(run, seed, length.num_breaks)
        state = run.finish(*deaths.play())
        found = [run.fleet.losses()[step + 1] for step in range(length.steps)]
        losses, expected = reference(entrypoint, numerics, length.steps, precision)
        if numerics == "exact":
            assert_same(state, expected)
            assert found == losses
        else:
            assert found == pytest.approx(losses, rel=1e-4)
        print(
            f"shapes {sorted(deaths.shapes)}; contributions {dict(deaths.counts)}, died {dict(deaths.died)}"
        )
        return deaths.counts["kept"]
    finally:
        run.fleet.close()
