"""The next-operation policy: decides what a worker runs next, for real workers and for the simulator.

A worker follows its static order. When the next operation's input is late it deviates (Varuna §3.2): it runs
the first backward instead of a forward, or the first forward instead of a backward. A recomputation counts as
part of its backward, because after it only that backward may run (rule 2). So a forward may overtake it while
its gradient is on its way, and it runs before the gradient arrives only if nothing else can run. Forwards
never overtake forwards, nor backwards backwards, so the messages of one kind from one worker to another have
a fixed order.

Where a backward is two operations, its I takes the place of the backward, and its W fills gaps: the oldest
runs when neither a forward nor an I may. A micro-batch is in flight until its W, for so long it keeps its
activations; so when the window is full, a W comes before any forward, planned ones too.

It cannot deadlock. Suppose every worker is idle and every message delivered. Take a total order of the whole
plan that respects inputs and every worker's static order (the list schedule's own time gives one), and in it
the first operation not yet run. Everything before it has run, so its input has arrived, and it is the first
one left on its worker. That worker runs it, unless it holds a recomputed micro-batch m and waits for B(m).
But R(m) was either next in the static order, and then B(m), which follows it directly, is the operation in
question; or it was taken early, and then only because B(m)'s gradient had already arrived. Either way that
worker can run something. W changes nothing, for it never waits.
"""

from __future__ import annotations

# FORWARD keeps what the backward needs; FORWARD_DISCARD does not, and a RECOMPUTE precedes the backward.
# INPUT and, some time later, WEIGHT are a backward in two operations.
NOTHING, FORWARD, FORWARD_DISCARD, RECOMPUTE, BACKWARD, INPUT, WEIGHT = range(-1, 6)


def decide(
    is_forward_planned: bool,
    is_held: bool,
    is_forward_here: bool,
    is_admitted: bool,
    is_forward_recomputed: bool,
    is_gradient_here: bool,
    is_backward_recomputed: bool,
    is_weight_left: bool,
) -> int:
    """What a worker runs now, given its first forward and its first backward not yet taken.

    `is_forward_planned`: of the two, the forward comes first in the static order. `is_held`: the first
    backward's recomputation was the last operation. `is_forward_here`, `is_gradient_here`: there is such a
    forward, or backward, and its input has arrived. `is_admitted`: the window admits the forward ahead of its
    turn. `is_forward_recomputed`, `is_backward_recomputed`: their micro-batch is recomputed.
    `is_weight_left`: there is a W whose I has run.

    `FORWARD` stands for either kind of forward, `BACKWARD` for an I, too. If the result is not a forward, it
    would be the same had the forward's input not arrived.
    """
    if is_held:  # rule 2: a recomputed micro-batch waits for its backward, whatever else is ready
        return BACKWARD if is_gradient_here else NOTHING
    if is_forward_planned and is_forward_here and (is_admitted or not is_weight_left):
        return FORWARD
    if is_gradient_here:
        return RECOMPUTE if is_backward_recomputed else BACKWARD
    # A forward that keeps its activations would hold a second set of them beside the recomputed ones.
    may_go_ahead = not is_forward_planned and (is_forward_recomputed or not is_backward_recomputed)
    if may_go_ahead and is_forward_here and is_admitted:
        return FORWARD
    if is_weight_left:
        return WEIGHT
    return RECOMPUTE if is_backward_recomputed and not is_forward_planned else NOTHING
