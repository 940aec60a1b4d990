"""Which checkpoints exist and which are kept. Only the manager deletes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ....protocol.messages import CheckpointRef
from ..commands import DeleteCheckpoint, SweepStore
from ..events import HeadSeen, Tick
from ..facts import CheckpointPublished, CheckpointRetired
from ..state import order_of
from ..turn import Turn


def record_published(turn: Turn) -> None:
    """Publications as workers report them; each was listed by the head before it was reported."""
    record(turn, [worker.published for _, worker in turn.reports() if worker.published is not None])


def record(turn: Turn, checkpoints: Iterable[CheckpointRef]) -> None:
    """Make facts of checkpoints not known yet. One not newer than a retired one is on its way out."""
    known = set(map(order_of, turn.state.published))
    for checkpoint in sorted(set(map(order_of, checkpoints)) - known):
        if checkpoint > turn.state.retired:
            ref = CheckpointRef(generation=checkpoint[0], step=checkpoint[1])
            turn.fact(CheckpointPublished(at=turn.now, checkpoint=ref))


def retire(turn: Turn) -> None:
    """Keep the newest `keep_latest_k` and what the open generation may start from; let the others go."""
    state = turn.state
    if state.spec is None or state.finished is not None:
        return
    if state.planned is not None and state.planned.prepared_at is not None:
        return  # the head is being swapped: what its base will be is not known yet
    for checkpoint in state.published[: -state.spec.checkpoint.keep_latest_k]:
        if checkpoint != state.base:
            discard(turn, checkpoint)


def take(turn: Turn) -> None:
    """What a sweep saw in the head: publications that nobody reported."""
    state, event = turn.state, turn.event
    if not isinstance(event, HeadSeen) or state.ended is not None:
        return
    if event.generation <= state.head_generation:
        record(turn, event.checkpoints)


def sweep(turn: Turn) -> None:
    """Now and then, have the store looked through: what it lists, and what nobody needs any more."""
    state, vitals, timing = turn.state, turn.vitals, turn.timing
    if not isinstance(turn.event, Tick) or not state.opened_generation or state.waiting is not None:
        return
    due_at = vitals.started_at + timing.delete_after_s
    if vitals.swept_at is not None:
        due_at = vitals.swept_at + timing.sweep_s
    if turn.now >= due_at:
        turn.vitals = replace(vitals, swept_at=turn.now)
        order_sweep(turn, turn.now)


def order_sweep(turn: Turn, not_before: float) -> None:
    key = f"{turn.state.job}/sweep/{round(not_before * 1000)}"
    turn.command(SweepStore(key=key, not_before=not_before, lease_s=turn.timing.delete_after_s))


def discard(turn: Turn, checkpoint: CheckpointRef) -> None:
    turn.fact(CheckpointRetired(at=turn.now, checkpoint=checkpoint))
    turn.command(
        DeleteCheckpoint(
            key=f"{turn.state.job}/delete/{checkpoint.step}-g{checkpoint.generation}",
            checkpoint=checkpoint,
            not_before=turn.now + turn.timing.delete_after_s,
            lease_s=turn.timing.delete_after_s,
        )
    )
