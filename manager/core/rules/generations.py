"""The life of a generation: prepared, opened, formed, and closed when it cannot go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from types import MappingProxyType

from ....protocol.messages import Formed, Phase, WorkerReport
from ..commands import OpenHead
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
from ..state import Generation, JobState, Seat, vm_of
from ..turn import Turn
from . import breaks, retention

_EXACT_COVER = 12  # a smallest set is searched for among this many accused; beyond, a near-smallest will do


def take(turn: Turn) -> None:
    """The head was swapped: members may switch."""
    event = turn.event
    if not isinstance(event, HeadOpened) or turn.state.spec is None or turn.state.ended is not None:
        return
    retention.record(turn, event.checkpoints)
    planned = turn.state.planned
    if planned is None or planned.number != event.generation or planned.endpoint is None:
        return
    known = set(turn.state.published)
    checkpoints = tuple(c for c in event.checkpoints if c in known)
    turn.fact(
        GenerationOpened(
            at=turn.now, number=planned.number, endpoint=planned.endpoint, checkpoints=checkpoints
        )
    )


def close_failed(turn: Turn) -> None:
    """Close what has lost a member, or does not get ready in time."""
    state = turn.state
    if state.finished is not None:
        return
    if state.current is not None:
        _close_current(turn, state.current)
    if turn.state.planned is not None:
        _close_planned(turn, turn.state.planned)


def prepare(turn: Turn) -> None:
    """When every member is prepared and rank 0 listens, have the head swapped; without a head, open it."""
    profile, planned = turn.state.profile, turn.state.planned
    if profile is not None and profile.opened_at is None and (endpoint := _meeting_point(turn, profile)):
        turn.fact(
            GenerationOpened(
                at=turn.now, kind=profile.kind, number=profile.number, endpoint=endpoint, checkpoints=()
            )
        )
    if planned is not None and planned.prepared_at is None and (endpoint := _meeting_point(turn, planned)):
        turn.fact(GenerationPrepared(at=turn.now, number=planned.number, endpoint=endpoint))
        key = f"{turn.state.job}/head/{planned.number}"
        state = turn.state
        turn.command(
            OpenHead(
                key=key,
                generation=planned.number,
                opened=state.opened_generation,
                checkpoints=state.published,
                restart=state.restarting,
            )
        )


def _meeting_point(turn: Turn, planned: Generation) -> str | None:
    """Where rank 0 listens, once every member is prepared."""
    if turn.isolated or late(turn, planned):
        return None
    first = turn.report_of(planned.members[0])
    told = first.profiling if first is not None and planned.kind is GenerationKind.PROFILE else first
    return told.endpoint if told is not None else None


def late(turn: Turn, planned: Generation) -> list[Seat]:
    """The members that are not prepared yet."""
    profiles = planned.kind is GenerationKind.PROFILE
    reports = {seat: turn.report_of(seat) for seat in planned.members}
    told = {seat: report.profiling if report and profiles else report for seat, report in reports.items()}
    return [seat for seat, where in told.items() if where is None or where.prepared < planned.number]


def form(turn: Turn) -> None:
    """When every worker of the plan has formed the generation, it runs."""
    current = turn.state.current
    if current is None or current.formed is not None:
        return
    reports = [turn.report_of(seat) for seat in current.seats]
    formed = [r.formed for r in reports if r is not None and r.formed is not None]
    formed = [f for f in formed if f.generation == current.number]
    if len(formed) < len(current.seats):
        return
    if len({f.step for f in formed}) > 1:
        steps = sorted({f.step for f in formed})
        close(turn, f"its workers disagree about the step: {steps}", turn.now)
        return
    lost = max(0, max(turn.vitals.newest_step, _journalled_step(turn.state, current)) - formed[0].step)
    slowest = _slowest(formed)
    turn.fact(GenerationFormed(at=turn.now, number=current.number, formed=slowest, lost_steps=lost))
    newest_step = max(slowest.step, *(r.step for r in reports if r is not None))
    turn.vitals = replace(turn.vitals, newest_step=newest_step, broken_since=None)
    _without_cuts(turn, current)


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


def _close_current(turn: Turn, current: Generation) -> None:
    lost = why_lost(turn, current.members if current.formed is None else current.seats)
    if lost:
        close(turn, lost, turn.now)
        return
    reports = _reports(turn, current.seats)
    broken = [worker for worker in reports if _is_broken(worker, current)]
    if not broken:
        turn.vitals = replace(turn.vitals, broken_since=None) if turn.vitals.broken_since else turn.vitals
    elif turn.vitals.broken_since is None:
        turn.vitals = replace(turn.vitals, broken_since=turn.now)
    elif turn.now - turn.vitals.broken_since >= turn.timing.suspect_grace_s:
        since, where = turn.vitals.broken_since, _names((w.worker, w.incarnation) for w in broken)
        explained = _leave_out_cut(turn, current, broken)
        close(turn, f"broken at {where}{'' if explained else breaks.count(turn, current)}", since)
        return
    if turn.isolated:
        return  # who is late cannot be told
    held = [worker for worker in reports if _holds_unasked(turn, worker, current)]
    if held and turn.state.planned is None:
        close(turn, f"{_names((w.worker, w.incarnation) for w in held)} held without an order", turn.now)
        return


def why_lost(turn: Turn, needed: Sequence[Seat]) -> str:
    """Which of the members are gone; empty if none is."""
    dead = turn.dead(needed)
    if dead:
        return f"lost {_names(dead)}"
    silent = turn.silent(needed)
    return f"{_names(silent)} silent for {turn.timing.vm_lease_s:g} s" if silent else ""


def idle_members(turn: Turn, current: Generation) -> list[Seat]:
    """Workers that have not even begun to form the generation."""
    return [seat for seat in current.seats if not _tries(turn, seat, current)]


def forms_since(turn: Turn, current: Generation) -> float:
    """For how many seconds its workers have been free to form it.

    Until then, those of the generation before finish the step that is under way, however long steps are. None
    is where one of them has finished the last step.
    """
    before = turn.state.history[-1].seats if turn.state.history else ()
    if turn.dead(before) or turn.unheard(before):
        # A step with a dead worker in it comes to no end, and its last report says what was. One that is
        # unheard was perhaps not told to switch: its peers go on without a switch for as long as it votes.
        before = ()
    reports = [report for report in _reports(turn, before) if report.phase is not Phase.STARTING]
    stepping = any(r.phase is Phase.RUNNING and r.generation < current.number for r in reports)
    stepping &= not any(report.phase is Phase.FINISHED for report in reports)
    if stepping and all(report.generation < current.number for report in reports):
        turn.vitals = replace(turn.vitals, forming=None)
        return 0.0
    if turn.vitals.forming is None or turn.vitals.forming[0] != current.number:
        turn.vitals = replace(turn.vitals, forming=(current.number, turn.now))
        return 0.0
    return turn.now - turn.vitals.forming[1]


def _close_planned(turn: Turn, planned: Generation) -> None:
    reason = why_not_opened(turn, planned)
    if reason:
        turn.fact(GenerationClosed(at=turn.now, number=planned.number, reason=reason))
        cause = turn.vitals.cause or (reason, turn.now)
        turn.vitals = replace(turn.vitals, planned_for=frozenset(), cause=cause)


def why_not_opened(turn: Turn, planned: Generation) -> str:
    """Why a generation that is being prepared is given up; empty if it is not. Members that are too late for
    it are left out of the next ones."""
    dead = turn.dead(planned.members)
    if dead:
        return f"lost {_names(dead)} while it was prepared"
    if planned.prepared_at is not None:
        return ""
    unheard = turn.unheard(planned.members)
    if unheard:
        return f"{_names(unheard)} silent while it was prepared"
    noticed = turn.noticed(planned.seats)
    if noticed and not planned.saves_only:
        return f"notice for {_names(noticed)}"
    if turn.isolated or turn.elapsed_s(planned.planned_at) <= turn.timing.prepare_timeout_s:
        return ""
    missing = late(turn, planned)
    leave_out(turn, missing)
    return f"{_names(missing)} not prepared in {turn.timing.prepare_timeout_s:g} s"


def close(turn: Turn, reason: str, detected_at: float) -> None:
    """Close the open generation and the one being prepared, and have another planned."""
    turn.close_generations(reason)
    cause = turn.vitals.cause or (reason, detected_at)
    turn.vitals = replace(turn.vitals, planned_for=frozenset(), cause=cause, broken_since=None)


def leave_out(turn: Turn, seats: Iterable[Seat], for_s: float | None = None) -> None:
    """Plan without these for a while."""
    until = turn.now + (turn.timing.left_out_s if for_s is None else for_s)
    left_out = {seat: end for seat, end in turn.vitals.left_out.items() if end > turn.now}
    left_out.update({seat: until for seat in seats})
    turn.vitals = replace(turn.vitals, left_out=MappingProxyType(left_out))


def _reports(turn: Turn, seats: Iterable[Seat]) -> list[WorkerReport]:
    return [report for seat in seats if (report := turn.report_of(seat)) is not None]


def _is_broken(worker: WorkerReport, generation: Generation) -> bool:
    return worker.phase is Phase.BROKEN and worker.generation == generation.number


def _holds_unasked(turn: Turn, worker: WorkerReport, generation: Generation) -> bool:
    """Its agent had not seen or not understood this manager, and had it save."""
    ordered = turn.state.hold or turn.state.stop_ordered_at is not None
    return worker.phase is Phase.HELD and worker.generation == generation.number and not ordered


def _tries(turn: Turn, seat: Seat, generation: Generation) -> bool:
    """Whether the worker has at least begun to form the generation."""
    report = turn.report_of(seat)
    return report is not None and report.generation == generation.number


def _names(seats: Iterable[Seat]) -> str:
    return ", ".join(sorted(worker for worker, _ in seats))


def _leave_out_cut(turn: Turn, current: Generation, broken: list[WorkerReport]) -> bool:
    """Plan without a smallest set of members that explains who could not reach whom; whether there is one.

    For twice as long each time that the same two could not; at last the VM is replaced.
    """
    pairs = _lost_pairs(turn, current, broken)
    cuts = {pair: turn.vitals.cuts.get(pair, 0) + 1 for pair in map(frozenset, pairs)}
    turn.vitals = replace(turn.vitals, cuts=MappingProxyType({**turn.vitals.cuts, **cuts}))
    blamed = _blamed(current, pairs)
    for seat in blamed:
        times, other = max((n, min(pair - {seat[0]})) for pair, n in cuts.items() if seat[0] in pair)
        vm = turn.state.vms[vm_of(seat[0])]
        if times >= turn.timing.max_cuts and vm.live:
            turn.end_vm(vm.vm, EndReason.CUT_OFF, f"{seat[0]} and {other} cannot reach each other")
        else:
            leave_out(turn, [seat], turn.timing.left_out_s * 2 ** (times - 1))
    return bool(blamed)


def _lost_pairs(turn: Turn, current: Generation, broken: list[WorkerReport]) -> set[tuple[str, str]]:
    """Who lost whom, among the members."""
    members = dict(current.members)
    return {
        (w.worker, lost)
        for w in broken
        for lost in losses(turn.state, turn.vitals, w)
        if lost in members and lost != w.worker
    }


def _without_cuts(turn: Turn, current: Generation) -> None:
    """Two members of a generation that has formed reach each other, or need not."""
    names = {worker for worker, _ in current.members}
    cuts = {
        pair: times
        for pair, times in turn.vitals.cuts.items()
        if not pair <= names and all(turn.state.vms[vm_of(name)].live for name in pair)
    }
    if len(cuts) < len(turn.vitals.cuts):
        turn.vitals = replace(turn.vitals, cuts=MappingProxyType(cuts))


def _blamed(current: Generation, pairs: set[tuple[str, str]]) -> list[Seat]:
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
    return [(name, members[name]) for name in blamed]


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
