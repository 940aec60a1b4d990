"""Views of a job's changes of plan."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from ...core.state import Generation, JobState
from ...core.worth import forming_s
from ..runtime import FirstStep

_MOST_SHOWN = 100


class StepInFlightView(BaseModel):
    """What became of the step that a morph cut off, in micro-batches: one of which some sections' gradients
    were kept counts in part. `moved`: of the kept ones, those that went to another worker; `left`: those that
    were left to do, whether lost or not begun before; `dropped`: what workers short of memory dropped.

    `took_s`: from the step before to the commit of this one, the morph included; `undisturbed_s`: what steps
    took before. The manager remembers them until it restarts."""

    kept: float
    moved: float
    left: float
    dropped: float
    took_s: float | None = None
    undisturbed_s: float | None = None


class MorphView(BaseModel):
    """A change of plan. `phases_s`: decide (with detection), prepare, open, finish (the plan of before ends
    its step, if it steps), form, as far as known, and first_step: training again, until the first commit;
    `inside_form_s`: the phases of `form` on one worker; `in_flight`: None if nothing was kept of a step."""

    generation: int
    shape: str
    before: str | None
    cause: str
    at: float
    step: int | None
    rung: str | None
    lost_steps: int
    in_flight: StepInFlightView | None
    predicted_s: float | None
    phases_s: dict[str, float]
    inside_form_s: dict[str, float]
    total_s: float | None
    ended: str | None


def morphs(state: JobState, first_steps: Mapping[int, FirstStep]) -> list[MorphView]:
    """The last planned generations by number; `before` is the plan that ran when each was planned.

    (The history is ordered by end: a generation that never formed ends before the one that ran.)
    """
    present = tuple(g for g in (state.current, state.planned) if g is not None)
    shown = state.history[-_MOST_SHOWN:]
    earlier = state.history[: len(state.history) - len(shown)]
    before = next((g.shape for g in reversed(earlier) if g.formed is not None), None)
    # Numbers of those that formed, by their ends; of several that ended at a time, the first.
    formed = {g.ended_at: g.number for g in reversed(state.history) if g.formed is not None}
    views: list[MorphView] = []
    for generation in sorted((*shown, *present), key=lambda generation: generation.number):
        stepped = formed.get(generation.opened_at, generation.number) < generation.number
        first_step = first_steps.get(generation.number)
        views.append(_morph(state, generation, before, first_step, stepped=stepped))
        if generation.formed is not None:
            before = generation.shape
    return views


def _morph(
    state: JobState,
    generation: Generation,
    before: str | None,
    first_step: FirstStep | None,
    *,
    stepped: bool,
) -> MorphView:
    """`stepped`: whether the plan of before still stepped as this generation was opened."""
    marks = {
        "decide": generation.planned_at,
        "prepare": generation.prepared_at,
        "open": generation.opened_at,
        "finish": _finished_at(generation) if stepped else None,
        "form": generation.formed_at,
        "first_step": None if first_step is None else first_step.at,
    }
    phases: dict[str, float] = {}
    reached = generation.detected_at
    for name, at in marks.items():
        if at is not None:
            phases[name] = max(0.0, at - reached)
            reached = max(reached, at)
    return MorphView(
        generation=generation.number,
        shape=generation.shape,
        before=before,
        cause=generation.cause,
        at=generation.planned_at,
        step=generation.formed.step if generation.formed else None,
        rung=generation.formed.rung if generation.formed else None,
        lost_steps=generation.lost_steps,
        in_flight=step_in_flight(state, generation, first_step),
        predicted_s=generation.predicted_s,
        phases_s=phases,
        inside_form_s=dict(generation.formed.phases_s) if generation.formed else {},
        total_s=reached - generation.detected_at if generation.formed_at is not None else None,
        ended=generation.end_reason or None,
    )


def _finished_at(generation: Generation) -> float | None:
    """When the plan of before, which still stepped, had finished its step."""
    if generation.formed is None or generation.formed_at is None:
        return None
    return generation.formed_at - forming_s(generation.formed)


def step_in_flight(
    state: JobState, generation: Generation, first_step: FirstStep | None = None
) -> StepInFlightView | None:
    """What a generation that has formed kept of the step that was cut off; None: nothing."""
    found = generation.formed.in_flight if generation.formed else None
    if found is None or state.recipe is None:
        return None
    each = state.recipe.num_micro_batches / (found.kept + found.missing)
    return StepInFlightView(
        kept=found.kept * each,
        moved=found.moved * each,
        left=found.missing * each,
        dropped=found.dropped * each,
        took_s=None if first_step is None else first_step.since_last_s,
        undisturbed_s=None if first_step is None else first_step.before_s,
    )
