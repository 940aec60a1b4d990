"""The life of a generation: prepared, opened, formed, and closed when it cannot go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import combinations
from types import MappingProxyType

from ....protocol.messages import Formed, Phase, WorkerReport
from ..commands import OpenHead
from ..context import Context, incarnation_of
from ..events import HeadOpened
from ..facts import (
    EndReason,
    GenerationClosed,
    GenerationFormed,
    GenerationKind,
    GenerationOpened,
    GenerationPrepared,
)
from ..silence import losses
from ..state import Generation, Incarnation, JobState, vm_of
from . import breaks, retention

_EXACT_COVER = 12  # a smallest set is searched for among this many accused; beyond, a near-smallest will do


def take(context: Context) -> None:
    """The head was swapped: members may switch."""
    event = context.event
    if not isinstance(event, HeadOpened) or context.state.spec is None or context.state.ended is not None:
        return
    retention.record(context, event.checkpoints)
    planned = context.state.planned
    if planned is None or planned.number != event.generation or planned.endpoint is None:
        return
    known = set(context.state.published)
    checkpoints = tuple(c for c in event.checkpoints if c in known)
    context.fact(
        GenerationOpened(
            at=context.now, number=planned.number, endpoint=planned.endpoint, checkpoints=checkpoints
        )
    )


def close_failed(context: Context) -> None:
    """Close what has lost a member, or does not get ready in time."""
    state = context.state
    if state.finished is not None:
        return
    if state.current is not None:
        _close_current(context, state.current)
    if context.state.planned is not None:
        _close_planned(context, context.state.planned)


def prepare(context: Context) -> None:
    """When every member is prepared and rank 0 listens, have the head swapped; without a head, open it."""
    profile, planned = context.state.profile, context.state.planned
    if profile is not None and profile.opened_at is None and (endpoint := _meeting_point(context, profile)):
        context.fact(
            GenerationOpened(
                at=context.now, kind=profile.kind, number=profile.number, endpoint=endpoint, checkpoints=()
            )
        )
    if planned is not None and planned.prepared_at is None and (endpoint := _meeting_point(context, planned)):
        tried = context.state.head_generation
        context.fact(GenerationPrepared(at=context.now, number=planned.number, endpoint=endpoint))
        key = f"{context.state.job}/head/{planned.number}"
        state = context.state
        context.command(
            OpenHead(
                key=key,
                generation=planned.number,
                opener=_opener(endpoint, context.now),
                tried=tried,
                opened=state.opened_generation,
                checkpoints=state.published,
                restart=state.restarting,
            )
        )


def _opener(endpoint: str, now: float) -> int:
    """The number, from 1 to 2^31 - 1, by which a manager knows a head again that it has opened.

    Another with a copy of its journal does not prepare the same generation at the same instant and endpoint.
    """
    digest = hashlib.sha256(f"{endpoint} {now!r}".encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (2**31 - 1)


def _meeting_point(context: Context, planned: Generation) -> str | None:
    """Where rank 0 listens, once every member is prepared."""
    if context.isolated or late(context, planned):
        return None
    first = context.report_of(planned.members[0])
    told = first.profiling if first is not None and planned.kind is GenerationKind.PROFILE else first
    return told.endpoint if told is not None else None


def late(context: Context, planned: Generation) -> list[Incarnation]:
    """The members that are not prepared yet."""
    profiles = planned.kind is GenerationKind.PROFILE
    reports = {incarnation: context.report_of(incarnation) for incarnation in planned.members}
    told = {
        incarnation: report.profiling if report and profiles else report
        for incarnation, report in reports.items()
    }
    return [
        incarnation for incarnation, where in told.items() if where is None or where.prepared < planned.number
    ]


def form(context: Context) -> None:
    """When every worker of the plan has formed the generation, it runs."""
    current = context.state.current
    if current is None or current.formed is not None:
        return
    reports = context.reports_of(current.incarnations)
    formed = [r.formed for r in reports if r.formed is not None and r.formed.generation == current.number]
    if len(formed) < len(current.incarnations):
        return
    if len({f.step for f in formed}) > 1:
        steps = sorted({f.step for f in formed})
        close(context, f"its workers disagree about the step: {steps}", context.now)
        return
    lost = max(
        0, max(context.observations.newest_step, _journalled_step(context.state, current)) - formed[0].step
    )
    slowest = _slowest(formed)
    context.fact(GenerationFormed(at=context.now, number=current.number, formed=slowest, lost_steps=lost))
    context.note(newest_step=max(slowest.step, *(r.step for r in reports)), broken_since=None)
    _without_cuts(context, current)


def _journalled_step(state: JobState, current: Generation) -> int:
    """The newest step before `current` that the journal knows, of the history that the job is on."""
    last = next((g for g in reversed(state.history) if g.formed is not None), None)
    if last is None or last.formed is None:
        return 0
    published = (c.step for c in state.published if last.number <= c.generation < current.number)
    return max(last.formed.step, *published, 0)


def _slowest(formed: list[Formed]) -> Formed:
    """Rank 0's account, with each phase as long as it took the slowest worker."""
    names = dict.fromkeys(name for f in formed for name in f.phases_s)
    phases = {name: max(f.phases_s.get(name, 0.0) for f in formed) for name in names}
    return formed[0].model_copy(update={"phases_s": phases})


