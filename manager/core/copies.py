"""On how many VMs each section lives, where the job asks for several (`resilience.tolerated_failures`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...morphing import copies_of, least_vms
from ...pipeline.plan import Plan
from ...simulator import Calibration
from . import worth
from .context import Context
from .facts import CopiesChanged
from .slots import memory_bytes
from .state import staying_vms, vm_of


def watch(context: Context) -> None:
    """Say so where a section lives on fewer VMs than were asked for, or on enough again."""
    state, wanted = context.state, wanted_copies(context)
    current = state.current
    if wanted == 1 or current is None or current.formed is None:
        return
    if context.observations.copies_seen == current.number:
        return
    context.note(copies_seen=current.number)
    copies = num_copies(context, current.plan, [worker for worker, _ in current.incarnations])
    if copies != (state.few_copies or wanted):
        vms = len({vm_of(worker) for worker, _ in current.incarnations})
        context.fact(
            CopiesChanged(
                at=context.now,
                generation=current.number,
                copies=copies,
                wanted=wanted,
                num_vms=vms,
                enough_vms=_enough_vms(context) if copies < wanted else None,
            )
        )


def wanted_copies(context: Context) -> int:
    return context.spec.resilience.tolerated_failures + 1


def _enough_vms(context: Context) -> int | None:
    """With how many VMs, each of whose workers has what the one with least memory has, there are as many
    copies as are wanted; None: with no number."""
    state, spec = context.state, context.spec
    if state.calibration is None:
        return None
    calibration = Calibration.from_json(state.calibration)
    per_vm, depth = spec.resources.workers_per_node, spec.parallelism.pipeline_parallel_degree or 1
    joined = [vm for vm in state.live_vms if vm.joined]
    least = least_vms(
        calibration,
        min(memory_bytes(state, vm, index) for vm in joined for index in range(per_vm)),
        per_vm,
        recompute=spec.parallelism.recompute != "off",
        on_host=calibration.device_kind != "cpu" and spec.offload != "off",
    )
    return None if least is None else wanted_copies(context) * max(least, -(-depth // per_vm))


def num_copies(context: Context, plan: Mapping[str, Any], workers: Sequence[str]) -> int:
    """On how many VMs each section of a plan lives, of those that are wanted; `workers`: in rank order."""
    return min(wanted_copies(context), copies_of(Plan.from_json(plan), [vm_of(worker) for worker in workers]))


def gains_copies(context: Context, plan: Mapping[str, Any], workers: Sequence[str]) -> bool:
    """Whether sections would live on more of the VMs that are wanted than under the plan that runs."""
    current = context.state.current
    if wanted_copies(context) == 1 or current is None:
        return False
    now = num_copies(context, current.plan, [worker for worker, _ in current.incarnations])
    return num_copies(context, plan, workers) > now


def fewer_for_s(context: Context) -> float:
    """For how long a rerouted plan may have fewer copies than could be had: until VMs join that a plan has to
    take in in any case, and no longer than `Timing.fewer_copies_s`."""
    if len(staying_vms(context.state)) >= context.spec.resources.max_nodes:
        return 0.0
    return min(worth.join_s(context.state), context.timing.fewer_copies_s)
