"""On-demand VMs that stand in for spot VMs give way to them, once those are back."""

from __future__ import annotations

from typing import Any

from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Timing
from makara.manager.core.commands import ComputeGrowth, RequestVm
from makara.manager.core.events import AttemptFailed, GrowthComputed, OffersSeen
from makara.manager.core.facts import RefusalKind, VmYielded
from makara.manager.core.state import vm_of
from makara.manager.spec.placement import Market
from makara.protocol.messages import Phase, Profile, WorkerReport
from test_renting import ON_DEMAND, SPOT, offer, succeed

CLOUD: dict[str, Any] = {
    "provider": "aws",
    "instance_type": "small",
    "max_nodes": 2,
    "on_demand_nodes": 1,
    "on_demand_after": "2m",
}


def pass_time(script: Script, seconds: float, *, spot: bool = False) -> None:
    """The cloud has spot VMs, or refuses them; it always has others. More VMs always pay."""
    for _ in range(int(seconds / 5.0)):
        script.wait(5.0)
        if script.commands and isinstance(asked := script.commands[-1], ComputeGrowth):
            grown = GrowthComputed(
                now=script.now, key=asked.key, num_more=1, step_s=2.0, grown_s=1.0, pays=True
            )
            script.event(grown)
            script.wait(1.0)
        while opened := [vm for vm in script.state.live_vms if vm.attempted_at is not None and not vm.id]:
            attempt = opened[0].attempt
            assert attempt is not None
            if spot or attempt.placement.market is ON_DEMAND:
                succeed(script)
                join(script, attempt.vm)
            else:
                refused = AttemptFailed(
                    now=script.now,
                    vm=attempt.vm,
                    number=attempt.number,
                    kind=RefusalKind.NO_CAPACITY,
                    error="none there",
                )
                script.event(refused)
        if script.state.planned is None and script.observations.planning is not None:
            script.answer(1, len(script.observations.planning.incarnations))
        if script.state.planned is not None:
            switch(script)
        script.report()


def join(script: Script, vm: str) -> None:
    hashed = RECIPE.graph_hash if script.state.recipe is not None else None
    script.report(WorkerReport(worker=f"{vm}.0", incarnation=1, phase=Phase.IDLE, graph_hash=hashed))


def switch(script: Script) -> None:
    script.prepare()
    script.open()
    script.form()
    current = script.state.current
    assert current is not None
    used = {vm_of(worker) for worker, _ in current.incarnations}
    script.workers = {name: it for name, it in script.workers.items() if vm_of(name) in used}


def with_a_stand_in(**resources: Any) -> Script:
    """A job that trains on a spot VM and, as the cloud has no other, on an on-demand VM."""
    script = Script(timing=Timing(grow_again_s=600.0))
    script.submit(resources={**CLOUD, **resources})
    script.event(OffersSeen(now=script.now, offers=(offer(), offer(market=ON_DEMAND))))
    script.wait()
    succeed(script)
    first = script.last(RequestVm).vm
    join(script, first)
    script.report(
        script.change(f"{first}.0", profile=Profile(recipe=RECIPE, calibration=uniform(2).to_json())),
    )
    script.report(script.change(f"{first}.0", graph_hash=RECIPE.graph_hash))
    pass_time(script, 200.0)
    assert sorted(markets(script)) == [ON_DEMAND, SPOT]
    return script


def markets(script: Script) -> list[Market]:
    return [vm.attempt.placement.market for vm in script.state.live_vms if vm.attempt is not None]


def test_a_stand_in_gives_way_to_a_spot_vm_by_a_planned_change() -> None:
    script = with_a_stand_in()
    pass_time(script, 480.0, spot=True)
    assert not script.count(VmYielded)
    pass_time(script, 200.0, spot=True)
    assert script.count(VmYielded) == 1
    assert markets(script) == [SPOT, SPOT]
    current = script.state.current
    assert current is not None
    assert len(current.incarnations) == 2


def test_where_there_are_still_no_spot_vms_another_stands_in_at_once() -> None:
    script = with_a_stand_in()
    pass_time(script, 680.0)
    assert script.count(VmYielded) == 1
    assert sorted(markets(script)) == [ON_DEMAND, SPOT]
    pass_time(script, 620.0)
    assert script.count(VmYielded) == 2


def test_a_stand_in_that_the_job_needs_stays() -> None:
    script = with_a_stand_in(min_nodes=2)
    pass_time(script, 1500.0, spot=True)
    assert not script.count(VmYielded)
