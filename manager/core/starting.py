"""A job that starts from a checkpoint of another: that is copied before any VM is asked for."""

from __future__ import annotations

from ...worker.messages import Recipe
from ..commands import CopyCheckpoint
from ..events import CheckpointCopied
from ..facts import StartCopied
from .turn import Turn


def take(turn: Turn) -> None:
    """The copy is there: it is the job's first checkpoint."""
    event, state = turn.event, turn.state
    if isinstance(event, CheckpointCopied) and state.copying and state.ended is None:
        turn.fact(StartCopied(at=turn.now, checkpoint=event.checkpoint, source=event.source))


def order_copy(turn: Turn) -> None:
    """Have it copied, if it is not there yet."""
    state = turn.state
    if state.start is not None and state.copying:
        turn.command(CopyCheckpoint(key=f"{state.job}/start/{state.num_facts}", source=state.start))


def refusal(turn: Turn, recipe: Recipe) -> str:
    """Why a job of this recipe cannot go on from the checkpoint; empty if it can, or starts from none."""
    start = turn.state.start
    if start is None:
        return ""
    about = f"checkpoint.start_from: job {start.job}"
    if differs := start.differs(recipe):
        return f"{about} is of another model: {differs}"
    if _is_exact(turn) and (other := start.other_bits(recipe)):
        return f"{about} was trained to other bits: {other}; to go on with them, set training.numerics: fast"
    return ""


def with_bits(turn: Turn, recipe: Recipe) -> Recipe:
    """The recipe; with `numerics: exact` it has the bits of the steps made so far, where they are known."""
    start = turn.state.start
    if start is None or not _is_exact(turn):
        return recipe
    return recipe.model_copy(update={"bits_hash": start.recipe.bits_hash})


def _is_exact(turn: Turn) -> bool:
    return turn.state.spec is not None and turn.state.spec.training.numerics == "exact"
