"""When members of a new generation do not wait for the end of the step that is under way.

They would: the generation before steps on until all can switch at a commit. That costs nothing while the step
is short. In a long one a VM under notice is gone before its end, or newcomers idle for most of it. Then the
step is interrupted, as a death would, but with nobody missing: what members hold of it is finished in the new
generation (docs/decisions/0381). What an interruption costs is the change itself, and filling the pipelines
once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....protocol.messages import KEEPS_STEPS, Phase
from .. import silence, worth
from ..context import Context
from ..facts import StepInterrupted
from ..state import Generation, vm_of
from .notices import deadline_of


def interrupt(context: Context) -> None:
    """Have the open generation formed at once, if waiting for the end of the step costs more."""
    current = context.state.current
    if current is None or current.formed is not None or context.isolated:
        return
    stepping = silence.stepping_generation(context.state)
    if stepping is None or not _all_step(context, stepping):
        return
    reason = _reason(context, stepping, current)
    if reason:
        context.note(closed_at=context.now)
        context.fact(
            StepInterrupted(at=context.now, number=current.number, superseded=stepping.number, reason=reason)
        )


def _all_step(context: Context, stepping: Generation) -> bool:
    """Whether all of its workers are known to be within its steps, and can be told to switch."""
    workers = stepping.incarnations
    if context.dead(workers) or context.unheard(workers) or context.awaited(vm_of(w) for w, _ in workers):
        return False
    reports = context.reports_of(workers)
    return len(reports) == len(workers) and all(
        report.phase is Phase.RUNNING
        and report.generation == stepping.number
        and report.trainer_protocol >= KEEPS_STEPS
        for report in reports
    )


def _reason(context: Context, stepping: Generation, current: Generation) -> str:
    """Why the step should not be waited for; empty if it should."""
    step_s = max(stepping.predicted_s or 0.0, context.observations.measured_s(stepping.number))
    left_s = _left_s(context, stepping, step_s)
    change_s = worth.change_s(context.state, context.timing)
    if left_s <= change_s:
        return ""
    going = {vm_of(worker) for worker, _ in context.noticed(stepping.incarnations)}
    for vm in sorted(going):
        deadline = deadline_of(context, context.state.vms[vm])
        if deadline is not None and change_s < deadline - context.now < left_s + change_s:
            return f"{vm} is gone in {deadline - context.now:.0f} s, and the step ends in {left_s:.0f} s"
    saved_s = left_s * _gain(context, stepping, current)
    if saved_s > change_s + _refill_s(context.state.hosts_plan, step_s):
        return f"the step ends in {left_s:.0f} s, {saved_s:.0f} s sooner under the new plan"
    return ""


def _left_s(context: Context, stepping: Generation, step_s: float) -> float:
    """Until the step under way ends; 0 if it should have ended by now."""
    assert stepping.formed is not None, "a generation that steps has formed"
    began_at = max(context.observations.stepped_at, stepping.formed_at or 0.0)
    found = stepping.formed.in_flight
    if found is not None and context.observations.newest_step <= stepping.formed.step:
        step_s *= found.missing / (found.kept + found.missing)  # the rest of one
    return max(0.0, step_s - max(0.0, context.now - began_at))


def _gain(context: Context, stepping: Generation, current: Generation) -> float:
    """The part of a step that the new plan saves; at most 0 if it saves nothing."""
    before_s = stepping.predicted_s or 0.0
    if context.state.paces_changed_at > stepping.planned_at:  # what was predicted holds no longer
        before_s = max(before_s, context.observations.measured_s(stepping.number))
    if current.predicted_s is None or not before_s:
        return 0.0
    return 1.0 - current.predicted_s / before_s


def _refill_s(plan: Mapping[str, Any], step_s: float) -> float:
    """What filling the pipelines of the plan that steps takes: as at the beginning of its step.

    Of plans that are no grids a mean pipeline is taken: it is an estimate, for a decision that may be wrong.
    """
    replicas = max(1, sum(start == 0 for start, _ in plan["ranges"]))
    depth = -(-len(plan["ranges"]) // replicas)
    micro_batches = -(-plan["num_micro_batches"] // replicas)
    return step_s * depth / (micro_batches + depth - 1)
