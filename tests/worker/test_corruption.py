"""Bits flip in trainers without an error: this is found, and the job ends with the bits of the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makara.protocol.messages import Corruption, Phase
from makara.worker.execution.replicas import CorruptState
from makara.worker.sections.state_hash import ROUND
from makara.worker.trainer.trainer import Trainer
from test_trainers import Run, assert_same, reference
from trainer_processes import LASTING_BITS

SOON = ROUND + 2
"""Steps within which a flip is found."""
KINDS = ("weights", "optimizer", "gradients")


class Flips:
    """A job in whose trainers bits flip, one after another."""

    def __init__(self, folder: Path, replicas: int, steps: int, **changes: object) -> None:
        self.run = Run(folder, steps=steps, **changes)
        self.workers = [f"w{number}" for number in range(replicas)]
        self.run.fleet.start(*self.workers, fault="flips-when-told")
        self._number = 0

    def form(self) -> None:
        self._number += 1
        plan = self.run.plan(self._number, [], len(self.workers))
        self.run.fleet.form(plan, self.workers, checkpoints=self.run.published() if self._number > 1 else ())

    def flip(self, kind: str, seed: int, bits: Sequence[int] = LASTING_BITS) -> Corruption:
        """Flip a bit in one of them, and wait until all have found it and dropped their state."""
        fleet, victim = self.run.fleet, random.Random(seed).choice(self.workers)
        step = fleet.flip(victim, kind, seed, bits)
        fleet.wait(lambda: all(self._has_found(worker) for worker in self.workers))
        found = [fleet.reports[worker].corruption for worker in self.workers]
        assert found.count(found[0]) == len(found), "all find the same"
        corruption = found[0]
        assert corruption is not None
        assert 0 <= corruption.step - step <= SOON, (
            f"{kind}, seed {seed}: found {corruption}, flipped at {step}"
        )
        if len(self.workers) > 2:
            assert (corruption.suspects, corruption.has_majority) == ([victim], True)
        else:
            assert (corruption.suspects, corruption.has_majority) == (self.workers, False)
        assert all(ref.step <= step for ref in self.run.published()), "no wrong state was published"
        fleet.abandon(self._number, *self.workers)
        return corruption

    def _has_found(self, worker: str) -> bool:
        report = self.run.fleet.reports[worker]
        self.run.fleet.has(worker)  # raises what it failed of
        return report.corruption is not None and report.corruption.generation == self._number

    def close(self) -> None:
        self.run.fleet.close()


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_a_flip_anywhere_in_a_replica_is_found_and_undone(tmp_path: Path, replicas: int) -> None:
    steps = 60
    job = Flips(tmp_path, replicas, steps, checkpoint_interval_steps=7)
    try:
        job.form()
        for seed, kind in enumerate(KINDS):
            job.flip(kind, seed)
            job.form()
        found = job.run.finish(*job.workers)
    finally:
        job.close()
    losses, state = reference("models:tied_gpt", "exact", steps)
    assert [job.run.fleet.losses()[step + 1] for step in range(steps)] == losses
    assert_same(found, state)


def test_corruption_is_reported_before_kernels_are_tested_again() -> None:
    """On a processor that is wrong the test may raise, and then the trainer ends."""
    told: list[dict[str, Any]] = []

    def tested() -> str:
        raise RuntimeError("illegal instruction")

    distrusted: list[int] = []
    found = Corruption(generation=3, step=9, sections=[1], suspects=["w0"], has_majority=False)
    model = SimpleNamespace(
        state=SimpleNamespace(distrust=distrusted.append), bits_hash="b1", tested_bits=tested
    )
    control = SimpleNamespace(orders=None, report=lambda **changes: told.append(changes))
    trainer: Any = SimpleNamespace(worker="w0", control=control, _model=model)
    session: Any = SimpleNamespace(number=3)
    with pytest.raises(RuntimeError, match="illegal instruction"):
        Trainer._tell_interrupted(trainer, session, CorruptState(found))
    assert told == [{"phase": Phase.BROKEN, "lost": [], "corruption": found}]
    assert distrusted == [3]


@pytest.mark.slow
def test_a_flip_that_makes_gradients_infinite_is_not_blamed_on_the_model(tmp_path: Path) -> None:
    steps = 12
    job = Flips(tmp_path, 2, steps, checkpoint_interval_steps=3)
    try:
        job.form()
        job.flip("weights", 1, bits=[30])
        job.form()
        found = job.run.finish(*job.workers)
    finally:
        job.close()
    assert_same(found, reference("models:tied_gpt", "exact", steps)[1])


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_flips_one_after_another_are_found_and_undone(
    tmp_path: Path, replicas: int, kind: str
) -> None:
    """17 in each of six jobs, whose checkpoints are so far apart that all are found in between."""
    seed, num_flips, steps = random.SystemRandom().randrange(10**9), 17, 60
    print(f"seed {seed}")
    job = Flips(tmp_path, replicas, steps, checkpoint_interval_steps=30)
    try:
        job.form()
        for number in range(num_flips):
            job.flip(kind, seed + number)
            job.form()
        found = job.run.finish(*job.workers)
    finally:
        job.close()
    assert_same(found, reference("models:tied_gpt", "exact", steps)[1])