# ---- closing ----------------------------------------------------------------------------------------------


def _close_current(context: Context, current: Generation) -> None:
    lost = why_lost(context, current.members if current.formed is None else current.incarnations)
    if lost:
        close(context, lost, context.now)
        return
    reports = context.reports_of(current.incarnations)
    broken = [worker for worker in reports if _is_broken(worker, current)]
    if not broken:
        context.note(broken_since=None)
    elif context.observations.broken_since is None:
        context.note(broken_since=context.now)
    elif context.now - context.observations.broken_since >= context.timing.suspect_grace_s:
        since, where = context.observations.broken_since, _names(map(incarnation_of, broken))
        explained = _leave_out_cut(context, current, broken)
        close(context, f"broken at {where}{'' if explained else breaks.count(context, current)}", since)
        return
    if context.isolated:
        return  # who is late cannot be told
    held = [worker for worker in reports if _holds_unasked(context, worker, current)]
    if held and context.state.planned is None:
        close(context, f"{_names(map(incarnation_of, held))} held without an order", context.now)
        return


def why_lost(context: Context, needed: Sequence[Incarnation]) -> str:
    """Which of the members are gone; empty if none is."""
    dead = context.dead(needed)
    if dead:
        return f"lost {_names(dead)}"
    silent = context.silent(needed)
    return f"{_names(silent)} silent for {context.timing.vm_lease_s:g} s" if silent else ""


def idle_members(context: Context, current: Generation) -> list[Incarnation]:
    """Workers that have not even begun to form the generation."""
    return [incarnation for incarnation in current.incarnations if not _tries(context, incarnation, current)]


def forms_since(context: Context, current: Generation) -> float:
    """For how many seconds its workers have been free to form it.

    Until then, those of the generation before finish the step that is under way, however long steps are. None
    is where one of them has finished the last step.
    """
    before = context.state.history[-1].incarnations if context.state.history else ()
    if context.dead(before) or context.unheard(before):
        # A step with a dead worker in it comes to no end, and its last report says what was. One that is
        # unheard was perhaps not told to switch: its peers go on without a switch for as long as it votes.
        before = ()
    reports = [report for report in context.reports_of(before) if report.phase is not Phase.STARTING]
    stepping = any(r.phase is Phase.RUNNING and r.generation < current.number for r in reports)
    stepping &= not any(report.phase is Phase.FINISHED for report in reports)
    if stepping and all(report.generation < current.number for report in reports):
        context.note(forming=None)
        return 0.0
    if context.observations.forming is None or context.observations.forming[0] != current.number:
        context.note(forming=(current.number, context.now))
        return 0.0
    return context.now - context.observations.forming[1]


def _close_planned(context: Context, planned: Generation) -> None:
    reason = why_not_opened(context, planned)
    if reason:
        context.fact(GenerationClosed(at=context.now, number=planned.number, reason=reason))
        cause = context.observations.cause or (reason, context.now)
        context.note(planned_for=frozenset(), cause=cause)


