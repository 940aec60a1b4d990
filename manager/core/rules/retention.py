"""Which checkpoints exist and which are kept. Only the manager deletes."""

from __future__ import annotations

from collections.abc import Iterable

from ....protocol.messages import CheckpointRef, Formed
from ..commands import DeleteCheckpoint, SweepStore
from ..context import Context
from ..events import HeadSeen, Tick
from ..facts import CheckpointDamaged, CheckpointPublished, CheckpointRetired
from ..state import Generation, order_of


def record_published(context: Context) -> None:
    """Publications as workers report them; each was listed by the head before it was reported."""
    published = [worker.published for _, worker in context.reports() if worker.published is not None]
    possible = context.state.possible
    record(context, [checkpoint for checkpoint in published if possible(checkpoint.step) == checkpoint.step])


def record(context: Context, checkpoints: Iterable[CheckpointRef]) -> None:
    """Make facts of checkpoints not known yet. One not newer than a retired one is on its way out."""
    state = context.state
    known = {*map(order_of, state.published), *(order_of(found.checkpoint) for found in state.damaged)}
    for checkpoint in sorted(set(map(order_of, checkpoints)) - known):
        if checkpoint > context.state.retired:
            ref = CheckpointRef(generation=checkpoint[0], step=checkpoint[1])
            context.fact(CheckpointPublished(at=context.now, checkpoint=ref))


def set_aside(context: Context, current: Generation, formed: Formed) -> None:
    """The checkpoints that the members of this generation could not read before they read an older one."""
    damaged = [found.checkpoint for found in formed.skipped]
    instead = next((c for c in current.checkpoints if c not in damaged), None)
    for found in formed.skipped:
        if instead is not None and found.checkpoint in context.state.published:
            context.fact(
                CheckpointDamaged(at=context.now, checkpoint=found.checkpoint, instead=instead, why=found.why)
            )


def retire(context: Context) -> None:
    """Keep the newest `keep_latest_k` and what the open generation may start from; let the others go."""
    state = context.state
    if state.finished is not None:
        return
    if state.planned is not None and state.planned.prepared_at is not None:
        return  # the head is being swapped: what its base will be is not known yet
    if state.current is not None and state.current.formed is None:
        return  # where the newest is damaged, its workers read an older one
    for checkpoint in state.published[: -context.spec.checkpoint.keep_latest_k]:
        if checkpoint != state.base:
            discard(context, checkpoint)
    _retire_damaged(context)


def take(context: Context) -> None:
    """What a sweep saw in the head: publications that nobody reported.

    After the job's end another sweep follows until none is left that is to go.
    """
    state, event = context.state, context.event
    if not isinstance(event, HeadSeen) or event.generation > state.head_generation or state.copying:
        return
    record(context, event.checkpoints)
    if state.ended is None:
        return
    known = context.state.published
    retire_at_end(context)
    if event.leaving or context.state.published != known:
        order_sweep(context, context.now + context.timing.delete_after_s)


def retire_at_end(context: Context) -> None:
    """Keep only the newest `keep_latest_k`: nothing starts from the base any more. Sweeps delete the rest."""
    if context.state.spec is None:  # of a job that is set aside
        return
    for checkpoint in context.state.published[: -context.spec.checkpoint.keep_latest_k]:
        context.fact(CheckpointRetired(at=context.now, checkpoint=checkpoint))
    _retire_damaged(context)


def _retire_damaged(context: Context) -> None:
    """Damaged checkpoints that are older than all that are kept; sweeps delete them, as the head may still
    have one as its base."""
    published, kept = context.state.published, context.spec.checkpoint.keep_latest_k
    for found in context.state.damaged:
        if len(published) >= kept and order_of(found.checkpoint) < order_of(published[-kept]):
            context.fact(CheckpointRetired(at=context.now, checkpoint=found.checkpoint))


def sweep(context: Context) -> None:
    """Now and then, have the store looked through: what it lists, and what nobody needs any more."""
    state, observations, timing = context.state, context.observations, context.timing
    if not isinstance(context.event, Tick) or not state.opened_generation or state.waiting is not None:
        return
    due_at = observations.started_at + timing.delete_after_s
    if observations.swept_at is not None:
        due_at = observations.swept_at + timing.sweep_s
    if context.now >= due_at:
        context.note(swept_at=context.now)
        order_sweep(context, context.now)


def order_sweep(context: Context, not_before: float) -> None:
    key = f"{context.state.job}/sweep/{round(not_before * 1000)}"
    context.command(SweepStore(key=key, not_before=not_before, lease_s=context.timing.delete_after_s))


def discard(context: Context, checkpoint: CheckpointRef) -> None:
    context.fact(CheckpointRetired(at=context.now, checkpoint=checkpoint))
    context.command(
        DeleteCheckpoint(
            key=f"{context.state.job}/delete/{checkpoint.step}-g{checkpoint.generation}",
            checkpoint=checkpoint,
            not_before=context.now + context.timing.delete_after_s,
            lease_s=context.timing.delete_after_s,
        )
    )
