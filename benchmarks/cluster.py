"""Real trainers on loopback, of which some die: the benchmark plays the manager, by orders and reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from makara.morphing import Choice, Request, Rerouted, Slot, choose, reroute
from makara.pipeline import Plan, grid
from makara.protocol.messages import Formed, JobSettings, WorkerReport
from makara.simulator import Calibration

from .made_up import stages
from .trainers import Trainer, form, prepare, profiled

_MEMORY_BYTES = 1 << 40
_MOST_S = 60.0  # until a trainer writes a moment that is waited for


class Moment(NamedTuple):
    """What `timed_trainer.py` writes down, by `time.monotonic`."""

    what: str
    generation: int
    time_s: float


class Cluster:
    """`num_workers` trainers, by rank of a whole grid, and their store."""

    def __init__(self, folder: Path, stack: ExitStack, job: JobSettings, num_workers: int) -> None:
        self._folder, self._stack, self._job = folder, stack, job
        found = profiled(job)
        self.calibration = Calibration.from_json(found.calibration)
        self._recipe = found.recipe
        self._started = 0
        self.generation = 0
        """The newest that was formed."""
        self.trainers: list[Trainer] = []
        self.replace(range(num_workers))

    @property
    def num_micro_batches(self) -> int:
        return self._job.global_batch_size // self._job.microbatch_size

    def whole(self, depth: int, *, window: int | None = None, halves: bool = False) -> Plan:
        """The next generation's plan, if all trainers form a grid."""
        return grid(
            stages(self._recipe.num_sections, depth),
            len(self.trainers) // depth,
            self.num_micro_batches,
            window=window,
            generation=self.generation + 1,
            halves=halves,
        )

    def rerouted(self, whole: Plan, dead: int) -> tuple[Plan, list[Trainer]]:
        """The plan of the generation after `whole`, and its members by rank."""
        found = reroute(whole, [dead])
        assert isinstance(found, Rerouted), found
        plan = replace(found.plan, generation=whole.generation + 1)
        return plan, [self.trainers[rank] for rank in found.survivors]

    def fastest(self, whole: Plan, dead: int) -> tuple[Plan, list[Trainer]]:
        """As `rerouted`; those that the plan leaves out come last."""
        by_name = {one.worker: one for rank, one in enumerate(self.trainers) if rank != dead}
        choice = choose(
            Request(
                calibration=self.calibration,
                num_sections=self._recipe.num_sections,
                num_micro_batches=self.num_micro_batches,
                workers=[Slot(name, name, _MEMORY_BYTES) for name in by_name],
                generation=whole.generation + 1,
            )
        )
        assert isinstance(choice, Choice), choice
        chosen = [by_name[name] for name in choice.workers]
        return choice.plan, chosen + [one for one in by_name.values() if one not in chosen]

    def form(self, plan: Plan, members: Sequence[Trainer], abandoned: int) -> tuple[float, float]:
        """As `trainers.form`."""
        times = form(members, plan, self._recipe, self._job, abandoned)
        self.generation = plan.generation
        return times

    def wait_formed(self, members: Sequence[Trainer], number: int) -> list[Formed]:
        found: list[Formed] = []
        for one in members:
            report = one.wait(partial(_has_formed, number))
            assert report.formed is not None
            found.append(report.formed)
        return found

    def moments(self, member: Trainer, what: str, generation: int) -> list[float]:
        """When this happened to a member in a generation, ascending."""
        lines = self._times(member).read_text().splitlines(keepends=True)
        whole = [line.split() for line in lines if line.endswith("\n")]
        found = [Moment(what, int(generation), float(time_s)) for what, generation, time_s in whole]
        return [one.time_s for one in found if (one.what, one.generation) == (what, generation)]

    def wait_moments(self, member: Trainer, what: str, generation: int, least: int = 1) -> list[float]:
        """As `moments`, once there are so many."""
        until = time.monotonic() + _MOST_S
        while time.monotonic() < until:
            if len(found := self.moments(member, what, generation)) >= least:
                return found
            time.sleep(0.01)
        raise RuntimeError(f"{member.worker}: not {what} within {_MOST_S:.0f} s")

    def replace(self, ranks: Iterable[int]) -> None:
        """Start trainers in the places of the dead."""
        started: list[Trainer] = []
        for rank in ranks:
            name = f"w{self._started}.0"
            self._started += 1
            times = self._folder / f"{name}.times"
            times.touch()
            trainer = Trainer(name, self._job, "timed_trainer.py", {"MAKARA_BENCHMARK_TIMES": str(times)})
            started.append(self._stack.enter_context(trainer))
            self.trainers[rank : rank + 1] = [trainer]
        prepare(started, self._recipe)

    def _times(self, trainer: Trainer) -> Path:
        return self._folder / f"{trainer.worker}.times"


def _has_formed(number: int, report: WorkerReport) -> bool:
    return report.formed is not None and report.formed.generation >= number
