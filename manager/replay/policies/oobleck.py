"""Oobleck (§4, §5): pipelines of unequal depth from templates, re-formed by its rules.

At the start, and when workers come, the best pipelines that use all workers, at least f + 1 of them. When
workers die, their pipeline takes the template of the size that is left (reinstantiate); one that is too small
takes a worker of the largest pipeline (borrow), or joins the smallest (merge). Then the batch is dealt anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ....morphing import Choice, Infeasible, Request
from ....morphing.search_space import Options
from ....morphing.stages import Mode
from ....morphing.unequal import Combination, combinations, pool, shared
from ....morphing.unequal_search import played
from ....pipeline import Plan, components
from ...core.commands import ComputePlan
from ...core.events import PlanComputed
from ...core.state import JobState, vm_of
from ...service.planning.requests import request_of
from ..planner import CachedPlanner, answer_of, key_of
from .policy import Policy
from .varuna import fastest_grid

TOLERATED = 1  # f: failures at once, while there are workers enough
_TRIES = 3  # of the starts that the templates find best, those simulated


def regrouped(sizes: Sequence[int], least: int) -> tuple[int, ...]:
    """The pipelines' sizes, largest first, once each has at least `least` VMs or is the only one.

    `sizes`: what is left of each; borrow where another has more than `least`, else merge (§5.1).
    """
    groups = sorted((size for size in sizes if size > 0), reverse=True)
    while len(groups) > 1 and groups[-1] < least:
        if groups[0] > least:
            groups[0] -= 1
            groups[-1] += 1
        else:
            merged = groups.pop() + groups.pop()
            groups.append(merged)
        groups.sort(reverse=True)
    return tuple(groups)


def _answer(planner: CachedPlanner, state: JobState, command: ComputePlan, now: float) -> PlanComputed:
    sizes, per_vm = _left(state, command), _devices_per_vm(command)
    if per_vm is None:  # templates are for VMs that are alike
        return fastest_grid(planner, state, command, now)

    def compute() -> PlanComputed:
        found = _pipelines(request_of(state, command.workers, command.generation), sizes, per_vm)
        if isinstance(found, Infeasible):  # too few for a pipeline without optimizer offload
            return fastest_grid(planner, state, command, now)
        return answer_of(command, found, now)

    return planner.recalled(("oobleck", sizes, key_of(state, command)), state, command, now, compute)


def _left(state: JobState, command: ComputePlan) -> tuple[int, ...] | None:
    """The VMs that are left of each pipeline, largest first; None: there was none, or others have come."""
    if not state.hosts_plan or not command.asked <= {incarnation.worker for incarnation in state.hosts}:
        return None
    plan, ranks = Plan.from_json(state.hosts_plan), [worker for worker, _ in state.hosts]
    pipelines = [{ranks[worker] for worker in each.workers} for each in components(plan)]
    sizes = [len({vm_of(worker) for worker in each & command.asked}) for each in pipelines]
    return tuple(sorted(sizes, reverse=True))


def _devices_per_vm(command: ComputePlan) -> int | None:
    """None: not the same number on all."""
    sizes = set(Counter(slot.vm for slot in command.workers).values())
    return sizes.pop() if len(sizes) == 1 else None


def _pipelines(request: Request, sizes: Sequence[int] | None, per_vm: int) -> Choice | Infeasible:
    """The best of pipelines of these sizes, re-formed by the rules; None: of any."""
    options, best = Options(request, on_host=False), None
    for mode in options.modes(2):
        for combination in _combinations(options, mode, sizes, per_vm):
            found = played(options, combination, mode)
            if found is not None and (best is None or found.predicted_s < best.predicted_s):
                best = found
    return best or Infeasible("no template fits")


def _combinations(
    options: Options, mode: Mode, sizes: Sequence[int] | None, per_vm: int
) -> Sequence[Combination]:
    num, num_vms = options.request.num_micro_batches, len(options.request.workers) // per_vm
    choices = pool(options.table, num, num_vms, per_vm, options.capacity(), mode)
    if not choices:
        return []
    groups = None if sizes is None else regrouped(sizes, min(choices))
    if groups is None or any(size not in choices for size in groups):
        found = list(combinations(choices, num_vms, num, precision_ns=10**6))
        copies = [one for one in found if len(one.templates) > TOLERATED] or found
        return sorted(copies, key=lambda one: one.time_ns)[:_TRIES]
    return [shared([choices[size][0] for size in groups], num)]


OOBLECK = Policy(
    name="oobleck",
    about="unequal pipelines from templates, re-formed by reinstantiating, borrowing and merging",
    answer=_answer,
)
