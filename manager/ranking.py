"""Every pipeline depth at its best, the fastest first, and why that one wins. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..morphing import Candidate, Choice, Impossible, Request, choose
from ..simulator.svg import seconds

_COUNTS = 0.2  # a reason is told if it makes at least this share of the difference


@dataclass(frozen=True, slots=True)
class Ranking:
    """`rows`: for each P the fastest plan, the fastest first; the first one is the choice's own. `refused`:
    (P, why) of those for which there is none. `why` is a sentence or two for people."""

    choice: Choice
    rows: tuple[Candidate, ...]
    refused: tuple[tuple[int, str], ...]
    why: str


def rank(request: Request) -> Ranking | Impossible:
    """What the planner chooses, among what it would choose at each other P. Takes a sweep for each P."""
    choice = choose(request)
    if isinstance(choice, Impossible):
        return choice
    chosen = choice.candidate
    rows, refused = [chosen], list[tuple[int, str]]()
    fixed = request.pipeline_parallel_degree
    for depth in range(1, min(len(request.workers), request.num_sections) + 1):
        if depth == chosen.pipeline_parallel_degree or fixed is not None:
            continue
        found = choose(replace(request, pipeline_parallel_degree=depth))
        if isinstance(found, Impossible):
            refused.append((depth, found.reason))
        else:
            rows.append(found.candidate)
    first, *others = rows
    others.sort(key=lambda row: (_time_s(row), row.used, row.pipeline_parallel_degree))
    why = " ".join([_margin(first, others, len(request.workers)), *_limits(first, refused)])
    return Ranking(choice, (first, *others), tuple(refused), why)


def shape(row: Candidate) -> str:
    return f"{row.pipeline_parallel_degree}x{row.data_parallel_degree}"


def _time_s(row: Candidate) -> float:
    assert row.predicted_s is not None, "a plan that was found was simulated"
    return row.predicted_s


def _margin(best: Candidate, others: list[Candidate], num_workers: int) -> str:
    if not others:
        return f"{shape(best)} is the only shape that there is a plan for."
    other = others[0]
    less = 1 - _time_s(best) / _time_s(other)
    rival = f"the next best, {shape(other)} ({seconds(_time_s(other))})"
    lead = f"{shape(best)} wins: a step takes {seconds(_time_s(best))}"
    if less < 5e-4:
        return f"{lead}, as with {rival}, which has {_tie(best, other)}."
    reasons = _reasons(best, other)
    if best.used != other.used:
        ours = f"all {num_workers}" if best.used == num_workers else f"{best.used} of the {num_workers}"
        reasons += f"; it uses {ours} workers, not {other.used}"
    return f"{lead}, {100 * less:.1f} % less than with {rival}{reasons}."


def _tie(best: Candidate, other: Candidate) -> str:
    return "more workers" if other.used > best.used else "more stages"


def _reasons(best: Candidate, other: Candidate) -> str:
    """Where the time is won, the most first, and where some of it is lost again."""
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
    """What kept other depths out of the comparison."""
    shallower = [(depth, why) for depth, why in refused if depth < best.pipeline_parallel_degree]
    if not shallower:
        return []
    depth, why = max(shallower)
    stages = f"{depth} stages or fewer" if depth > 1 else "one stage"
    return [f"With {stages} there is no plan: {why}."]
