"""The recipe: a model is surveyed by one worker, measured by all that are there, once for a job.

The first worker reports either what an earlier job left in the store, or a survey. What the survey leaves is
dealt out in shares; the share of a worker that dies goes to another. Then workers measure their links
together. Each part is a fact, so a new manager goes on where the last one was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....morphing import too_deep
from ....protocol.messages import Phase, Profile, WorkerReport
from ....simulator import AllReduce, InvalidCalibration, Wire
from ....simulator.calibration.assembly import left, measurements_of, profile_of, shares
from ..commands import StoreCalibration
from ..facts import (
    JobEnded,
    ProbeDealt,
    ProbeEnded,
    ProbeOpened,
    ProfilerChosen,
    RecipeFixed,
    SectionsMeasured,
    ShareDealt,
    Surveyed,
)
from ..state import JobState, Measuring, Probe, Seat, VmStatus, vm_of
from ..turn import Turn, has_ended, seat_of
from . import ending, starting

_MOST_MEMBERS = 8  # of a probe
_MOST_OF_A_VM = 4
_MOST_PROBES = 2  # a second one after a death; then links are assumed


def fix_recipe(turn: Turn) -> None:
    """Take the recipe that a profiler found, else see that somebody is at it."""
    state = turn.state
    if not state.active:
        return
    if state.recipe is None and state.measuring is None and not _found(turn):
        if state.profiler is None or turn.is_away(state.profiler):
            _choose(turn)
        return
    if _is_too_shallow(turn):
        return
    if turn.state.recipe is None and turn.state.measuring is not None:
        _take_rows(turn, turn.state.measuring)
        _measure(turn, turn.state.measuring)


def _found(turn: Turn) -> bool:
    """Whether somebody reports what is in the store, which is taken at once, or a survey."""
    for _, worker in turn.reports():
        if worker.worker in turn.state.unfit:
            continue
        if worker.profile is not None:
            _fix(turn, worker.profile)
            return True
        if worker.survey is not None:
            turn.fact(Surveyed(at=turn.now, worker=worker.worker, survey=worker.survey))
            return True
    return False


def _is_too_shallow(turn: Turn) -> bool:
    """Whether the model has fewer sections than the job wants stages: K and P stay as they are, so the job
    ends. Trainers refuse such a job where they cut the model; what was cut before may come from a store."""
    state = turn.state
    recipe = state.measuring.survey.recipe if state.recipe is None and state.measuring else state.recipe
    depth = state.spec.parallelism.pipeline_parallel_degree if state.spec is not None else None
    if recipe is None or depth is None or depth <= recipe.num_sections:
        return False
    reason = f"parallelism.{too_deep(depth, recipe.num_sections)}"
    ending.end(turn, JobEnded(at=turn.now, status="failed", reason=reason))
    return True


def _fix(turn: Turn, found: Profile) -> None:
    refusal = starting.refusal(turn, found.recipe)
    if refusal:
        ending.end(turn, JobEnded(at=turn.now, status="failed", reason=refusal))
        return
    turn.fact(
        RecipeFixed(
            at=turn.now,
            recipe=starting.with_bits(turn, found.recipe),
            calibration=found.calibration,
            measurements=found.measurements,
            stored=found.stored,
            note=found.note,
        )
    )
    if found.measurements is not None and not found.stored and not _is_assumed(turn, found.measurements):
        turn.command(StoreCalibration(key=f"{turn.state.job}/calibration"))


def _is_assumed(turn: Turn, measurements: Mapping[str, Any]) -> bool:
    """Whether the links are of one machine, though the job may have several workers."""
    assert turn.state.spec is not None, "what is measured was submitted"
    resources = turn.state.spec.resources
    several = resources.most_workers > 1
    return several and any(wire["source"] == "loopback" for wire in measurements["wires"])


def _choose(turn: Turn) -> None:
    for worker in _ready(turn):
        turn.fact(ProfilerChosen(at=turn.now, worker=worker.worker, incarnation=worker.incarnation))
        return


def _ready(turn: Turn) -> list[WorkerReport]:
    """Workers with nothing to do."""
    return [
        worker
        for vm, worker in turn.reports()
        if worker.phase is Phase.IDLE
        and vm.status is VmStatus.JOINED
        and not has_ended(worker)
        and not turn.is_away(seat_of(worker))
        and worker.worker not in turn.state.unfit
    ]


# ---- sections ----------------------------------------------------------------------------------------------


def _take_rows(turn: Turn, measuring: Measuring) -> None:
    done = measuring.done
    for _, worker in turn.reports():
        fresh = tuple(row for row in worker.rows if (row.microbatch_size, row.section) not in done)
        if fresh:
            turn.fact(SectionsMeasured(at=turn.now, worker=worker.worker, rows=fresh))
            done |= {(row.microbatch_size, row.section) for row in fresh}


def _measure(turn: Turn, measuring: Measuring | None) -> None:
    """Deal out what is left; when nothing is, or it is late, go on to the links."""
    assert measuring is not None, "a calibration is under way"
    done = measuring.done
    missing = [m.microbatch_size for m in measuring.survey.layouts if left(m, done)]
    late = turn.elapsed_s(measuring.surveyed_at) > turn.timing.measuring_s
    if missing and (not late or measuring.survey.recipe.microbatch_size in missing):
        _deal(turn, measuring, done)
    else:
        _probe(turn, measuring)


def _deal(turn: Turn, measuring: Measuring, done: set[tuple[int, int]]) -> None:
    taken = set(done)
    busy: set[Seat] = set()
    for seat, share in measuring.dealt:
        parts = {(share.microbatch_size, section) for section in share.sections}
        if not turn.is_away(seat) and not parts <= done:
            taken |= parts
            busy.add(seat)
    free = [seat for seat in map(seat_of, _ready(turn)) if seat not in busy]
    if not free:
        return
    for (worker, incarnation), share in zip(free, shares(measuring.survey, taken, len(free)), strict=False):
        turn.fact(ShareDealt(at=turn.now, worker=worker, incarnation=incarnation, share=share))


# ---- links -------------------------------------------------------------------------------------------------


def _probe(turn: Turn, measuring: Measuring) -> None:
    if measuring.probe is not None:
        _follow(turn, measuring.probe)
    measuring = turn.state.measuring or measuring
    if measuring.probe is not None:
        return
    members = _members(_ready(turn))
    if not members or (len(members) < 2 and _more_are_coming(turn, measuring)):
        return
    if measuring.wires or measuring.last_probe >= _MOST_PROBES or len(members) < 2:
        _conclude(turn, measuring)
    else:
        turn.fact(ProbeDealt(at=turn.now, number=measuring.last_probe + 1, members=tuple(members)))


def _more_are_coming(turn: Turn, measuring: Measuring) -> bool:
    """Whether workers may soon be there to measure links with: links that are assumed serve no other job."""
    ready = {vm_of(worker.worker) for worker in _ready(turn)}
    coming = any(vm.vm not in ready for vm in turn.state.live_vms if vm.status is not VmStatus.NOTICED)
    return coming and turn.elapsed_s(measuring.surveyed_at) < turn.timing.settle_s


def _members(ready: list[WorkerReport]) -> list[Seat]:
    """Some of the workers, those of a VM next to each other, from several VMs if there are."""
    by_vm: dict[str, list[Seat]] = {}
    for worker in ready:
        by_vm.setdefault(vm_of(worker.worker), []).append(seat_of(worker))
    each = min(_MOST_OF_A_VM, max(1, _MOST_MEMBERS // max(1, len(by_vm))))
    if len(by_vm) > 1:
        each = max(each, 2)  # a VM's own link, too
    members = [seat for seats in by_vm.values() for seat in seats[:each]]
    return members[:_MOST_MEMBERS]


def _follow(turn: Turn, probe: Probe) -> None:
    """See that a probe begins, and that it ends."""
    dead = [worker for worker, incarnation in probe.members if turn.is_away((worker, incarnation))]
    first = turn.report_of(probe.members[0])
    word = first.probe if first is not None else None
    if dead:
        _end(turn, probe, f"lost {', '.join(dead)}")
    elif turn.elapsed_s(probe.dealt_at) > turn.timing.probe_s:
        _end(turn, probe, f"not over in {turn.timing.probe_s:g} s")
    elif word is None or word.number != probe.number:
        return
    elif word.done:
        _end(turn, probe, word.failure, tuple(word.wires), tuple(word.allreduces))
    elif word.endpoint is not None and probe.endpoint is None:
        turn.fact(ProbeOpened(at=turn.now, number=probe.number, endpoint=word.endpoint))


def _end(
    turn: Turn,
    probe: Probe,
    failure: str,
    wires: tuple[dict[str, object], ...] = (),
    allreduces: tuple[dict[str, object], ...] = (),
) -> None:
    try:
        for wire in wires:
            Wire.from_json(wire, "wires")
        for entry in allreduces:
            AllReduce.from_json(entry, "allreduces")
    except InvalidCalibration as error:
        failure, wires, allreduces = str(error), (), ()
    turn.fact(
        ProbeEnded(at=turn.now, number=probe.number, wires=wires, allreduces=allreduces, failure=failure)
    )


# ---- the end -----------------------------------------------------------------------------------------------


def _conclude(turn: Turn, measuring: Measuring) -> None:
    state, survey = turn.state, measuring.survey
    assert state.spec is not None, "what is measured was submitted"
    measured = measurements_of(
        survey,
        measuring.rows,
        [Wire.from_json(wire, "wires") for wire in measuring.wires],
        [AllReduce.from_json(entry, "allreduces") for entry in measuring.allreduces],
    )
    resources = state.spec.resources
    found = profile_of(
        measured,
        survey.recipe,
        wanted=state.spec.parallelism.microbatch_size,
        memory_bytes=_least_memory(state),
        most_workers=resources.most_workers,
    )
    _fix(turn, found.model_copy(update={"note": survey.note}))


def _least_memory(state: JobState) -> int:
    """Of any worker that there is, in bytes."""
    assert state.spec is not None, "what is measured was submitted"
    sizes = [int(device["memory_bytes"]) for vm in state.live_vms for device in vm.devices]
    cap = state.spec.resources.device_memory
    return min([*sizes, cap] if cap is not None else sizes)
