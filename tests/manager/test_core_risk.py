"""What the core tells the planner of deaths, from the job's own facts."""

from __future__ import annotations

import pytest
from core_script import Script
from makara.manager.core.commands import ComputePlan, DeathRisk
from makara.manager.core.events import VmTerminated
from makara.manager.core.state import vm_of


def asked(script: Script) -> DeathRisk:
    risk = script.last(ComputePlan).risk
    assert risk is not None
    return risk


def test_before_anything_is_known_a_loss_an_hour_of_two_vms_is_expected() -> None:
    script = Script()
    script.start(4)
    risk = asked(script)
    assert risk.losses_per_s == pytest.approx(1 / 3600, rel=0.2)
    assert risk.mean_size == 2.0
    assert risk.redo_steps == 5.5  # half of an interval of 10, and half a step
    assert risk.redo_s == pytest.approx(5.0, rel=0.2)  # the least that a change takes


def test_a_period_between_checkpoints_counts_in_seconds() -> None:
    script = Script()
    script.start(2, checkpoint={"uri": "file:///c", "interval": "10m"})
    assert asked(script).redo_steps == 0.5
    assert asked(script).redo_s == pytest.approx(305.0, rel=0.2)


def test_losses_are_counted_with_their_sizes() -> None:
    script = Script()
    workers = script.run(4)
    script.now += 60.0
    for worker in workers[:3]:
        del script.workers[worker]
        script.event(VmTerminated(now=script.now, vm=vm_of(worker)))
    script.wait(1.0)
    assert (script.state.losses.count, script.state.losses.num_vms) == (1, 3)
    risk = asked(script)
    assert risk.mean_size == pytest.approx((3 + 4) / (1 + 2), rel=0.2)
    assert risk.losses_per_s == pytest.approx(2 / 3660, rel=0.2)
