"""What a trainer process outlives, what it leaves behind, and when it must end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from makara.checkpoint import open_generation, open_store
from makara.model.training import load_entrypoint
from makara.pipeline import Plan, Range, grid
from makara.protocol.messages import JobSettings, Phase
from makara.worker.profiling.profiling import profile
from makara.worker.trainer.agent_pipe import AGENT_GONE
from trainer_processes import BUNDLE, CONTEXT, TIMEOUT_S, Fleet, _trainer, settings

STEPS = 100_000  # nobody gets there


class Run:
    def __init__(self, folder: Path) -> None:
        self.job: JobSettings = settings(folder, steps=STEPS)
        recipe = profile(load_entrypoint(BUNDLE, self.job.entrypoint), self.job).recipe
        self.num_sections, self.num_micro_batches = recipe.num_sections, recipe.num_micro_batches
        self.fleet = Fleet(folder, self.job, recipe)

    def plan(self, generation: int, *cuts: int) -> Plan:
        open_generation(open_store(self.job.store.uri), self.job.job, generation)
        bounds = [0, *cuts, self.num_sections]
        stages = [Range(a, b) for a, b in pairwise(bounds)]
        return grid(stages, 1, self.num_micro_batches, generation=generation)

    def step_on(self, worker: str) -> None:
        self.fleet.wait_step(self.fleet.reports[worker].step + 1, worker)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.fleet.close()


class Holdings:
    """Open files and threads of a trainer, generation by generation."""

    def __init__(self, run: Run, worker: str) -> None:
        self._run = run
        self._folder = Path(f"/proc/{run.fleet.pid(worker)}")
        self._found: list[tuple[int, int]] = []

    def stay(self) -> None:
        """What one generation leaves is closed by the next; its threads may take a moment to end.

        A generation has 11 files and a thread. Up to 13 files and 2 threads open once in a trainer's life, at
        times as late as in the tenth generation.
        """
        if len(self._found) < 2:
            self._found.append(self._now())
            return
        most_files, most_threads = self._found[1][0] + 16, self._found[1][1] + 4
        patience = time.monotonic() + TIMEOUT_S
        while True:
            files, threads = self._now()
            if files <= most_files and threads <= most_threads:
                return
            assert time.monotonic() < patience, (files, most_files, threads, most_threads)
            time.sleep(0.02)

    def _now(self) -> tuple[int, int]:
        return len(os.listdir(self._folder / "fd")), len(os.listdir(self._folder / "task"))


def test_generations_given_up_in_the_middle_of_a_step_leave_no_sockets_and_no_threads(run: Run) -> None:
    run.fleet.start("a", "b", "c")
    holdings = Holdings(run, "a")
    for number in range(1, 6):
        run.fleet.form(run.plan(number, 2, 5), ["a", "b", "c"])
        run.step_on("a")
        holdings.stay()
        run.fleet.abandon(number, "a", "b", "c")
        run.fleet.wait_phase(Phase.IDLE, "a", "b", "c")


def test_generations_broken_by_a_death_leave_no_sockets_and_no_threads(run: Run) -> None:
    run.fleet.start("a", "b", "c0", "c1", "c2", "c3")
    holdings = Holdings(run, "a")
    for number in range(1, 5):
        dies = f"c{number - 1}"
        run.fleet.form(run.plan(number, 2, 5), [dies, "a", "b"])  # two that wait for each other live on
        run.step_on("a")
        holdings.stay()
        run.fleet.kill(dies)
        run.fleet.abandon(number, "a", "b")
        run.fleet.wait(lambda: all(run.fleet.reports[w].phase in (Phase.IDLE, Phase.BROKEN) for w in "ab"))


def test_generations_that_newer_ones_follow_leave_no_sockets_and_no_threads(run: Run) -> None:
    # What waits for the collector stays for hours, gradient sums and all, or goes in the middle of a step.
    run.fleet.start("a", "b", "c", fault="never-collects")
    holdings = Holdings(run, "b")
    for number in range(1, 7):
        run.fleet.form(run.plan(number, 2, 5), ["a", "b", "c"])
        run.step_on("b")
        holdings.stay()


def test_a_replacement_takes_no_part_in_what_its_predecessor_prepared(run: Run) -> None:
    """Its place is known to the others by what the dead one said; the manager will close the generation."""
    run.fleet.start("a", "b")
    run.fleet.prepare(run.plan(1, 4), ["a", "b"])
    run.fleet.kill("b")
    run.fleet.go(1)
    run.fleet.wait_phase(Phase.FORMING, "a")
    run.fleet.replace("b", "a")
    run.fleet.abandon(1, "a", "b")
    run.fleet.wait_phase(Phase.IDLE, "a", "b")
    assert run.fleet.reports["b"].generation == 0
    run.fleet.form(run.plan(2, 4), ["a", "b"])


def test_a_worker_that_the_next_generation_does_without_holds_nobody_up(run: Run) -> None:
    run.fleet.start("a", "b", "c")
    run.fleet.form(run.plan(1, 4), ["a", "b"])
    run.fleet.prepare(run.plan(2, 4), ["a", "c"])
    run.fleet.go(2)
    run.fleet.forget("b")
    run.fleet.send("b")
    run.fleet.wait_phase(Phase.IDLE, "b")
    run.fleet.wait(lambda: run.fleet.formed("a", 2) and run.fleet.formed("c", 2))


def test_all_who_died_are_named_also_those_who_died_a_moment_later(run: Run) -> None:
    """Found: the first one was, and what the other links told after that was dropped."""
    run.fleet.start("a", "b", "c", "d", "e")
    run.fleet.form(run.plan(1, 1, 2, 4, 6), ["a", "b", "c", "d", "e"])
    run.step_on("a")
    run.fleet.kill("c")
    run.fleet.wait_phase(Phase.BROKEN, "a", "b", "e")
    run.fleet.kill("d")
    run.fleet.wait(lambda: all(run.fleet.reports[w].lost == ["c", "d"] for w in ("a", "b", "e")))
    run.fleet.abandon(1, "a", "b", "e")
    run.fleet.form(run.plan(2, 2, 5), ["a", "b", "e"])  # who is left of it takes nobody for lost any more
    run.step_on("a")
    assert all(run.fleet.reports[w].lost == [] for w in ("a", "b", "e"))


def test_a_trainer_whose_agent_died_without_reading_ends_itself(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    process = CONTEXT.Process(target=_trainer, args=(theirs, "a", str(tmp_path / "log"), None), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv(1)  # the first of more; the rest stays unread, so that closing resets the connection
    ours.close()
    process.join(TIMEOUT_S)
    assert process.exitcode == AGENT_GONE
