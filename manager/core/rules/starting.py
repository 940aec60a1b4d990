"""A job that starts from a checkpoint of another: that is copied before any VM is asked for."""

from __future__ import annotations

from ....protocol.messages import Recipe
from ..commands import CopyCheckpoint
from ..context import Context
from ..events import CheckpointCopied
from ..facts import StartCopied


def take(context: Context) -> None:
    """The copy is there: it is the job's first checkpoint."""
    event, state = context.event, context.state
    if isinstance(event, CheckpointCopied) and state.copying and state.ended is None:
        context.fact(
            StartCopied(
                at=context.now, checkpoint=event.checkpoint, source=event.source, skipped=event.skipped
            )
        )


def order_copy(context: Context) -> None:
    """Have it copied, if it is not there yet."""
    state = context.state
    if state.start is not None and state.copying:
        context.command(CopyCheckpoint(key=f"{state.job}/start/{state.num_facts}", source=state.start))


def refusal(context: Context, recipe: Recipe) -> str:
    """Why a job of this recipe cannot go on from the checkpoint; empty if it can, or starts from none."""
    start = context.state.start
    if start is None:
        return ""
    about = f"checkpoint.start_from: job {start.job}"
    if differs := start.differs(recipe):
        return f"{about} is of another model: {differs}"
    if _is_exact(context) and (other := start.other_bits(recipe)):
        return f"{about} was trained to other bits: {other}; to go on with them, set training.numerics: fast"
    return ""


def with_bits(context: Context, recipe: Recipe) -> Recipe:
    """The recipe; with `numerics: exact` its workers' kernels must be as those of the steps made so far.

    They are compared without what the seed, the data and the optimizer make of them, which may be others now;
    a job of a version that did not keep this apart is compared whole.
    """
    start = context.state.start
    if start is None or not _is_exact(context):
        return recipe
    kernels, bits = start.recipe.kernels_hash, start.recipe.bits_hash
    return recipe.model_copy(update={"kernels_hash": kernels} if kernels is not None else {"bits_hash": bits})


def _is_exact(context: Context) -> bool:
    return context.spec.training.numerics == "exact"
