"""The life of a generation: prepared, opened, formed, and closed when it cannot go on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from ....protocol.messages import Formed, Phase, Profiling, WorkerReport
from ..commands import OpenHead
from ..context import Context, incarnation_of
from ..events import HeadOpened
from ..facts import GenerationFormed, GenerationKind, GenerationOpened, GenerationPrepared
from ..state import Generation, Incarnation, JobState
from . import breaks, retention


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
    told = _told(context, planned, planned.members[0])
    return told.endpoint if told is not None else None


def late(context: Context, planned: Generation) -> list[Incarnation]:
    """The members that are not prepared yet."""
    told = {incarnation: _told(context, planned, incarnation) for incarnation in planned.members}
    return [
        incarnation for incarnation, where in told.items() if where is None or where.prepared < planned.number
    ]


def _told(context: Context, planned: Generation, member: Incarnation) -> WorkerReport | Profiling | None:
    """What the member says of generations of this kind."""
    report = context.report_of(member)
    return report.profiling if report is not None and planned.kind is GenerationKind.PROFILE else report


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
    slowest = _slowest(formed, context.state.possible(formed[0].step))
    retention.set_aside(context, current, slowest)
    context.fact(GenerationFormed(at=context.now, number=current.number, formed=slowest, lost_steps=lost))
    newest = context.state.possible(max(slowest.step, *(r.step for r in reports)))
    context.note(newest_step=newest, broken_since=None)
    breaks.forget_cuts(context, current)


def _journalled_step(state: JobState, current: Generation) -> int:
    """The newest step before `current` that the journal knows, of the history that the job is on."""
    last = next((g for g in reversed(state.history) if g.formed is not None), None)
    if last is None or last.formed is None:
        return 0
    published = (c.step for c in state.published if last.number <= c.generation < current.number)
    return max(last.formed.step, *published, 0)


def _slowest(formed: list[Formed], step: int) -> Formed:
    """Rank 0's account, at this step, with each phase as long as it took the slowest worker."""
    names = dict.fromkeys(name for f in formed for name in f.phases_s)
    phases = {name: max(f.phases_s.get(name, 0.0) for f in formed) for name in names}
    return formed[0].model_copy(update={"step": step, "phases_s": phases})


# ---- closing ----------------------------------------------------------------------------------------------


def _close_current(context: Context, current: Generation) -> None:
    lost = why_lost(context, current.members if current.formed is None else current.incarnations)
    if lost:
        close(context, lost, context.now)
        return
    reports = context.reports_of(current.incarnations)
    broken = [w for w in reports if w.phase is Phase.BROKEN and w.generation == current.number]
    if not broken:
        context.note(broken_since=None)
    elif context.observations.broken_since is None:
        context.note(broken_since=context.now)
    elif context.now - context.observations.broken_since >= context.timing.suspect_grace_s:
        since, where = context.observations.broken_since, _names(map(incarnation_of, broken))
        explained = breaks.leave_out_cut(context, current, broken)
        close(context, f"broken at {where}{'' if explained else breaks.count(context, current)}", since)
        return
    if context.isolated:
        return  # who is late cannot be told
    held = [worker for worker in reports if _holds_unasked(context, worker, current)]
    if held and context.state.planned is None:
        close(context, f"{_names(map(incarnation_of, held))} held without an order", context.now)


def why_lost(context: Context, needed: Sequence[Incarnation]) -> str:
    """Which of the members are gone; empty if none is."""
    dead = context.dead(needed)
    if dead:
        return f"lost {_names(dead)}"
    silent = context.silent(needed)
    return f"{_names(silent)} silent for {context.timing.vm_lease_s:g} s" if silent else ""


def idle_members(context: Context, current: Generation) -> list[Incarnation]:
    """Workers that have not even begun to form the generation."""
    reports = context.reports_of(current.incarnations)
    begun = {incarnation_of(report) for report in reports if report.generation == current.number}
    return [incarnation for incarnation in current.incarnations if incarnation not in begun]


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
        context.close_planned(reason)
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
    context.leave_out(missing)
    return f"{_names(missing)} not prepared in {context.timing.prepare_timeout_s:g} s"


def close(context: Context, reason: str, detected_at: float) -> None:
    """Close the open generation and the one being prepared, and have another planned."""
    context.close_generations(reason)
    cause = context.observations.cause or (reason, detected_at)
    context.note(planned_for=frozenset(), cause=cause, broken_since=None)


def _holds_unasked(context: Context, worker: WorkerReport, generation: Generation) -> bool:
    """Its agent had not seen or not understood this manager, and had it save."""
    ordered = context.state.hold or context.state.stop_ordered_at is not None
    return worker.phase is Phase.HELD and worker.generation == generation.number and not ordered


def _names(incarnations: Iterable[Incarnation]) -> str:
    return ", ".join(sorted(worker for worker, _ in incarnations))
