"""What follows when a generation breaks.

Deaths are counted by themselves. Members that cannot reach each other are left out for a while. Any other
break is of connections that work again at once: a proxy, a driver. No member is to blame, and the job would
change its plan every few seconds for ever; so each further break without a step brings a longer pause.
"""

from __future__ import annotations

from itertools import combinations

from ....protocol.messages import WorkerReport
from ..context import Context
from ..facts import EndReason
from ..silence import losses
from ..state import Generation, Incarnation, vm_of
from ..strikes.table import Kind, Progress

_EXACT_COVER = 12  # a smallest set is searched for among this many accused; beyond, a near-smallest will do


def count(context: Context, broken: Generation) -> str:
    """Count one more; returns what to add to the reason why the generation is closed."""
    strikes = context.strike(Kind.BREAK, by=broken.incarnations)
    pause_s = context.row(Kind.BREAK).pause_s(strikes.count)
    if not pause_s:
        return ""
    often = f"{strikes.count} times in a row at step {strikes.step}"
    return f" for no reason that is known, {often}: the next in {pause_s:g} s"


def rests(context: Context, usable: frozenset[Incarnation]) -> bool:
    """Whether the next generation is still waited with: while all are there with whom the last one broke.

    One that is gone, replaced or under notice may have been the cause, and then what it holds is to be saved.
    A stop that has something to save waits for nothing.
    """
    if not context.is_paused(Kind.BREAK):
        return False
    return context.strikes(Kind.BREAK).by <= usable and not context.must_save()


# ---- members that cannot reach each other ------------------------------------------------------------------


def leave_out_cut(context: Context, current: Generation, broken: list[WorkerReport]) -> bool:
    """Plan without a smallest set of members that explains who could not reach whom; whether there is one.

    For longer each time that the same two could not; at last the VM is replaced.
    """
    pairs = _lost_pairs(context, current, broken)
    cuts = {pair: context.strike(Kind.CUT, pair).count for pair in {frozenset(pair) for pair in pairs}}
    blamed = _blamed(current, pairs)
    for incarnation in blamed:
        times, other = max(
            (n, min(pair - {incarnation.worker})) for pair, n in cuts.items() if incarnation.worker in pair
        )
        vm = context.state.vms[vm_of(incarnation.worker)]
        if context.row(Kind.CUT).is_reached(times) and vm.live:
            context.end_vm(
                vm.vm, EndReason.CUT_OFF, f"{incarnation.worker} and {other} cannot reach each other"
            )
        else:
            context.leave_out([incarnation], context.row(Kind.CUT).pause_s(times))
    return bool(blamed)


def forget_cuts(context: Context, current: Generation) -> None:
    """Two members of a generation that has formed reach each other, or need not."""
    names = {worker for worker, _ in current.members}
    forgiven = [
        pair
        for pair in context.observations.strikes.all(Kind.CUT)
        if names.issuperset(pair) or not all(context.state.vms[vm_of(name)].live for name in pair)
    ]
    context.forgive(Progress.FORMED, forgiven)


def _lost_pairs(context: Context, current: Generation, broken: list[WorkerReport]) -> set[tuple[str, str]]:
    """Who lost whom, among the members."""
    members = dict(current.members)
    return {
        (w.worker, lost)
        for w in broken
        for lost in losses(context.state, context.observations, w)
        if lost in members and lost != w.worker
    }


def _blamed(current: Generation, pairs: set[tuple[str, str]]) -> list[Incarnation]:
    """A smallest set of members that explains who could not reach whom.

    Each report "a lost b" is explained by leaving out a or b. Of a generation that stepped the set must leave
    most: when one break has made everybody lose everybody, nothing can be learnt from it. The next generation
    tries all links while it forms, and then the reports are believed however few they leave.
    """
    members = dict(current.members)
    accusers = {worker for worker, _ in pairs}
    suspects = sorted({name for pair in pairs for name in pair}, key=lambda name: (name in accusers, name))
    blamed = _cover(pairs, suspects)
    if current.formed is not None and 2 * len(blamed) >= len(members):
        return []
    return [Incarnation(name, members[name]) for name in blamed]


def _cover(pairs: set[tuple[str, str]], suspects: list[str]) -> tuple[str, ...]:
    if len(suspects) <= _EXACT_COVER:
        for size in range(len(suspects) + 1):
            for chosen in combinations(suspects, size):
                if all(a in chosen or b in chosen for a, b in pairs):
                    return chosen
    cover: list[str] = []
    left = set(pairs)
    while left:
        counts = {name: sum(name in pair for pair in left) for name in suspects}
        worst = max(suspects, key=counts.__getitem__)
        cover.append(worst)
        left = {pair for pair in left if worst not in pair}
    return tuple(cover)
