"""A model that needs at least four workers, and thirteen of them: unequal pipelines use all (Oobleck §4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from calibrations import uniform
from makara.checkpoint import open_generation
from makara.model.training import load_entrypoint
from makara.morphing import Choice, Infeasible, Request, Slot, choose, stage_table
from makara.morphing.stages import WHOLE, Mode
from makara.pipeline import Range
from makara.worker.profiling.profiling import profile
from reference import run_reference
from test_trainers import Run, assert_same
from trainer_processes import BUNDLE

NEEDED = 4
SECTIONS, NUM_MICRO_BATCHES = 14, 32
STEPS = 4
CALIBRATION = uniform(SECTIONS)


def _memory_bytes() -> int:
    """The most with which `NEEDED - 1` stages never fit: one of them has at least so many sections."""
    most = -(-SECTIONS // (NEEDED - 1))
    table = stage_table(CALIBRATION)
    return (
        min(
            table.memory(start, start + most, mode).least_bytes
            for start in range(SECTIONS - most + 1)
            for mode in (WHOLE, Mode(recompute=True))
        )
        - 1
    )


class _Job:
    """A job whose plans are chosen for whoever lives."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._holding: dict[str, Range] = {}
        self._generation = 0
        self.living: list[str] = []
        self.shapes: list[str] = []
        self.used: list[int] = []

    def boot(self, *workers: str) -> None:
        """Start their processes, which takes longer than many steps."""
        self._run.fleet.start(*workers, fault="dies-when-told")

    def join(self, *workers: str) -> None:
        """Let those that booted take part in the next plan."""
        self.living += workers

    def choose(self, workers: Sequence[str]) -> Choice | Infeasible:
        slots = [Slot(worker, f"vm of {worker}", _memory_bytes()) for worker in workers]
        return choose(
            Request(
                calibration=CALIBRATION,
                num_sections=SECTIONS,
                num_micro_batches=NUM_MICRO_BATCHES,
                workers=slots,
                generation=self._generation + 1,
                unequal_pipelines="auto",
                holding={worker: span for worker, span in self._holding.items() if worker in workers},
            )
        )

    def form(self, stands: str, operations: int) -> None:
        """Train by the plan for all who live, wherever its step is, until one of them stands after so many
        operations."""
        self._run.fleet.stand(stands, operations)
        choice, run = self.choose(self.living), self._run
        assert isinstance(choice, Choice), choice
        self._generation += 1
        workers, others = list(choice.workers), [one for one in self.living if one not in choice.workers]
        open_generation(run.store, run.job.job, self._generation)
        published = run.published() if self._generation > 1 else []
        run.fleet.form(choice.plan, workers, donors=others, checkpoints=published)
        run.fleet.wait_standing(stands)
        self._holding = dict(zip(workers, choice.plan.ranges, strict=True))
        self.shapes.append(choice.plan.shape)
        self.used.append(choice.plan.num_workers)

    def lose(self, worker: str) -> None:
        """It dies by SIGKILL where it stands."""
        self._run.fleet.kill(worker)
        self.living.remove(worker)
        del self._holding[worker]
        self._run.fleet.abandon(self._generation, *self.living)


def test_thirteen_workers_all_train_and_deaths_and_joins_change_no_bit(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=STEPS, global_batch_size=2 * NUM_MICRO_BATCHES, num_sections=SECTIONS)
    run.recipe = run.fleet.recipe = profile(load_entrypoint(BUNDLE, run.job.entrypoint), run.job).recipe
    job = _Job(run)
    try:
        first, others = [f"w{number}" for number in range(13)], ["w13", "w14", "w15"]
        job.boot(*first, *others)
        job.join(*first)
        assert isinstance(job.choose(job.living[: NEEDED - 1]), Infeasible)
        assert isinstance(job.choose(job.living[:NEEDED]), Choice)
        for worker, operations in (("w1", 7), ("w6", 23), ("w11", 40)):
            job.form(worker, operations)
            job.lose(worker)
        job.form("w0", 12)
        job.join(*others)
        run.fleet.abandon(4, *job.living)
        run.fleet.go_on("w0")
        job.form("w15", 3)
        run.fleet.go_on("w15")
        state = run.finish(*job.living)
    finally:
        run.fleet.close()
    assert job.shapes[0] == job.shapes[-1] == "7+6"
    assert job.used[0] == job.used[-1] == 13
    losses, wanted = run_reference(
        load_entrypoint(BUNDLE, run.job.entrypoint),
        microbatch_size=run.recipe.microbatch_size,
        num_micro_batches=NUM_MICRO_BATCHES,
        cuts=run.recipe.cuts,
        steps=STEPS,
        seed=7,
        numerics="exact",
        device=run.recipe.device_kind,
    )
    assert [run.fleet.losses()[step + 1] for step in range(STEPS)] == losses
    assert_same(state, wanted)
