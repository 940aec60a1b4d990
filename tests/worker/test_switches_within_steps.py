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
                self._lose(plan)
                self._start()
                workers, plan = self._form()
            else:
                workers, plan = self._switch(plan)
        self._go_on()
        return workers

    def _switch(self, plan: Plan) -> tuple[list[str], Plan]:
        chance, fleet, at = self._chance, self._run.fleet, self._stands
        self._go_on(f"{chance.randrange(1 + 2 * plan.num_micro_batches // len(plan.hosts(0)))} waits")
        fleet.wait_standing(at)
        self._start()
        workers, donors, plan = self._choose()
        fleet.prepare(plan, workers, donors)
        self._stand(workers)
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
