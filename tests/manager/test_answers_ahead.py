"""What follows from the loss of a VM is computed before it comes, and is what the planner would say then."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from branching_world import BranchingWorld
from calibrations import FREE, uniform
from makara.manager.core.commands import Command, ComputePlan
from makara.manager.core.events import PlanComputed
from makara.manager.core.facts import JobEnded, WorkerPaced
from makara.manager.core.fold import apply
from makara.manager.service.planner.answer_table import AnswerTable, Search
from makara.manager.service.planner.answers_ahead import AnswersAhead
from makara.manager.service.planner.planner import Planner
from makara.manager.service.planning import Choose, compute_plan
from makara.manager.service.runtime import Job
from makara.manager.threads import Threads
from makara.morphing import Before, Choice, Infeasible, Request, Risk, Slot, choose, rerouted
from makara.simulator import Link

SLOW = Link(latency_s=0.0, bytes_per_s=30.0)


def seeds(count: int) -> list[int]:
    given = os.environ.get("MAKARA_SEED")
    first = random.SystemRandom().randrange(10**9)
    found = [int(given)] if given is not None else [first + n for n in range(count)]
    print(f"MAKARA_SEED={found[0]} and those after it")
    return found


# ---- the table ---------------------------------------------------------------------------------------------


def test_an_answer_holds_for_questions_that_differ_in_names_alone() -> None:
    """Whatever the order of the names: the planner goes by places."""
    kinds = set[str]()
    for seed in seeds(60):
        rng = random.Random(seed)
        request, before = random_question(rng)
        table = AnswerTable(1)
        first = table.filled(lambda: None)
        answers = first.choose(request), first.rerouted(request, before)
        assert answers == (choose(request), rerouted(request, before))
        names = {slot.worker: f"w{rng.random()}" for slot in request.workers}
        vms = {slot.vm: f"v{rng.random()}" for slot in request.workers}
        other = replace(
            request,
            generation=request.generation + 1,
            workers=[
                Slot(names[slot.worker], vms[slot.vm], slot.memory_bytes, slot.slowdown)
                for slot in request.workers
            ],
            holding={names.get(worker, worker): held for worker, held in request.holding.items()},
        )
        ran = Before(before.plan, [names.get(worker, worker) for worker in before.workers])
        known, computed = table.looked_up(), table.num_computed
        assert known.choose(other) == choose(other), f"MAKARA_SEED={seed}"
        assert known.rerouted(other, ran) == rerouted(other, ran), f"MAKARA_SEED={seed}"
        assert table.num_computed == computed
        kinds |= {type(answer).__name__ for answer in answers}
    assert {"Choice", "Infeasible"} <= kinds


def random_question(rng: random.Random) -> tuple[Request, Before]:
    """Some of the workers of a plan are gone; others may be slow, or hold nothing."""
    num, per_vm = rng.randint(1, 5), rng.choice([1, 1, 2])
    calibration = uniform(num, forward_s=tuple(rng.uniform(0.5, 1.5) for _ in range(num)))
    workers = [
        Slot(f"v{vm}.{index}", f"v{vm}", rng.choice([400, 1000]), rng.choice([1.0, 1.0, 1.0, 1.5]))
        for vm in range(rng.randint(2, 7))
        for index in range(per_vm)
    ]
    risk = Risk(losses_per_s=0.001, mean_size=2.0, redo_s=60.0, redo_steps=3.0, form_s=5.0)
    request = Request(
        calibration=calibration,
        num_sections=num,
        num_micro_batches=rng.randint(2, 8),
        workers=workers,
        generation=rng.randint(1, 9),
        unequal_pipelines=rng.choice(["auto", "off"]),
        tolerated_failures=rng.choice([0, 0, 1]),
        risk=rng.choice([None, risk]),
    )
    first = choose(request)
    if isinstance(first, Infeasible):
        return random_question(rng)
    holding = dict(zip(first.workers, first.plan.ranges, strict=True))
    gone = {rng.choice(workers).vm}
    left = [slot for slot in workers if slot.vm not in gone]
    if rng.random() < 0.2:
        holding.pop(rng.choice([*holding]))
    return replace(request, workers=left, holding=holding), Before(first.plan, first.workers)


@pytest.mark.parametrize(
    "change",
    [
        {"num_micro_batches": 9},
        {"tolerated_failures": 1},
        {"memory_limit_bytes": 900},
        {"risk": Risk(losses_per_s=0.002, mean_size=2.0, redo_s=60.0, redo_steps=3.0)},
        {"calibration": uniform(3, optimizer_s=(0.6,) * 3)},
        {"workers": [Slot(f"v{n}.0", f"v{n}", 1000, 1.0 + n) for n in range(4)]},
        {"workers": [Slot(f"v{n // 2}.{n}", f"v{n // 2}", 1000) for n in range(4)]},
        {"workers": [Slot(f"v{n}.0", f"v{n}", 1000 + n) for n in range(4)]},
        {"holding": {}},
    ],
)
def test_a_question_that_differs_in_anything_else_is_another(change: dict[str, Any]) -> None:
    request = Request(
        calibration=uniform(3),
        num_sections=3,
        num_micro_batches=8,
        workers=[Slot(f"v{n}.0", f"v{n}", 1000) for n in range(4)],
        generation=2,
        holding={"v1.0": uniform_range(3)},
    )
    table = AnswerTable(1)
    table.filled(lambda: None).choose(request)
    other = replace(request, **change)
    assert table.looked_up().choose(other) == choose(other)
    assert (table.num_found, table.num_computed) == (0, 2)
    assert table.looked_up().choose(other) == choose(other)
    assert table.num_computed == 3, "what is only looked up is not kept"


def uniform_range(num: int) -> Any:
    plan = choose(
        Request(
            calibration=uniform(num),
            num_sections=num,
            num_micro_batches=1,
            workers=[Slot("a", "a", 10_000)],
            generation=1,
        )
    )
    assert isinstance(plan, Choice)
    return plan.plan.ranges[0]


# ---- the questions -----------------------------------------------------------------------------------------


class AskedWorld(BranchingWorld):
    """Keeps the planner's last question."""

    asked: ComputePlan | None = None

    def perform(self, command: Command) -> None:
        super().perform(command)
        if isinstance(command, ComputePlan):
            self.asked = command