def why_not_opened(context: Context, planned: Generation) -> str:
    """Why a generation that is being prepared is given up; empty if it is not. Members that are too late for
    it are left out of the next ones."""
    dead = context.dead(planned.members)
    if dead:
        return f"lost {_names(dead)} while it was prepared"
    if planned.prepared_at is not None:
        return ""
    unheard = context.unheard(planned.members)
    if unheard:
        return f"{_names(unheard)} silent while it was prepared"
    noticed = context.noticed(planned.incarnations)
    if noticed and not planned.saves_only:
        return f"notice for {_names(noticed)}"
    if context.isolated or context.elapsed_s(planned.planned_at) <= context.timing.prepare_timeout_s:
        return ""
    missing = late(context, planned)
    leave_out(context, missing)
    return f"{_names(missing)} not prepared in {context.timing.prepare_timeout_s:g} s"


def close(context: Context, reason: str, detected_at: float) -> None:
    """Close the open generation and the one being prepared, and have another planned."""
    context.close_generations(reason)
    cause = context.observations.cause or (reason, detected_at)
    context.note(planned_for=frozenset(), cause=cause, broken_since=None)


def leave_out(context: Context, incarnations: Iterable[Incarnation], for_s: float | None = None) -> None:
    """Plan without these for a while."""
    until = context.now + (context.timing.left_out_s if for_s is None else for_s)
    left_out = {
        incarnation: end for incarnation, end in context.observations.left_out.items() if end > context.now
    }
    left_out.update({incarnation: until for incarnation in incarnations})
    context.note(left_out=MappingProxyType(left_out))


def _is_broken(worker: WorkerReport, generation: Generation) -> bool:
    return worker.phase is Phase.BROKEN and worker.generation == generation.number


def _holds_unasked(context: Context, worker: WorkerReport, generation: Generation) -> bool:
    """Its agent had not seen or not understood this manager, and had it save."""
    ordered = context.state.hold or context.state.stop_ordered_at is not None
    return worker.phase is Phase.HELD and worker.generation == generation.number and not ordered


def _tries(context: Context, incarnation: Incarnation, generation: Generation) -> bool:
    """Whether the worker has at least begun to form the generation."""
    report = context.report_of(incarnation)
    return report is not None and report.generation == generation.number


def _names(incarnations: Iterable[Incarnation]) -> str:
    return ", ".join(sorted(worker for worker, _ in incarnations))


def _leave_out_cut(context: Context, current: Generation, broken: list[WorkerReport]) -> bool:
    """Plan without a smallest set of members that explains who could not reach whom; whether there is one.

    For twice as long each time that the same two could not; at last the VM is replaced.
    """
    pairs = _lost_pairs(context, current, broken)
    cuts = {pair: context.observations.cuts.get(pair, 0) + 1 for pair in map(frozenset, pairs)}
    context.note(cuts=MappingProxyType({**context.observations.cuts, **cuts}))
    blamed = _blamed(current, pairs)
    for incarnation in blamed:
        times, other = max(
            (n, min(pair - {incarnation.worker})) for pair, n in cuts.items() if incarnation.worker in pair
        )
        vm = context.state.vms[vm_of(incarnation.worker)]
        if times >= context.timing.max_cuts and vm.live:
            context.end_vm(
                vm.vm, EndReason.CUT_OFF, f"{incarnation.worker} and {other} cannot reach each other"
            )
        else:
            leave_out(context, [incarnation], context.timing.left_out_s * 2 ** (times - 1))
    return bool(blamed)


def _lost_pairs(context: Context, current: Generation, broken: list[WorkerReport]) -> set[tuple[str, str]]:
    """Who lost whom, among the members."""
    members = dict(current.members)
    return {
        (w.worker, lost)
        for w in broken
        for lost in losses(context.state, context.observations, w)
        if lost in members and lost != w.worker
    }


def _without_cuts(context: Context, current: Generation) -> None:
    """Two members of a generation that has formed reach each other, or need not."""
    names = {worker for worker, _ in current.members}
    cuts = {
        pair: times
        for pair, times in context.observations.cuts.items()
        if not pair <= names and all(context.state.vms[vm_of(name)].live for name in pair)
    }
    context.note(cuts=MappingProxyType(cuts))


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
