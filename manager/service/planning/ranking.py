"""Ranks the best plan of every pipeline depth, and explains why the first wins. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from ....morphing import Candidate, Choice, Infeasible, Request, choose
from ....morphing.copies import copies_in, too_few
from ....morphing.search_space import Options
from ....simulator.units import seconds

_COUNTS = 0.2  # a reason is told if it makes at least this share of the difference


@dataclass(frozen=True, slots=True)
class Ranking:
    """`rows`: the best plan of each P, best first; the first is the planner's choice. `refused`: (P,
    why) for each P without a plan. `num_slower`: number of depths slower than all rows. `why`: a sentence or
    two for people."""

    choice: Choice
    rows: tuple[Candidate, ...]
    refused: tuple[tuple[int, str], ...]
    num_slower: int
    why: str


def rank(request: Request, most_rows: int) -> Ranking | Infeasible:
    """Rank the planner's choice among its choices at each other P; keep the fastest `most_rows`. Takes a
    sweep for each P that may be among these."""
    choice = choose(request)
    if isinstance(choice, Infeasible):
        return choice
    first, others, refused = choice.candidate, list[Candidate](), list[tuple[int, str]]()
    enough = min(copies_in(choice, request.workers), request.tolerated_failures + 1)
    num_skipped, most_others = 0, max(1, most_rows - 1)  # with one at least the best is compared
    chosen = 0 if first.pipelines else first.pipeline_parallel_degree  # beside unequal ones every grid
    for bound_s, depth in _other_depths(request, chosen):
        if len(others) >= most_others and inf > bound_s > _cost_s(others[most_others - 1]):
            num_skipped += 1
            continue
        found = choose(replace(request, pipeline_parallel_degree=depth))
        if isinstance(found, Infeasible):
            refused.append((depth, found.reason))
        elif (copies := copies_in(found, request.workers)) < enough:
            refused.append((depth, too_few(copies, enough)))
        else:
            others.append(found.candidate)
            others.sort(key=_order)
    limits = [*_limits(first, sorted(refused)), *_too_few_sections(first, request)]
    why = " ".join([_margin(first, others, len(request.workers)), *_risky(first, others), *limits])
    shown = others[: most_rows - 1]
    num_slower = num_skipped + len(others) - len(shown)
    return Ranking(choice, (first, *shown), tuple(sorted(refused)), num_slower, why)


def _other_depths(request: Request, chosen: int) -> list[tuple[float, int]]:
    """[(lower bound of a step's time, P)], most promising first. A P without an obvious plan has an infinite
    bound; the planner then says why."""
    if request.pipeline_parallel_degree is not None:
        return []
    options = Options(request, on_host=request.optimizer_offload == "on")
    # If memory differs, fewer workers may do without recomputation, so the bounds do not hold.
    alike = len({slot.memory_bytes for slot in request.workers}) == 1
    depths = [depth for depth in options.depths if depth != chosen]
    most = {depth: min(len(request.workers) // depth, request.num_micro_batches) for depth in depths}
    fixed = request.data_parallel_degree
    return sorted(
        (
            options.pipeline_s(depth, fixed or most[depth]) if alike and (fixed or 1) <= most[depth] else 0.0,
            depth,
        )
        for depth in depths
    )


def _order(row: Candidate) -> tuple[float, int, int]:
    return _cost_s(row), row.used, row.pipeline_parallel_degree


def _cost_s(row: Candidate) -> float:
    """A step's time with what deaths are expected to cost meanwhile."""
    return _time_s(row) * (1.0 + row.lost)


def _time_s(row: Candidate) -> float:
    assert row.predicted_s is not None, "a plan that was found was simulated"
    return row.predicted_s


def _margin(best: Candidate, others: list[Candidate], num_workers: int) -> str:
    if not others:
        return f"{best.shape} is the only shape that there is a plan for."
    other = others[0]
    less = 1 - _cost_s(best) / _cost_s(other)
    if _is_safer(best, other):
        return (
            f"{best.shape} wins: a step takes {_told(best)}. That is {-100 * less:.1f} % more than with "
            f"{other.shape} ({_told(other)}), but there a section lives on one VM alone, and predictions are "
            "not precise enough to say that it is faster."
        )
    rival = f"the next best, {other.shape} ({_told(other)})"
    lead = f"{best.shape} wins: a step takes {_told(best)}"
    if less < 5e-4:
        return f"{lead}, as with {rival}, which has {_tie(best, other)}."
    reasons = _reasons(best, other) if _time_s(best) < _time_s(other) else ""
    if best.used != other.used:
        ours = f"all {num_workers}" if best.used == num_workers else f"{best.used} of the {num_workers}"
        reasons += f"; it uses {ours} workers, not {other.used}"
    return f"{lead}, {100 * less:.1f} % less than with {rival}{reasons}."


def _told(row: Candidate) -> str:
    """A step's time, and what deaths cost if they can leave a section without a host."""
    if row.lost < 5e-4:
        return seconds(_time_s(row))
    return f"{seconds(_time_s(row))} and {100 * row.lost:.1f} % for deaths that lose state"


def _risky(best: Candidate, others: list[Candidate]) -> list[str]:
    """Which plan would be faster if nobody died."""
    faster = [
        row
        for row in others
        if _time_s(row) < _time_s(best) and row.lost > best.lost and not _is_safer(best, row)
    ]
    if not faster:
        return []
    row = min(faster, key=_time_s)
    more = f"{100 * (row.lost - best.lost):.1f} % more"
    return [
        f"{row.shape} would take {seconds(_time_s(row))}, but deaths that lose state would cost it {more}."
    ]


def _is_safer(best: Candidate, other: Candidate) -> bool:
    """Whether the best plan costs more, and was taken for its copies."""
    return _cost_s(best) > _cost_s(other) and best.copies != 1 == other.copies


def _tie(best: Candidate, other: Candidate) -> str:
    return "more workers" if other.used > best.used else "more stages"


def _reasons(best: Candidate, other: Candidate) -> str:
    """Where the best plan gains time, most first, and where it loses some again."""
    won = [
        (theirs - ours, words)
        for words, ours, theirs in zip(
            (
                "its busiest worker computes {} {}",
                "its pipelines stand still {} {}, for messages and in bubbles",
                "sums, commit and update after its pipelines take {} {}",
            ),
            _parts(best),
            _parts(other),
            strict=True,
        )
    ]
    won.sort(reverse=True)
    whole = sum(gain for gain, _ in won if gain > 0)
    gains = [words.format(seconds(gain), "less") for gain, words in won if gain > _COUNTS * whole]
    losses = [words.format(seconds(-gain), "longer") for gain, words in won if -gain > _COUNTS * whole]
    told = f", because {' and '.join(gains)}" if gains else ""
    return told + (f", though {' and '.join(reversed(losses))}" if losses else "")


def _parts(row: Candidate) -> tuple[float, float, float]:
    """A step's time: computing on the busiest worker, the rest of the pipelines, and what comes after."""
    assert row.busy_s is not None
    assert row.pipeline_s is not None
    after_s = _time_s(row) - row.pipeline_s
    return row.busy_s, max(0.0, row.pipeline_s - row.busy_s), after_s


def _limits(best: Candidate, refused: list[tuple[int, str]]) -> list[str]:
    """Why other depths are not in the comparison."""
    shallower = [(depth, why) for depth, why in refused if depth < best.pipeline_parallel_degree]
    if not shallower:
        return []
    depth, why = max(shallower)
    stages = f"{depth} stages or fewer" if depth > 1 else "one stage"
    return [f"With {stages} there is no plan: {why}."]


def _too_few_sections(best: Candidate, request: Request) -> list[str]:
    """The message that too few sections prevent a deeper pipeline, though there are workers for one."""
    depth, count = best.pipeline_parallel_degree, request.num_sections
    if request.pipeline_parallel_degree is not None or not depth == count < len(request.workers):
        return []
    sections = "1 section" if count == 1 else f"{count} sections"
    return [
        f"The model is cut into {sections}, so P is {count} at most; parallelism.num_sections, or more names "
        "in Training.cuts, would cut it finer."
    ]
