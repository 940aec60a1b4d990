"""A hand-driven core whose VMs come from a cloud, beside a planner that tells how long steps would be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calibrations import uniform
from core_script import RECIPE, Script
from makara.manager.core import Decision, Timing
from makara.manager.core.commands import ComputeGrowth
from makara.manager.core.events import AttemptSucceeded, Event, GrowthComputed, OffersSeen, Tick, VmTerminated
from makara.manager.core.vms import VmStatus
from makara.manager.spec.placement import Market, Offer, Placement, Price
from makara.morphing.risk import used_part
from makara.protocol.messages import Phase, Profile, Profiling, WorkerReport

PLACE = Placement(provider="aws", market=Market.SPOT, region="r", zone="a", instance_type="small")
OFFER = Offer(placement=PLACE, price=Price(hourly=0.5, ceiling=1.0, at=0.0, source="a test"))
StepTimes = Callable[[int], float | None]


def shared(num_vms: int) -> float:
    """Seconds of a step whose work any number of VMs shares."""
    return 60.0 / num_vms


def all_alike(num_vms: int) -> float:
    """Seconds of a step that more VMs make no shorter."""
    return 60.0


@dataclass
class RentedScript(Script):
    """`step_s`: what the planner says of a step on so many VMs; None: it never answers."""

    step_s: StepTimes | None = all_alike

    def event(self, event: Event) -> Decision:
        decision = super().event(event)
        for command in decision.commands:
            if isinstance(command, ComputeGrowth) and self.step_s is not None:
                self.event(answer(command, self.step_s, self.now))
        return decision

    def join(self, *, ready: bool = True) -> None:
        """All that is asked for is made and joins."""
        for vm in self.state.live_vms:
            if vm.status is not VmStatus.REQUESTED:
                continue
            assert vm.attempt is not None
            self.event(AttemptSucceeded(now=self.now, vm=vm.vm, number=vm.attempt.number, id=f"i-{vm.vm}"))
            worker = WorkerReport(worker=f"{vm.vm}.0", incarnation=1, phase=Phase.IDLE, profiling=Profiling())
            self.workers[worker.worker] = worker.model_copy(update={"graph_hash": "5ec7" if ready else None})
        self.report()

    def pass_time(self, seconds: float) -> None:
        """Those that have joined go on reporting, and what runs steps."""
        for _ in range(int(seconds / 5.0)):
            self.wait(5.0)
            running = [it for it in self.workers.values() if it.phase is Phase.RUNNING]
            self.report(*(it.model_copy(update={"step": it.step + 1}) for it in running))

    def plan(self, depth: int, replicas: int) -> None:
        """What the planner answers runs."""
        self.wait(5.0)
        self.answer(depth, replicas)
        self.prepare()
        self.open()
        self.form()

    def lose(self, vm: str) -> None:
        """The cloud takes a VM."""
        self.workers.pop(f"{vm}.0", None)
        self.event(VmTerminated(now=self.now, vm=vm))


def answer(command: ComputeGrowth, step_s: StepTimes, now: float) -> GrowthComputed:
    """What the planner says where so many VMs take so long for a step, and deaths cost all plans the same."""
    num_vms = len({slot.vm for slot in command.workers})
    found = [
        GrowthComputed(
            now=now,
            key=command.key,
            num_more=n,
            step_s=step_s(num_vms),
            grown_s=step_s(num_vms + n),
            pays=_pays(command, step_s(num_vms), step_s(num_vms + n)),
        )
        for n in range(1, command.most + 1)
    ]
    return next((one for one in found if one.pays), found[-1])


def _pays(command: ComputeGrowth, now_s: float | None, grown_s: float | None) -> bool:
    if now_s is None or grown_s is None:
        return grown_s is not None
    losses_per_s = command.risk.losses_per_s if command.risk is not None else 0.0
    ends_s = math.inf if command.ends_s is None else command.ends_s
    used = used_part(command.change_s, losses_per_s, ends_s)
    return used * now_s / grown_s > 1.0 + command.least_gain * now_s / grown_s


def running(
    num_vms: int,
    depth: int = 2,
    replicas: int = 1,
    *,
    step_s: StepTimes | None = all_alike,
    timing: Timing | None = None,
    predicted_s: float | None = None,
    training: dict[str, Any] | None = None,
    **resources: Any,
) -> RentedScript:
    """A job on so many VMs of a cloud, or more with `max_nodes`, whose plan uses the first of them."""
    script = RentedScript(timing=timing or Timing(unused_s=100.0, grow_again_s=400.0), step_s=step_s)
    types = {"instance_type": "small"} if resources.get("provider", "aws") == "aws" else {}
    resources = {"provider": "aws", "max_nodes": num_vms, **types, **resources}
    script.submit(resources=resources, training={"steps": 10_000, **(training or {})})
    script.event(OffersSeen(now=script.now, offers=(OFFER,)))
    for names in (["first"], [f"u{n}" for n in range(1, num_vms)]):  # the first joins alone
        script.now += 1.0
        script.event(Tick(now=script.now, new_vms=tuple(names)))
        script.join(ready=False)
    workers = list(script.workers)
    script.report(script.change(workers[0], profile=Profile(recipe=RECIPE, calibration=uniform(2).to_json())))
    script.report(*(script.change(worker, graph_hash="5ec7") for worker in workers))
    script.now += 5.0
    script.event(Tick(now=script.now))
    script.answer(depth, replicas, predicted_s=predicted_s)
    script.prepare()
    script.open()
    script.form()
    return script
