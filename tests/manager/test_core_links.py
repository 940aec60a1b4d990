"""Members that cannot reach each other while a generation forms: the smallest set is left out."""

from __future__ import annotations

import pytest
from core_script import Script
from makara.manager.core.commands import ComputePlan, ReleaseVm
from makara.manager.core.events import StopRequested, VmTerminated
from makara.manager.core.facts import EndReason, GenerationClosed, VmEnded
from makara.manager.core.strikes.table import TABLE, Kind
from makara.protocol.messages import Phase


def forming(num_vms: int) -> tuple[Script, list[str]]:
    """Generation 1 is open, and its members try their links."""
    script = Script()
    workers = script.start(num_vms)
    script.prepare()
    script.open()
    script.report(*(script.change(w, phase=Phase.FORMING, generation=1) for w in workers))
    return script, workers


def planned_with(script: Script, lost: dict[str, list[str]]) -> list[str]:
    """Those about whom the planner is asked after members have missed each other so."""
    script.report(*(script.change(w, phase=Phase.BROKEN, lost=whom) for w, whom in lost.items()))
    script.wait(2.0)
    assert script.state.current is None
    return [slot.worker for slot in script.last(ComputePlan).workers]


def test_of_two_that_cannot_reach_each_other_one_goes_on() -> None:
    script, (a, b) = forming(2)
    assert planned_with(script, {a: [b], b: [a]}) == [b]


def test_one_that_nobody_reaches_is_left_out() -> None:
    script, (a, b, c, d) = forming(4)
    assert planned_with(script, {a: [c], b: [c], c: [a, b, d], d: [c]}) == [a, b, d]


@pytest.mark.parametrize("num_vms", [2, 4])
def test_one_that_misses_all_others_is_believed(num_vms: int) -> None:
    script, workers = forming(num_vms)
    first, *others = workers
    lost = {first: others, **{worker: [first] for worker in others}}
    left = planned_with(script, lost)
    assert len(left) == max(1, num_vms - 1)


def test_members_that_reach_everybody_accuse_nobody() -> None:
    script, (a, b, c, d) = forming(4)
    left = planned_with(script, {a: [b], b: [a], c: [], d: []})
    assert left in ([a, c, d], [b, c, d])


def test_two_that_never_reach_each_other_cost_ever_less_and_one_is_replaced() -> None:
    """Found: 29 generations in ten minutes, for as long as the job ran."""
    row = TABLE[Kind.CUT]
    assert row.limit == 6
    script, (a, b, _) = forming(3)
    waits: list[float] = []
    for _ in range(row.limit - 1):
        script.report(*(script.change(w, phase=Phase.BROKEN, lost=[o]) for w, o in ((a, b), (b, a))))
        script.wait(2.0)
        waits.append(script.observations.left_out[a, 1] - script.now)
        assert not script.count(VmEnded)
        form_again(script, a, b)
    assert waits == [30.0 * 2**n for n in range(row.limit - 1)]
    script.report(*(script.change(w, phase=Phase.BROKEN, lost=[o]) for w, o in ((a, b), (b, a))))
    script.wait(2.0)
    ended = script.last(VmEnded)
    assert (ended.vm, ended.reason) == (a[:-2], EndReason.CUT_OFF)
    assert ended.detail == f"{a} and {b} cannot reach each other"
    assert script.last(ReleaseVm).vm == a[:-2]


def test_two_that_reach_each_other_again_begin_anew() -> None:
    script, (a, b) = forming(2)
    lost = [script.change(w, phase=Phase.BROKEN, lost=[o]) for w, o in ((a, b), (b, a))]
    script.report(*lost)
    script.wait(2.0)
    assert script.observations.strikes.count(Kind.CUT, frozenset((a, b))) == 1
    form_again(script, a, b)
    script.form()
    assert not script.observations.strikes.all(Kind.CUT)


def form_again(script: Script, a: str, b: str) -> None:
    """When `a` is no longer left out, the next generation has both, and its members try their links."""
    planned_from = (
        script.observations.left_out[a, 1] + script.timing.planning_timeout_s
    )  # no answer till then
    while script.now < planned_from + 5.0:
        script.wait(5.0)
        script.report(*(script.change(w, phase=Phase.IDLE, lost=[]) for w in (a, b)))
    script.answer(2, 1)
    script.prepare()
    script.open()
    current = script.state.current
    assert current is not None
    names = [worker for worker, _ in current.members]
    script.report(*(script.change(w, phase=Phase.FORMING, generation=current.number) for w in names))


def break_again(script: Script) -> None:
    """All members see the newest generation break and reach each other again; nobody died."""
    names = list(script.workers)
    script.report(*(script.change(w, phase=Phase.BROKEN, lost=[o for o in names if o != w]) for w in names))
    script.wait(2.0)
    assert script.state.current is None


def rest_s(script: Script) -> float:
    """For how long nobody is asked for another plan, in steps of a second; then the next generation runs."""
    asked, since = script.count(ComputePlan), script.now
    while script.count(ComputePlan) == asked:
        assert script.now - since < 1000.0
        script.wait(1.0)
        script.report(*(script.change(w, phase=Phase.IDLE, lost=[]) for w in script.workers))
    return script.now - since


def run_again(script: Script, step: int) -> None:
    script.answer(2, 1)
    script.prepare()
    script.open()
    script.form(step=step)


def test_generations_that_break_at_one_step_for_no_known_reason_follow_ever_later() -> None:
    """Found: a proxy that reset all connections made a new generation every few seconds, for ever."""
    script = Script()
    script.run(2)
    break_again(script)
    run_again(script, step=0)  # the first time at once
    rests: list[float] = []
    for _ in range(8):
        break_again(script)
        rests.append(rest_s(script))
        run_again(script, step=0)
    assert rests == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert "9 times in a row at step 0: the next in 300 s" in script.last(GenerationClosed).reason


def test_a_step_makes_up_for_generations_that_broke() -> None:
    script = Script()
    workers = script.run(2)
    break_again(script)
    run_again(script, step=0)
    script.report(*(script.change(w, step=1) for w in workers))
    break_again(script)
    assert script.count(ComputePlan) == 3
    run_again(script, step=1)


def test_a_stop_does_not_wait_for_generations_that_broke() -> None:
    script = Script()
    workers = script.run(2)
    script.report(*(script.change(w, step=4) for w in workers))
    break_again(script)
    run_again(script, step=4)
    script.event(StopRequested(now=script.now))
    break_again(script)
    assert script.count(ComputePlan) == 3


def test_a_rest_ends_when_who_may_have_been_the_cause_is_replaced() -> None:
    """Found: the replacement of a VM that broke every generation was waited with for 300 s."""
    script = Script()
    _, culprit = script.run(2)
    for _ in range(8):
        break_again(script)
        rest_s(script)
        run_again(script, step=0)
    break_again(script)
    asked = script.count(ComputePlan)
    script.event(VmTerminated(now=script.now, vm=culprit[:-2]))
    del script.workers[culprit]
    script.wait(1.0)
    script.report()
    assert script.count(ComputePlan) == asked + 1
