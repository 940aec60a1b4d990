"""The core: what should be done about a job, decided purely.

In: the state (what was decided before), the observations since this manager started, and one event, which
carries the time and any new ids. Out: facts to journal, commands for the effects, new observations.
The rules are level-triggered: each looks at what is, not at what just happened, and decides what is missing;
so a lost, late or repeated message, or a manager that died between any two instructions, changes nothing for
good. `decide` runs the rules in one fixed order, each seeing the facts of those before it.

Words. A VM is *unheard* when it sends no reports or its peers have lost it, and *silent* when nothing else
shows that it lives either (`silence`). A generation or a trainer that makes no *progress* for longer than its
bound is *stalled* (`stalls`). A trainer that is ended for that is *given up*; journals have always called
this kind of failure `stuck`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.messages import Report
from . import copies
from .context import Context, Decision
from .events import Batch, Event, ReportReceived
from .fold import apply, fold
from .observation import observe
from .observations import LastReport, Observations, Planning
from .pools import giving_up
from .rules import (
    answers,
    corruption,
    drift,
    ending,
    generations,
    growth,
    membership,
    notices,
    planning,
    profiling,
    renting,
    retention,
    spending,
    stalls,
    starting,
    surplus,
    switching,
    versions,
    waiting,
)
from .rules.waiting import can_go_on
from .set_aside import stop_set_aside
from .state import JobState
from .timing import Timing

__all__ = [
    "Decision",
    "Planning",
    "LastReport",
    "Timing",
    "Observations",
    "apply",
    "can_go_on",
    "decide",
    "fold",
    "stop_set_aside",
]

_RULES: tuple[Callable[[Context], None], ...] = (
    membership.join_vms,
    membership.record_failures,
    notices.record,
    membership.record_isolation,
    membership.end_lost_vms,
    membership.replace_unusable,
    retention.record_published,
    ending.finish,
    ending.give_up,
    waiting.ask_for_fit_vms,
    waiting.ask_about_lost_vms,
    profiling.fix_recipe,
    corruption.record,
    generations.close_failed,
    membership.record_miscounts,
    stalls.record_stacks,
    stalls.watch,
    versions.restart_older,
    versions.count_tries,
    generations.prepare,
    generations.form,
    copies.watch,
    switching.interrupt,
    drift.watch,
    drift.try_again,
    spending.keep_budget,
    ending.stop,
    waiting.release_vms,
    giving_up.give_up,
    giving_up.replace_stand_ins,
    planning.plan,
    retention.retire,
    retention.sweep,
    notices.release,
    surplus.release,
    membership.request_vms,
)

_DEFAULT = Timing()


def decide(state: JobState, observations: Observations, event: Event, timing: Timing = _DEFAULT) -> Decision:
    """What `event` brings about. Pure: the same arguments give the same decision.

    The new state is the fold of the decision's facts over `state`; it is handed over as `Decision.state`, so
    that it need not be computed twice.
    """
    known = observations
    observations = observe(state, observations, event, timing)
    context = Context(state, observations, event, timing)
    for part in event.events if isinstance(event, Batch) else (event,):
        if isinstance(part, ReportReceived):
            continue  # observed; the rules look at what is reported
        context.event = part
        for intake in (
            spending.take,
            waiting.go_on,
            ending.take,
            starting.take,
            waiting.take,
            renting.take,
            membership.take,
            notices.take,
            answers.take,
            growth.take,
            generations.take,
            retention.take,
        ):
            intake(context)
    context.event = event
    if context.state.spec is not None and _is_news(event, known):
        for rule in _RULES:
            if context.state.ended is not None:
                break
            rule(context)
    return context.decision()


def _is_news(event: Event, known: Observations) -> bool:
    """Mere heartbeats are none: rules that look at the clock or at progress run on ticks."""
    if isinstance(event, Batch):
        return any(_is_news(part, known) for part in event.events) or not event.events
    return not isinstance(event, ReportReceived) or not _says_nothing_new(event.report, known)


def _says_nothing_new(report: Report, known: Observations) -> bool:
    last_report = known.last_reports.get(report.vm)
    if last_report is None or last_report.closed_at is not None:
        return False
    before = last_report.report
    if report.sequence <= before.sequence:
        return True
    return all(getattr(report, name) == getattr(before, name) for name in _NEWS)


# Every report has another number; progress is watched by ticks, and metrics are no matter of the core.
_NEWS = tuple(Report.model_fields.keys() - {"sequence", "orders_version", "metrics", "progress"})