def world(*, num_vms: int = 6, per_vm: int = 1, link: Link = FREE, **sections: Any) -> AskedWorld:
    return AskedWorld(
        uniform(4, inter_vm=link),
        num_vms=num_vms,
        per_vm=per_vm,
        training={"global_batch_size": 24, "steps": 100_000},
        **{"resources": {"min_nodes": 1, "device_memory": 700}, **sections},
    )


def answered(world: AskedWorld, search: Search) -> PlanComputed:
    assert world.asked is not None
    return compute_plan(world.state, world.asked, lambda: world.now, search)


def worlds() -> Iterator[tuple[int, AskedWorld]]:
    """Jobs some deaths and repairs after they began."""
    for seed in seeds(10):
        rng = random.Random(seed)
        made = world(
            num_vms=rng.randint(3, 9),
            per_vm=rng.choice([1, 2]),
            link=rng.choice([FREE, SLOW]),
            resilience={"tolerated_failures": rng.choice([0, 1])},
        )
        for _ in range(rng.randint(0, 3)):
            if len(made.vms) > 2:
                made.kill(rng.choice([*made.vms]))
                made.settle()
            made.wait(rng.choice([1.0, 100.0]))
            made.join(rng.randint(0, len(made.requested)))
            made.settle()
            made.wait(5.0)
        made.wait(1.0)
        yield seed, made


