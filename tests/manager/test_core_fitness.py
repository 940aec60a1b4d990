"""`numerics: exact`: workers show that their kernels give the job's bits before a plan may use them."""

from __future__ import annotations

from typing import Any

import pytest
from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core.commands import ComputePlan
from makara.manager.core.events import VmTerminated
from makara.manager.core.facts import BitsFixed, EndReason, RecipeFixed, WorkerFailed
from makara.manager.core.fold import fold
from makara.manager.core.state import vm_of
from makara.protocol.messages import Phase, Profile, WorkerReport

EXACT = {"training": {"numerics": "exact"}}


def started(script: Script, *bits: str | None, **changes: dict[str, Any]) -> list[str]:
    """Submitted and profiled; each worker has traced the model and shows the hash given for it."""
    script.submit(**{"resources": {"max_nodes": len(bits)}, **EXACT, **changes})
    script.wait()
    workers = [f"{vm}.0" for vm in script.state.vms][: len(bits)]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    shown = [script.change(w, graph_hash="5ec7", bits_hash=own) for w, own in zip(workers, bits, strict=True)]
    script.report(*shown)
    return workers


def running_on_two(script: Script) -> tuple[str, str, str]:
    """Two workers with the same bits train; the third has not come yet."""
    first, second = started(script, "aa", "aa", resources={"max_nodes": 3})
    script.wait(5.0)
    script.answer(1, 2)
    script.prepare()
    script.open()
    script.form()
    return first, second, f"{list(script.state.vms)[2]}.0"


def asked(script: Script) -> list[str]:
    return [slot.worker for slot in script.last(ComputePlan).workers]


def test_the_jobs_bits_are_those_of_most_workers_at_the_first_plan_and_others_are_unfit() -> None:
    script = Script()
    first, second, third = started(script, "aa", "bb", "bb")
    assert script.last(BitsFixed).bits_hash == "bb"
    assert script.state.recipe is not None
    assert script.state.recipe.bits_hash == "bb"
    assert asked(script) == [second, third]
    script.wait(1.0)
    assert set(script.state.unfit) == {first}
    failure = script.last(WorkerFailed)
    assert (failure.worker, failure.kind) == (first, "recipe")
    assert "instruction_set" in failure.message


def test_of_as_many_workers_the_bits_of_the_first_are_the_jobs() -> None:
    script = Script()
    first, _ = started(script, "aa", "bb", resources={"max_nodes": 2, "min_nodes": 1})
    assert script.last(BitsFixed).bits_hash == "aa"
    assert asked(script) == [first]


def test_too_few_alike_workers_make_no_plan() -> None:
    script = Script()
    started(script, "aa", "bb", "bb", resources={"max_nodes": 3, "min_nodes": 3})
    script.wait(1.0)
    assert not script.count(ComputePlan)
    assert script.state.impossible is not None
    assert "1 workers cannot meet the recipe" in script.state.impossible


def test_a_newcomer_with_other_bits_takes_part_in_no_plan() -> None:
    script = Script()
    first, second, new = running_on_two(script)
    before = script.count(ComputePlan)
    script.report(
        WorkerReport(worker=new, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7", bits_hash="bb")
    )
    script.wait(10.0)
    assert script.count(ComputePlan) == before
    assert set(script.state.unfit) == {new}
    ended = script.state.vms[new.rpartition(".")[0]]
    assert ended.reason is EndReason.UNFIT, "and its VM is replaced"
    assert script.state.current is not None, "the others go on"
    assert [worker for worker, _ in script.state.current.incarnations] == [first, second]


def test_unfit_workers_of_vms_that_are_gone_are_not_told_of_once_the_fit_are_gone_too() -> None:
    script = Script()
    first, second, new = running_on_two(script)
    script.report(
        WorkerReport(worker=new, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7", bits_hash="bb")
    )
    script.wait(10.0)
    for worker in (first, second):
        script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
    assert set(script.state.unfit) == {new}
    script.wait(1.0)
    assert script.state.impossible == "fewer usable VMs than min_nodes (1)"


def test_a_worker_that_has_shown_nothing_yet_waits() -> None:
    script = Script()
    first, second, new = running_on_two(script)
    before = script.count(ComputePlan)
    script.report(WorkerReport(worker=new, incarnation=1, phase=Phase.IDLE, graph_hash="5ec7"))
    script.wait(10.0)
    assert (script.count(ComputePlan), dict(script.state.unfit)) == (before, {})
    script.report(script.change(new, bits_hash="aa"))
    script.wait(5.0)
    assert asked(script) == [first, second, new]


@pytest.mark.parametrize("bits", [("aa", None), (None, None)])
def test_with_trainers_of_an_older_version_nothing_is_compared(bits: tuple[str | None, ...]) -> None:
    script = Script()
    workers = started(script, *bits)
    assert not script.count(BitsFixed)
    assert asked(script) == workers


def test_with_fast_numerics_nothing_is_compared() -> None:
    script = Script()
    workers = started(script, "aa", "bb", training={"numerics": "fast"})
    assert not script.count(BitsFixed)
    assert asked(script) == workers


def test_a_journal_from_before_bits_were_shown_folds() -> None:
    old = RECIPE.model_dump(exclude={"bits_hash"})
    fact = RecipeFixed.model_validate({"at": 1.0, "recipe": old, "calibration": {}})
    state = fold([fact])
    assert state.recipe is not None
    assert state.recipe.bits_hash is None
    known = fold([fact, BitsFixed(at=2.0, bits_hash="aa", workers=("v0.0",))])
    assert known.recipe == RECIPE.model_copy(update={"bits_hash": "aa"})
