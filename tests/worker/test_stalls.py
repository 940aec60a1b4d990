"""What trainers tell of how far they have got, and how they show where they stand."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from makara.checkpoint import open_generation, open_store
from makara.model.training import load_entrypoint
from makara.pipeline import Plan, Range, grid
from makara.protocol.messages import At, Phase
from makara.worker.profiling.profiling import profile
from trainer_processes import BUNDLE, Fleet, settings


class Run:
    """Two stages; the first one's data can be blocked."""

    def __init__(self, folder: Path, **changes: object) -> None:
        self.block = folder / "block"
        self.job = settings(folder, entrypoint="models:blocking_data", **{"steps": 100_000, **changes})
        self.recipe = profile(load_entrypoint(BUNDLE, self.job.entrypoint), self.job).recipe
        self.fleet = Fleet(folder, self.job, self.recipe)
        self.fleet.start("a", fault=f"blocks-data-{self.block}")
        self.fleet.start("b")

    def plan(self, generation: int, *cuts: int) -> Plan:
        open_generation(open_store(self.job.store.uri), self.job.job, generation)
        bounds = [0, *cuts, self.recipe.num_sections]
        stages = [Range(start, stop) for start, stop in pairwise(bounds)]
        return grid(stages, 1, self.recipe.num_micro_batches, generation=generation)

    def count(self, worker: str) -> int:
        beat = self.fleet.beats.get(worker)
        return beat.count if beat is not None else 0

    def at(self, worker: str) -> At | None:
        beat = self.fleet.beats.get(worker)
        return beat.at if beat is not None else None


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.fleet.close()


def test_steps_are_progress_and_blocked_data_is_told_from_waiting_for_it(run: Run) -> None:
    fleet = run.fleet
    fleet.form(run.plan(1, 4), ["a", "b"])
    for worker in ("a", "b"):
        before = run.count(worker)
        fleet.wait(lambda worker=worker, before=before: run.count(worker) > before)
    run.block.touch()
    # Data may stop in the middle of a step, or when the next step's is loaded during the sum of this one.
    fleet.wait(lambda: run.at("a") is At.DATA and run.at("b") in (At.PEER, At.SUMS))
    counts = (-1, -1)
    while counts != (now := (run.count("a"), run.count("b"))):  # b may have been between two receives
        counts, beats = now, list(fleet.beats.values())
        fleet.wait(lambda beats=beats: all(fleet.beats[w] is not b for w, b in zip("ab", beats, strict=True)))
    fleet.signal(signal.SIGUSR1, "a")
    fleet.wait(lambda: "in __getitem__" in fleet.log.read_text())
    run.block.unlink()
    fleet.wait(lambda: run.count("a") > counts[0] and run.count("b") > counts[1])


def test_a_worker_whose_data_is_blocked_does_not_leave_its_generation_and_the_others_go_on(run: Run) -> None:
    fleet = run.fleet
    fleet.start("c")
    fleet.form(run.plan(1, 4), ["a", "b"])
    fleet.wait_step(2, "b")
    run.block.touch()
    fleet.wait(lambda: run.at("a") is At.DATA)
    fleet.abandon(1, "a", "b")
    fleet.wait_phase(Phase.IDLE, "b")
    assert fleet.reports["a"].phase is Phase.RUNNING
    fleet.form(run.plan(2, 4), ["c", "b"])
    fleet.wait_step(fleet.reports["b"].step + 1, "b")
