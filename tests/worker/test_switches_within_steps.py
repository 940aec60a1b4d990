"""Members leave a generation in the middle of a step for the next one, as on a notice or when others join.

What they have of the step goes on, the leavers' too, and the end is the reference's bit for bit. Among them
workers die. A failing seed reproduces the same history:
`MAKARA_SEED=<seed> pytest tests/worker/test_switches_within_steps.py`.
"""

from __future__ import annotations

from pathlib import Path

from makara.pipeline.plan import Plan
from makara.protocol.messages import Phase
from test_kept_steps import JOBS, LENGTHS, Deaths, Length, checked_history


class Switches(Deaths):
    """A job whose generations give way to others within steps, or lose a worker."""

    def play(self) -> list[str]:
        self._start()
        workers, plan = self._form()
        for _ in range(self._num_breaks + 1):
            if self._chance.random() < 0.3:
                self._lose(workers, plan)
                self._start()
                workers, plan = self._form()
            else:
                workers, plan = self._switch(workers, plan)
        return workers

    def _switch(self, stepping: list[str], plan: Plan) -> tuple[list[str], Plan]:
        chance, fleet = self._chance, self._run.fleet
        at = chance.choice(stepping)
        fleet.stop_within(at, chance.randrange(1 + 2 * plan.num_micro_batches // len(plan.hosts(0))))
        self._start()
        workers, donors, plan = self._choose()
        fleet.prepare(plan, workers, donors)
        members = [*workers, *donors]
        fleet.switch(self._generation, chance.sample(members, len(members)), self._run.published())
        fleet.go_on(at)
        self._await_formed(workers, donors, plan)
        assert not any(fleet.reports[worker].phase is Phase.BROKEN for worker in members)
        return workers, plan


@LENGTHS
@JOBS
def test_a_switch_within_a_step_loses_nothing_that_members_have(
    tmp_path: Path, model: str, numerics: str, histories: int, length: Length
) -> None:
    checked_history(Switches, tmp_path, model, numerics, histories, length)
