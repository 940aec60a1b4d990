"""The fold: facts in, state out, and nothing else."""

from __future__ import annotations

import random

from core_script import Script, plan_json
from faulty_world import FaultyWorld
from makara.manager.core.facts import (
    EndReason,
    GenerationClosed,
    GenerationFormed,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    VmEnded,
    VmJoined,
    VmNoticed,
    WorkerFailed,
)
from makara.manager.core.fold import apply, fold
from makara.manager.core.state import JobState, Status
from makara.manager.core.strikes.table import Kind
from makara.manager.core.vms import VmStatus
from makara.manager.service.planning.requests import holding
from makara.pipeline import Range
from makara.protocol.messages import CheckpointRef, Formed


def planned(number: int, *workers: str) -> GenerationPlanned:
    return GenerationPlanned(
        at=1.0,
        number=number,
        cause="start",
        plan=plan_json(1, 1),
        members=tuple((worker, 1) for worker in workers),
        predicted_s=None,
        detected_at=1.0,
        decided_s=0.0,
    )


def opened(number: int) -> GenerationOpened:
    return GenerationOpened(
        at=2.0, number=number, endpoint="h:1", checkpoints=(CheckpointRef(step=5, generation=0),)
    )


def test_facts_about_unknown_things_only_count() -> None:
    formed = Formed(generation=7, step=0, rung="start", phases_s={})
    facts = [
        VmJoined(at=1.0, vm="v9", address="h", devices=()),
        VmNoticed(at=1.0, vm="v9", deadline=2.0),
        VmEnded(at=1.0, vm="v9", reason=EndReason.LEFT),
        GenerationPrepared(at=1.0, number=7, endpoint="h:1"),
        opened(7),
        GenerationFormed(at=1.0, number=7, formed=formed, lost_steps=0),
        GenerationClosed(at=1.0, number=7, reason="no such thing"),
    ]
    state = fold(facts)
    assert state.num_facts == len(facts)
    assert (state.vms, state.planned, state.current, state.history) == ({}, None, None, ())


def test_a_generation_given_up_before_it_opened_wakes_nobody_of_the_one_that_runs() -> None:
    state = fold(
        [planned(1, "v0.0"), opened(1), planned(2, "v0.0"), GenerationClosed(at=3.0, number=2, reason="late")]
    )
    assert state.current is not None
    assert (state.current.number, state.planned, state.abandoned) == (1, None, 0)
    state = apply(state, GenerationClosed(at=4.0, number=1, reason="death"))
    assert (state.current, state.abandoned) == (None, 1)


def test_with_nothing_running_a_generation_given_up_is_abandoned() -> None:
    state = fold([planned(1, "v0.0"), GenerationClosed(at=3.0, number=1, reason="late")])
    assert state.abandoned == 1
    assert state.last_generation == 1


def test_what_workers_hold_is_known_after_a_death_until_another_generation_forms() -> None:
    at_step = Formed(generation=1, step=0, rung="start", phases_s={})
    facts = [planned(1, "v0.0"), opened(1)]
    assert holding(fold(facts)) == {}
    facts.append(GenerationFormed(at=3.0, number=1, formed=at_step, lost_steps=0))
    facts.append(GenerationClosed(at=4.0, number=1, reason="lost v1.0"))
    assert holding(fold(facts)) == {"v0.0": Range(0, 2)}
    facts += [planned(2, "v2.0"), opened(2)]
    assert holding(fold(facts)) == {"v0.0": Range(0, 2)}
    failed = WorkerFailed(at=5.0, worker="v0.0", incarnation=1, kind="killed", message="", step=0)
    assert holding(apply(fold(facts), failed)) == {}
    again = Formed(generation=2, step=0, rung="store", phases_s={})
    facts.append(GenerationFormed(at=6.0, number=2, formed=again, lost_steps=0))
    assert holding(fold(facts)) == {"v2.0": Range(0, 2)}


def test_a_generation_that_opens_supersedes_the_one_before() -> None:
    state = fold([planned(1, "v0.0"), opened(1), planned(2, "v0.0", "v1.0"), opened(2)])
    assert state.current is not None
    assert state.current.number == 2
    assert state.current.incarnations == (("v0.0", 1),)
    assert [(g.number, g.end_reason, g.plan) for g in state.history] == [(1, "superseded by 2", {})]
    assert state.abandoned == 0
    assert state.base == CheckpointRef(step=5, generation=0)


def test_errors_at_one_time_are_one_round_and_progress_forgives_ours() -> None:
    def failed(
        worker: str, at: float, incarnation: int = 1, kind: str = "internal", step: int = 0
    ) -> WorkerFailed:
        return WorkerFailed(at=at, worker=worker, incarnation=incarnation, kind=kind, message="m", step=step)

    together = fold([failed("v0.0", 1.0), failed("v1.0", 2.0)])
    assert together.strikes.count(Kind.INTERNAL_ERROR) == 1
    again = apply(together, failed("v0.0", 3.0, incarnation=2))
    assert again.strikes.count(Kind.INTERNAL_ERROR) == 2
    later = apply(together, failed("v2.0", 60.0))
    assert later.strikes.count(Kind.INTERNAL_ERROR) == 2
    between = fold([failed("v0.0", 1.0), planned(2, "v0.0", "v1.0"), failed("v1.0", 2.0)])
    assert between.strikes.count(Kind.INTERNAL_ERROR) == 1
    opened_between = fold([failed("v0.0", 1.0), planned(2, "v1.0"), opened(2), failed("v1.0", 2.0)])
    assert opened_between.strikes.count(Kind.INTERNAL_ERROR) == 2
    forgiven = apply(later, failed("v0.0", 90.0, incarnation=3, step=4))
    assert forgiven.strikes.count(Kind.INTERNAL_ERROR) == 1
    assert fold([failed("v0.0", 1.0, kind="killed")]).strikes.count(Kind.INTERNAL_ERROR) == 0
    assert fold([failed("v0.0", 1.0, kind="recipe")]).unfit.keys() == {"v0.0"}


def test_status_follows_the_job() -> None:
    script = Script()
    assert script.state.status is Status.PENDING
    workers = script.run(2)
    assert script.state.status is Status.RUNNING
    assert {vm.status for vm in script.state.live_vms} == {VmStatus.JOINED}
    fresh = script.change(workers[1], incarnation=2)
    script.report(fresh)
    script.answer(2, 1)
    assert script.state.status is Status.MORPHING


def test_folding_in_two_parts_is_folding_at_once() -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    world = FaultyWorld(seed)
    world.run()
    cut = world.random.randrange(len(world.facts))
    state: JobState = fold(world.facts[:cut])
    for fact in world.facts[cut:]:
        state = apply(state, fact)
    assert state == fold(world.facts) == world.state
