"""The recipe: one worker traces and calibrates the model, once for a job."""

from __future__ import annotations

from ...worker.messages import Phase, Profile
from ..events import ProfilerChosen, RecipeFixed, StoreCalibration
from ..state import VmStatus
from .turn import Turn, seat_of


def fix_recipe(turn: Turn) -> None:
    """Take the recipe that a profiler found, else see that somebody is at it."""
    state = turn.state
    if state.recipe is not None or not state.active:
        return
    for _, worker in turn.reports():
        if worker.profile is not None:
            found = worker.profile
            _fix(turn, found)
            return
    if state.profiler is None or turn.is_dead(state.profiler):
        _choose(turn)


def _fix(turn: Turn, found: Profile) -> None:
    turn.fact(
        RecipeFixed(
            at=turn.now,
            recipe=found.recipe,
            calibration=found.calibration,
            measurements=found.measurements,
            stored=found.stored,
            note=found.note,
        )
    )
    if found.measurements is not None and not found.stored:
        turn.command(StoreCalibration(key=f"{turn.state.job}/calibration"))


def _choose(turn: Turn) -> None:
    for vm, worker in turn.reports():
        ready = worker.phase is Phase.IDLE and not turn.is_dead(seat_of(worker))
        if ready and vm.status is VmStatus.JOINED:
            turn.fact(ProfilerChosen(at=turn.now, worker=worker.worker, incarnation=worker.incarnation))
            return
