"""From a death to the next finished operation, by how the survivors go on: real trainers, six on loopback.

The benchmark plays the manager: it gives the orders and reads the reports. Rerouted, nothing moves; the
fastest grid of the survivors loads what it lacks from peers; where the dead worker alone hosted a stage, all
go back to the newest checkpoint.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from makara.checkpoint import open_generation, open_store, read_head
from makara.model.training import load_entrypoint
from makara.morphing import Choice, Request, Rerouted, Slot, choose, reroute
from makara.pipeline import Plan, Range, grid
from makara.protocol.messages import (
    Formed,
    GenerationOrder,
    JobSettings,
    Member,
    Phase,
    Profile,
    Recipe,
    StoreConfig,
    WorkerReport,
)
from makara.simulator import Calibration
from makara.worker.agent.trainer_process import ALLOCATOR
from makara.worker.profiling.profiling import profile

from .emulated.fleet import in_fresh_process
from .report import Row
from .trainers import Trainer

NUM_WORKERS = 6
NUM_MICRO_BATCHES = 18
MICROBATCH_SIZE = 4
ROUNDS = 3
VICTIM = 3
STEPS_BEFORE = 2
"""That a generation takes before a worker dies."""
TITLE = (
    f"one of {NUM_WORKERS} real trainers dies: seconds until the next finished operation, medians of {ROUNDS}"
)
BUNDLE = Path(__file__).parent
MEMORY_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Case:
    """`depth` of the grid that loses a worker, and whether the survivors are rerouted."""

    name: str
    depth: int
    is_rerouted: bool
    rung: str


CASES = (
    Case("rerouted", 3, is_rerouted=True, rung="peers"),
    Case("fastest grid, from peers", 3, is_rerouted=False, rung="peers"),
    Case("fastest grid, from the store", NUM_WORKERS, is_rerouted=False, rung="store"),
)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = _Cluster(Path(folder), stack)
        taken: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
        plans: dict[Case, str] = {}
        for _ in range(ROUNDS):
            for case in CASES:
                plans[case], seconds = cluster.lose_one(case)
                taken[case].append(seconds)
        return [
            {
                "the survivors": case.name,
                "plans": plans[case],
                **{name: statistics.median(one[name] for one in taken[case]) for name in taken[case][0]},
            }
            for case in CASES
        ]


class _Cluster:
    """The trainers, by rank of the whole grid, and their store. A dead one is replaced after each case."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._job = JobSettings(
            job="morphs",
            entrypoint="morph_models:chain",
            seed=3,
            steps=1_000_000,
            global_batch_size=MICROBATCH_SIZE * NUM_MICRO_BATCHES,
            microbatch_size=MICROBATCH_SIZE,
            numerics="fast",
            checkpoint_interval_steps=2,
            store=StoreConfig(uri=f"file://{folder}/store"),
            bundle_sha256="0" * 64,
        )
        found = in_fresh_process(_profile, self._job, environment=ALLOCATOR)
        self._calibration = Calibration.from_json(found.calibration)
        self._recipe: Recipe = found.recipe
        self._store = open_store(self._job.store.uri)
        self._generation = self._started = 0
        self._trainers: list[Trainer] = []
        self._replace(range(NUM_WORKERS))

    def lose_one(self, case: Case) -> tuple[str, dict[str, float]]:
        """What the plans were, and seconds by phase."""
        number = self._generation + 1
        whole = replace(self._whole(case.depth), generation=number)
        self._form(whole, self._trainers, abandoned=0)
        started_at = self._wait_formed(self._trainers, number)[0].step
        self._trainers[0].wait(lambda report: report.step >= started_at + STEPS_BEFORE)
        survivors = [one for one in self._trainers if one is not self._trainers[VICTIM]]
        began = time.monotonic()
        self._trainers[VICTIM].kill()
        survivors[0].wait(lambda report: report.phase is Phase.BROKEN)
        noticed = time.monotonic()
        plan, members = self._next(case, whole, survivors)
        planned = time.monotonic()
        prepared, opened = self._form(plan, members, abandoned=number)
        reports = self._wait_formed(members, plan.generation)
        assert {one.rung for one in reports} == {case.rung}, reports
        formed = time.monotonic()
        first = self._first_operation(members, opened)
        self._trainers[0].wait(lambda report: report.step > reports[0].step)
        stepped = time.monotonic()
        self._replace([VICTIM])
        return f"{whole.shape} to {plan.shape}", {
            "noticed s": noticed - began,
            "planned s": planned - noticed,
            "prepared s": prepared - planned,
            "opened s": opened - prepared,
            **_slowest(reports),
            "formed s": formed - opened,
            "first operation s": first - opened,
            "from death to first operation s": first - began,
            "from death to first step s": stepped - began,
        }

    def _whole(self, depth: int) -> Plan:
        sections = self._recipe.num_sections
        bounds = [round(stage * sections / depth) for stage in range(depth + 1)]
        ranges = [Range(start, stop) for start, stop in itertools.pairwise(bounds)]
        return grid(ranges, NUM_WORKERS // depth, NUM_MICRO_BATCHES)

    def _next(self, case: Case, whole: Plan, survivors: list[Trainer]) -> tuple[Plan, list[Trainer]]:
        """The survivors' plan, and all of them by rank; those that it leaves out come last."""
        number = whole.generation + 1
        if case.is_rerouted:
            found = reroute(whole, [VICTIM])
            assert isinstance(found, Rerouted), found
            return replace(found.plan, generation=number), survivors
        by_name = {one.worker: one for one in survivors}
        choice = choose(
            Request(
                calibration=self._calibration,
                num_sections=self._recipe.num_sections,
                num_micro_batches=NUM_MICRO_BATCHES,
                workers=[Slot(name, name, MEMORY_BYTES) for name in by_name],
                generation=number,
            )
        )
        assert isinstance(choice, Choice), choice
        chosen = [by_name[name] for name in choice.workers]
        return choice.plan, chosen + [one for one in survivors if one not in chosen]

    def _form(self, plan: Plan, members: list[Trainer], abandoned: int) -> tuple[float, float]:
        """Order all of them into `plan`; when all were prepared, and when the store was opened for it."""
        order = GenerationOrder(
            number=plan.generation,
            phase="prepare",
            plan=plan.to_json(),
            members=[Member(worker=one.worker, address="127.0.0.1") for one in members],
        )
        for one in members:
            one.order(action="train", recipe=self._recipe, generation=order, abandoned=abandoned)
        reports = [one.wait(lambda report: report.prepared >= plan.generation) for one in members]
        prepared = time.monotonic()
        open_generation(self._store, self._job.job, plan.generation)
        head = read_head(self._store, self._job.job)
        assert head is not None
        go = {"phase": "go", "endpoint": reports[0].endpoint, "checkpoints": list(head.manifests)}
        opened = time.monotonic()
        order = order.model_copy(update=go)
        for one in members:
            one.order(action="train", recipe=self._recipe, generation=order, abandoned=abandoned)
        self._generation = plan.generation
        return prepared, opened

    def _wait_formed(self, members: list[Trainer], number: int) -> list[Formed]:
        found: list[Formed] = []
        for one in members:
            report = one.wait(partial(_has_formed, number))
            assert report.formed is not None
            found.append(report.formed)
        return found

    def _first_operation(self, members: list[Trainer], since: float) -> float:
        """When the first forward after `since` was done."""
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            times = [float(line) for one in members for line in self._times(one).read_text().split()]
            if later := [moment for moment in times if moment > since]:
                return min(later)
            time.sleep(0.01)
        raise RuntimeError("no operation within a minute")

    def _times(self, trainer: Trainer) -> Path:
        return self._folder / f"{trainer.worker}.times"

    def _replace(self, ranks: Iterable[int]) -> None:
        """Start trainers in the places of the dead."""
        started: list[Trainer] = []
        for rank in ranks:
            name = f"w{self._started}"
            self._started += 1
            times = self._folder / f"{name}.times"
            times.touch()
            environment = {**ALLOCATOR, **os.environ, "MAKARA_BENCHMARK_TIMES": str(times)}
            trainer = Trainer(name, self._job, BUNDLE, environment, script="timed_trainer.py")
            started.append(self._stack.enter_context(trainer))
            self._trainers[rank : rank + 1] = [trainer]
        for trainer in started:
            trainer.order(recipe=self._recipe)
        for trainer in started:
            trainer.wait(lambda report: report.graph_hash is not None)


def _has_formed(number: int, report: WorkerReport) -> bool:
    return report.formed is not None and report.formed.generation >= number


def _slowest(formed: Sequence[Formed]) -> dict[str, float]:
    """Seconds of each phase of joining, of the member that took longest."""
    return {f"{name} s": max(one.phases_s[name] for one in formed) for name in formed[0].phases_s}


def _profile(job: JobSettings) -> Profile:
    """What a first worker finds that is alone, in a process of its own."""
    return profile(load_entrypoint(BUNDLE, job.entrypoint), job)
