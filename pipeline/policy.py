"""The next-operation policy: the one place that decides what a worker runs next, in tensors and virtual time.

A worker follows its static order. When the next operation's input is late it deviates (Varuna §3.2): it runs
the first backward instead of a forward, or the first forward instead of a backward. A recomputation counts as
part of its backward here, for once it has run nothing else may (rule 2). So it too lets a forward go first
while its gradient is on its way, and starts ahead of the gradient only when there is nothing else to do. But
forwards among themselves and backwards among themselves always run in the static order, so that what one
worker sends another has a fixed order for each kind.

It cannot deadlock. Let every worker be idle and every message delivered, and take, among all operations not
yet run, the one that comes first in some order of the whole plan that respects inputs and every worker's
static order (the list schedule's own time is one). Everything before it has run, so its input is there, and
it is the first one left on its worker. That worker runs it, unless it holds a recomputed micro-batch m and
waits for B(m) alone. But R(m) was either next in the static order, and then B(m), which follows it directly,
is the operation in question; or it was taken early, and then only because B(m)'s gradient was already there.
So somebody can run.
"""

from __future__ import annotations

# What a worker does: a forward that keeps what the backward needs, or one that discards it and a
# recomputation; the backward.
NOTHING, FORWARD, FORWARD_DISCARD, RECOMPUTE, BACKWARD = range(-1, 4)


def decide(
    is_forward_planned: bool,
    is_held: bool,
    is_forward_here: bool,
    is_admitted: bool,
    is_forward_recomputed: bool,
    is_gradient_here: bool,
    is_backward_recomputed: bool,
) -> int:
    """What a worker runs now, in terms of its first forward and its first backward that are not taken.

    `is_forward_planned`: of the two, the forward comes first in the static order. `is_held`: the first
    backward's recomputation was the last operation. `is_forward_here`, `is_gradient_here`: there is such a
    forward, or backward, and its input has come. `is_admitted`: the window admits the forward ahead of its
    turn. `is_forward_recomputed`, `is_backward_recomputed`: their micro-batch is recomputed.

    `FORWARD` stands for either forward. An input matters only to the operation that uses it and to what goes
    ahead without it: if the answer is no forward, it is the same when the forward's input has not come.
    """
    if is_held:  # rule 2: a recomputed micro-batch waits for its backward, whatever else is ready
        return BACKWARD if is_gradient_here else NOTHING
    if is_forward_planned and is_forward_here:
        return FORWARD
    if is_gradient_here:
        return RECOMPUTE if is_backward_recomputed else BACKWARD
    if is_forward_planned:
        return NOTHING
    # A forward that keeps its activations would be a second set of them beside those recomputed.
    if is_forward_here and is_admitted and (is_forward_recomputed or not is_backward_recomputed):
        return FORWARD
    return RECOMPUTE if is_backward_recomputed else NOTHING