def test_each_single_loss_is_answered_from_the_table_as_the_planner_would_answer_it() -> None:
    """At once or a while later, after any deaths and repairs."""
    num_found = 0
    for seed, steps in worlds():
        desk = Desk(steps)
        table = desk.filled()
        if table is None:
            continue
        for vm in list(steps.vms):
            after, computed = steps.branch(), table.num_computed
            after.wait(random.Random(seed).choice([0.0, 3.0]))
            after.asked = None
            after.kill(vm)
            while after.asked is None and after.step():
                pass
            if after.asked is None:
                continue  # nothing follows from the loss of a VM without work
            assert answered(after, table.looked_up()) == answered(after, Search()), f"MAKARA_SEED={seed}"
            assert table.num_computed == computed, f"MAKARA_SEED={seed}: it was not known"
            num_found += 1
    assert num_found > 20 or "MAKARA_SEED" in os.environ


def test_vms_lost_together_and_rates_that_changed_are_answered_as_without_a_table() -> None:
    for seed, steps in worlds():
        rng, table = random.Random(seed), Desk(steps).filled()
        if table is None or len(steps.vms) < 4:
            continue
        after = steps.branch()
        if rng.random() < 0.5:
            after.wait(20_000.0)  # so that losses seem rarer
        after.asked = None
        after.kill(*rng.sample([*after.vms], rng.choice([1, 2])))
        while after.asked is None and after.step():
            pass
        if after.asked is not None:
            assert answered(after, table.looked_up()) == answered(after, Search()), f"MAKARA_SEED={seed}"


def test_alike_vms_are_computed_once() -> None:
    steps = world(parallelism={"pipeline_parallel_degree": 1}, resources={"device_memory": 10_000})
    steps.wait(1.0)
    desk = Desk(steps)
    table = desk.filled()
    assert table is not None
    assert len(steps.vms) == 6
    # One new plan, and one reroute for each: they differ in the pipeline that is gone.
    assert table.num_computed == 1 + 6


# ---- when it is computed -----------------------------------------------------------------------------------


class Desk:
    """The planner of one job, and what fills its table, one loss at a time."""

    def __init__(
        self, world: BranchingWorld, choose_plan: Choose = compute_plan, planner: type[Planner] = Planner
    ) -> None:
        self.world = world
        self.job = Job("j", [], [])
        self.jobs = {"j": self.job}
        threads = Threads()
        self.planner = planner(threads, lambda job: self.jobs[job].state, lambda: world.now, choose_plan)
        self.ahead = AnswersAhead(self.jobs, self.planner, threads, world.timing)
        self.look()

    def look(self) -> None:
        """The job is as in its world."""
        self.job.state, self.job.observations = self.world.state, self.world.observations

    def filled(self) -> AnswerTable | None:
        """All that can be computed ahead."""

        async def fill() -> None:
            while await self.ahead.advance():
                pass

        asyncio.run(fill())
        return self.planner.tables.get("j")


def test_nothing_is_computed_before_a_generation_steps_or_while_another_is_planned() -> None:
    steps = world()
    steps.wait(1.0)
    steps.kill(next(iter(steps.vms)))
    stages = set[str]()
    while steps.step():
        generation = steps.state.current
        if generation and generation.formed and steps.observations.newest_step > generation.formed.step:
            break
        stages.add("planned" if steps.state.planned else "forming" if generation else "closed")
        assert Desk(steps).filled() is None
    assert stages >= {"planned", "forming", "closed"}
    assert Desk(steps).filled() is not None


def test_a_real_question_comes_first() -> None:
    """While one waits for its answer no loss is looked at; what was begun is done later."""
    steps = world()
    steps.wait(1.0)
    desk, (_, question) = Desk(steps), lost(steps)

    async def play() -> None:
        assert await desk.ahead.advance()
        asked = asyncio.create_task(desk.planner.answer("j", question))
        await asyncio.sleep(0)
        assert desk.planner.busy
        num_computed = desk.planner.tables["j"].num_computed
        assert not await desk.ahead.advance()
        assert desk.planner.tables["j"].num_computed == num_computed
        assert await asked is not None
        assert not desk.planner.busy
        assert await desk.ahead.advance()
        assert desk.planner.tables["j"].num_computed > num_computed

    asyncio.run(play())


