"""Generations that break for no reason that is known: after each further one without a step, a longer rest.

Deaths are counted (`failures.Death`), and so is who cannot reach whom (`Observations.cuts`). What is left
breaks connections that work again at once: a proxy, a driver. Nobody is to blame, and without a rest the job
would change its plan every few seconds, for ever.
"""

from __future__ import annotations

from ..context import Context
from ..observations import Breaks
from ..state import Generation, Incarnation

_FREE = 1  # the first break is mended at once, as if a death were about to be told


def count(context: Context, broken: Generation) -> str:
    """Count one more; returns what to add to the reason why the generation is closed."""
    before, newest_step = context.observations.breaks, context.observations.newest_step
    number = before.count + 1 if newest_step <= before.step else 1
    context.note(breaks=Breaks(number, newest_step, context.now, frozenset(broken.incarnations)))
    rest_s = _rest_s(context)
    if not rest_s:
        return ""
    often = f"{number} times in a row at step {newest_step}"
    return f" for no reason that is known, {often}: the next in {rest_s:g} s"


def rests(context: Context, usable: frozenset[Incarnation]) -> bool:
    """Whether the next generation is still waited with: while all are there with whom the last one broke.

    One that is gone, replaced or under notice may have been the cause, and then what it holds is to be saved.
    A stop that has something to save waits for nothing.
    """
    breaks = context.observations.breaks
    resting = context.elapsed_s(breaks.at) < _rest_s(context)
    return resting and breaks.incarnations <= usable and not context.must_save()


def _rest_s(context: Context) -> float:
    breaks = context.observations.breaks
    if breaks.count <= _FREE or context.observations.newest_step > breaks.step:
        return 0.0
    return context.timing.backoff_s(breaks.count - _FREE)
