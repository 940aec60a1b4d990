"""Says how much the death of a VM costs under a plan: for `makara plan`, `makara apply` and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....morphing import Infeasible, Request, choose, copies_in
from ....pipeline import Plan

_ASKING = "resilience.tolerated_failures: 1"


def after_a_death(request: Request, plan: Plan, workers: Sequence[str], step_s: float) -> str:
    """A sentence: where a job goes on from after a VM dies, and how long that takes.

    Empty where deaths are not weighed. `workers`: in rank order; `step_s`: predicted of the plan. Where a
    section lives on one VM alone, it takes a sweep to say how fast a plan with copies would be.
    """
    risk = request.risk
    if risk is None:
        return ""
    vm_of = {slot.worker: slot.vm for slot in request.workers}
    hosts = [{vm_of[workers[rank]] for rank in plan.hosts(section)} for section in range(plan.num_sections)]
    used, alone = set[str]().union(*hosts), set[str]().union(*(vms for vms in hosts if len(vms) == 1))
    if not alone:
        # The others form again, and share what the dead VM had done of the step: half of its part on average.
        on_s = risk.form_s + step_s / 2 / len(used)
        return f"If a VM dies, the others go on from what they hold, after about {_rounded(on_s)}."
    if alone == used:
        dies = "a VM dies"
    elif len(alone) == 1:
        dies = "the VM dies that alone hosts a section"
    else:
        dies = f"one of the {len(alone)} VMs dies that alone host a section"
    cost = _rounded(risk.redo_s + risk.redo_steps * step_s)
    most = round(2 * risk.redo_steps - 1)
    steps = f", with up to {most} step{'s' if most > 1 else ''} done again" if most > 0 else ""
    return (
        f"If {dies}, the job returns to the newest checkpoint: about {cost} on average{steps}; "
        f"{_avoided(request, step_s)}."
    )


def _avoided(request: Request, step_s: float) -> str:
    """How fast the best plan is in which each section lives on two VMs."""
    if request.tolerated_failures:
        return "with enough VMs for resilience.tolerated_failures it does not"
    found = choose(replace(request, tolerated_failures=1))
    if isinstance(found, Infeasible) or copies_in(found, request.workers) < 2:
        return "no plan for these VMs and this job file avoids that"
    speed = round(100 * step_s / found.predicted_s)
    if speed > 100:  # the VMs have changed since the running plan was chosen
        return f"{_ASKING} avoids that and is faster, as {found.plan.shape}"
    return f"{_ASKING} avoids that at {speed} % of the speed, as {found.plan.shape}"


def _rounded(value_s: float) -> str:
    """An estimate in seconds, with two digits or all before the point."""
    return f"{value_s:.0f} s" if value_s >= 10 else f"{value_s:.1f} s"