class SoonBusy(Planner):
    """A question comes as soon as the first plan of the first loss is computed."""

    asked = True

    @property
    def busy(self) -> bool:
        return self.asked and any(table.num_computed == 1 for table in self.tables.values())


def test_a_loss_that_is_looked_at_gives_way_between_its_plans() -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps, planner=SoonBusy)

    async def play() -> None:
        assert await desk.ahead.advance()
        assert desk.planner.tables["j"].num_computed == 1
        assert not await desk.ahead.advance(), "it waits for the question's end"

    asyncio.run(play())
    SoonBusy.asked = False
    table, whole = desk.filled(), Desk(steps).filled()
    assert table is not None
    assert whole is not None
    assert table.num_computed == whole.num_computed > 1


def test_the_planner_answers_from_the_table_and_only_for_its_generation() -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps)
    table = desk.filled()
    assert table is not None
    for number, looks_up in ((table.number, True), (table.number + 1, False)):
        after, question = lost(steps)
        desk.world, table.number, table.num_found = after, number, 0
        desk.look()
        answer = asyncio.run(desk.planner.answer("j", question))
        assert answer is not None
        plain = compute_plan(after.state, question, desk.planner.clock)
        assert answer == plain
        assert (table.num_found > 0) == looks_up


def test_a_planner_of_ones_own_is_asked_itself() -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps, lambda state, command, clock: compute_plan(state, command, clock))
    assert not desk.planner.can_look_ahead
    table = desk.filled()
    assert table is not None
    after, question = lost(steps)
    desk.world, table.num_found = after, 0
    desk.look()
    assert asyncio.run(desk.planner.answer("j", question)) is not None
    assert table.num_found == 0


def test_a_table_is_dropped_with_its_generation_and_with_its_job() -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps)
    first = desk.filled()
    assert first is not None
    steps.wait(1.0)
    desk.look()
    assert desk.filled() is first, "nothing has changed"
    steps.kill(next(iter(steps.vms)))
    steps.settle()
    desk.look()
    second = desk.filled()
    assert second is not None
    assert second.number > first.number
    ended = JobEnded(at=steps.now, status="failed", reason="over")
    desk.job.state = apply(steps.state, ended)
    assert desk.filled() is None


def test_a_slow_worker_has_all_computed_again() -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps)
    first = desk.filled()
    worker = next(iter(steps.vms.values())).trainers[0].worker
    desk.job.state = apply(steps.state, WorkerPaced(at=steps.now, worker=worker, incarnation=1, slowdown=2.0))
    second = desk.filled()
    assert second is not first
    assert second is not None
    assert second.num_computed > 0


def test_a_fault_ends_it_for_one_job_until_its_generation_changes(caplog: pytest.LogCaptureFixture) -> None:
    steps = world()
    steps.wait(1.0)
    desk = Desk(steps)
    faulty = Job("faulty", [], [])
    faulty.state = steps.state.changed(hosts_plan={"no": "plan"})
    faulty.observations = steps.observations
    desk.jobs = {"faulty": faulty, "j": desk.job}
    desk.ahead = AnswersAhead(desk.jobs, desk.planner, Threads(), steps.timing)
    table = desk.filled()
    assert table is not None
    assert table.num_computed > 1
    assert len(caplog.records) == 1
    assert "faulty" in caplog.text


def lost(steps: AskedWorld) -> tuple[AskedWorld, ComputePlan]:
    """The world after the loss of a VM, and what the core asks then."""
    after = steps.branch()
    after.asked = None
    after.kill(next(iter(after.vms)))
    while after.asked is None:
        assert after.step(), "the planner is asked"
    return after, after.asked
