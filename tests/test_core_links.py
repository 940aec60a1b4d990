"""Members that cannot reach each other while a generation forms: the smallest set is left out."""

from __future__ import annotations

import pytest
from core_script import Script
from makara.manager.commands import ComputePlan
from makara.worker.messages import Phase


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
