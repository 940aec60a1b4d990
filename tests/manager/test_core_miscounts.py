"""A step whose sums did not hold each contribution once is told of, once for each attempt."""

from __future__ import annotations

from core_script import Script
from makara.manager.core import fold
from makara.manager.core.facts import StepMiscounted
from makara.protocol.messages import Miscount


def _tells(script: Script, workers: list[str], step: int, attempt: int, generation: int = 1) -> None:
    miscount = Miscount(generation=generation, step=step, attempt=attempt)
    script.report(*(script.change(worker, miscount=miscount) for worker in workers))


def test_all_workers_tell_of_the_same_attempt_and_it_is_recorded_once() -> None:
    script = Script()
    workers = script.run(3)
    _tells(script, workers[:1], step=5, attempt=0)
    _tells(script, workers, step=5, attempt=0)
    script.wait(1.0)
    script.report()
    assert script.count(StepMiscounted) == 1
    told = script.last(StepMiscounted)
    assert (told.miscount.step, told.miscount.attempt, told.worker) == (5, 0, workers[0])
    assert script.state.running


def test_each_later_attempt_and_step_is_recorded_and_none_after_a_restart_again() -> None:
    script = Script()
    workers = script.run(2)
    for step, attempt in [(5, 0), (5, 1), (5, 0), (9, 0), (5, 1)]:
        _tells(script, workers, step, attempt)
    told = [fact.miscount for fact in script.facts if isinstance(fact, StepMiscounted)]
    assert [(one.step, one.attempt) for one in told] == [(5, 0), (5, 1), (9, 0)]
    assert fold(script.facts).newest_miscount == script.state.newest_miscount == (1, 9, 0)
    assert script.state.miscounts == 3
