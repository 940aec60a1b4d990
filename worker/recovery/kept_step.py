"""What of the step in flight a new generation keeps: shown by its members, chosen alike, and settled."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...morphing.in_flight import (
    KeptParcel,
    Parcel,
    StepId,
    StepInFlight,
    bringers,
    continue_step,
    parcels_from_json,
    parcels_to_json,
)
from ...morphing.recovery import Agreement
from ...pipeline.plan import Path, RestOfStep
from ...pipeline.rest_of_step import rest_of_step
from ...protocol.messages import KeptContributions
from ..execution.buckets import Bucket
from ..execution.session import Session
from ..execution.state import ModelState
from ..sections.runtime import Piece
from .room import lacking_bytes, most_copied

log = logging.getLogger("makara.kept_step")


@dataclass(frozen=True, slots=True)
class Shown:
    """What one member has of a step in flight: parcels, and pieces of the loss by micro-batch.

    `dropped`: contributions of parcels that it dropped for want of memory; `room`: bytes that others' parcels
    may take; None: without bound.
    """

    parcels: Sequence[Parcel]
    losses: Mapping[int, Piece]
    dropped: int = 0
    room: int | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Shown:
        losses = {int(micro_batch): Piece(*piece) for micro_batch, piece in value["losses"].items()}
        return cls(parcels_from_json(value), losses, value["dropped"], value["room"])

    def forgotten(self) -> Shown:
        """The same of a member that has dropped its state: it has no less room than before."""
        return Shown((), {}, room=self.room)


@dataclass(frozen=True, slots=True)
class KeptStep:
    """What counts of the step in flight, and what is to be done; all members compute the same."""

    of: StepId
    step: StepInFlight
    shown: Sequence[Shown]
    losses: Mapping[int, tuple[int, Piece]]
    """Of each micro-batch whose piece of the loss is known: the rank that contributes it, and the piece."""
    rest: RestOfStep
    buckets: Sequence[Bucket] = field(repr=False)

    @property
    def digest(self) -> str:
        """Equal on members that will do the same."""
        bringing = sorted((micro_batch, rank) for micro_batch, (rank, _) in self.losses.items())
        chosen = repr((self.of, self.step.kept, bringing, [_plain(path) for path in self.rest.paths]))
        return hashlib.sha256(chosen.encode()).hexdigest()

    @property
    def counts(self) -> KeptContributions:
        return KeptContributions(
            kept=sum(len(one.pairs) for one in self.step.kept),
            moved=sum(len(one.pairs) for one in self.step.moves),
            missing=sum(len(pairs) for pairs in self.step.missing.values()),
            dropped=sum(one.dropped for one in self.shown),
        )

    def bucket_of(self, parcel: KeptParcel) -> Bucket:
        return next(bucket for bucket in self.buckets if bucket.sections == parcel.pairs.sections)


def show(
    session: Session, state: ModelState, buckets: Sequence[Bucket], free: Callable[[], float]
) -> dict[str, Any]:
    """What this member has of the step in flight, as JSON; it adds nothing to it before `settle_step`.

    `free`: bytes of memory that it may still take; if the generation needs more, parcels are dropped.
    """
    own = [bucket for bucket in buckets if session.rank in bucket.hosts]
    room, in_flight = free() - lacking_bytes(state, session.wanted, own), state.in_flight
    dropped = in_flight.parcels.make_room(-room)
    if dropped:
        log.warning("short of memory by %.0f bytes: %d contributions to the step are dropped", -room, dropped)
    parcels, losses = in_flight.show()
    return {
        **parcels_to_json(parcels),
        "losses": {str(number): list(piece) for number, piece in losses.items()},
        "dropped": dropped,
        "room": None if math.isinf(room) else math.floor(room - most_copied(state, own)),
    }


def keep_step(
    session: Session,
    state: ModelState,
    agreement: Agreement,
    shown: Sequence[Shown],
    buckets: Sequence[Bucket],
) -> KeptStep | None:
    """Choose what counts of the step that follows the agreed state; None if nothing does.

    Of an attempt after the first nothing does: its scales are known only where it was run.
    """
    assert agreement.step is not None, "who continues from the store has no step in flight"
    plan = session.plan
    step = continue_step(
        [one.parcels for one in shown],
        step=agreement.step,
        branch=agreement.branch,
        hosts={bucket.sections: bucket.hosts for bucket in buckets},
        num_micro_batches=plan.num_micro_batches,
        room={rank: one.room for rank, one in enumerate(shown) if one.room is not None},
        sizes={bucket.sections: state.in_flight.size_of(bucket) for bucket in buckets},
    )
    if not step.kept or step.attempt:
        return None
    of = StepId(agreement.step, agreement.branch, step.attempt)
    current = [
        one.losses if any(parcel.of == of for parcel in one.parcels) else dict[int, Piece]() for one in shown
    ]
    losses = {
        micro_batch: (bringer, current[member][micro_batch])
        for micro_batch, (member, bringer) in bringers(current, plan.num_workers).items()
    }
    unknown = set(range(plan.num_micro_batches)) - set(losses)
    rest = rest_of_step(plan, step.missing, unknown, state.work)
    return KeptStep(of, step, shown, losses, rest, buckets)


def settle_step(session: Session, state: ModelState, kept: KeptStep | None) -> None:
    """Go on with what counts; None: with nothing, so that the step begins again whole."""
    if kept is None:
        state.in_flight.drop()
        return
    state.in_flight.settle(
        session.rank,
        kept.of,
        kept.step,
        kept.rest,
        kept.losses,
        kept.buckets,
        state.scales(),
        state.loss_scale,
    )
    log.info("step %d goes on: %s", kept.of.step, kept.counts)


def _plain(path: Path) -> tuple[object, ...]:
    return path.hops, path.micro_batches, path.open_from, sorted(path.held)
