"""A worker's part of the step in flight: partial sums and pieces of the loss, which outlive a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ...morphing.in_flight import KeptParcel, Parcel, StepId, StepInFlight
from ...pipeline.contributions import Pairs
from ...pipeline.plan import RestOfStep
from ..sections.runtime import Piece
from .buckets import Bucket
from .parcels import Parcels
from .partial_sums import PartialSum, PartialSums, hash_of_scales


class InFlight:
    """What this worker has of the step in flight. `rest`: what is to be done where something was kept."""

    def __init__(self, sums: PartialSums) -> None:
        self.parcels: Parcels[PartialSum] = Parcels()
        self.rest: RestOfStep | None = None
        self._sums = sums
        self._pieces: dict[int, Piece] = {}
        self._brings: set[int] = set()
        """Micro-batches whose piece this worker contributes to the sum of the losses."""
        self._known: frozenset[int] = frozenset()  # those that somebody had when the generation formed

    def begin(
        self,
        of: StepId,
        buckets: Sequence[Bucket],
        rank: int,
        num_micro_batches: int,
        scales: Mapping[str, float],
        loss_scale: float,
    ) -> None:
        """Begin an attempt at a whole step with these scales (see `GradientSum.reset`)."""
        own = [bucket for bucket in buckets if rank in bucket.hosts]
        before = self.parcels.sums()
        empty = {bucket.sections: self._empty(bucket, before, scales) for bucket in own}
        whole = {bucket.sections: Pairs.all(bucket.sections, num_micro_batches) for bucket in buckets}
        hashes = {bucket.sections: hash_of_scales(bucket.names, scales, loss_scale) for bucket in own}
        self.parcels.begin(of, whole, hashes, empty)
        self._clear()

    def _empty(
        self, bucket: Bucket, before: Mapping[tuple[int, ...], PartialSum], scales: Mapping[str, float]
    ) -> PartialSum:
        total = before.get(bucket.sections)
        if total is None:
            return self._sums.new(bucket, scales)
        total.reset(scales)
        return total

    def add_updates(self, bucket: tuple[int, ...], micro_batch: int, updates: Mapping[str, Tensor]) -> None:
        """Add a forward's new values of buffers, except those that are held."""
        missing = self.parcels.missing[bucket]
        total = self.parcels.sums()[bucket]
        fresh = {
            name: value
            for name, value in updates.items()
            if name in total.updated_by and (micro_batch, total.updated_by[name]) in missing
        }
        total.running.add(micro_batch, fresh)

    def add_loss(self, micro_batch: int, piece: Piece) -> None:
        """Add a micro-batch's piece of the loss, unless somebody has it already."""
        if micro_batch not in self._known:
            self._pieces[micro_batch] = piece
            self._brings.add(micro_batch)

    def brought_losses(self) -> dict[int, Piece]:
        """The pieces that this worker contributes."""
        return {micro_batch: self._pieces[micro_batch] for micro_batch in self._brings}

    def size_of(self, bucket: Bucket) -> int:
        """Bytes of a sum of the bucket, about."""
        return self._sums.size_of(bucket)

    def show(self) -> tuple[list[Parcel], dict[int, Piece]]:
        """What this worker shows when a generation forms. Attempts after the first are begun again."""
        of, shown = self.parcels.of, self.parcels.show()
        if of is None or of.attempt > 0:
            return [], {}
        return shown, dict(self._pieces)

    def settle(
        self,
        rank: int,
        of: StepId,
        step: StepInFlight,
        rest: RestOfStep | None,
        losses: Mapping[int, tuple[int, Piece]],
        buckets: Iterable[Bucket],
        scales: Mapping[str, float],
        loss_scale: float,
    ) -> None:
        """Go on with what counts. `losses`: of each micro-batch whose piece is known, the rank that
        contributes it. Only of a first attempt, whose scales are those of the state."""
        assert of.attempt == 0, "an attempt after the first begins again whole"
        own = {bucket.sections: bucket for bucket in buckets if rank in bucket.hosts}
        hashes = {b: hash_of_scales(bucket.names, scales, loss_scale) for b, bucket in own.items()}
        self.parcels.settle(rank, of, step, hashes, lambda b: self._sums.new(own[b], scales))
        self.rest = rest
        self._known = frozenset(losses)
        self._brings = {micro_batch for micro_batch, (bringer, _) in losses.items() if bringer == rank}
        mine = {micro_batch: losses[micro_batch][1] for micro_batch in self._brings}
        self._pieces = {m: p for m, p in self._pieces.items() if m in losses} | mine

    def receive(
        self,
        move: KeptParcel,
        shown: Parcel,
        bucket: Bucket,
        payload: bytes,
        scales: Mapping[str, float],
    ) -> None:
        """Lay a peer's parcel of `bucket`, received completely, beside the own one. Raises `Corrupt`."""
        total = self._sums.new(bucket, scales)
        total.load(payload)
        if self.parcels.of != shown.of:
            self._clear()
        self.parcels.receive(move, total, shown)

    def end(self) -> None:
        """Forget the step: it is committed. Memory of the sums is kept for the next."""
        self.parcels.end()
        self._clear()

    def drop(self) -> None:
        """Drop everything: the state that the step continues from is gone."""
        self.parcels.drop()
        self._clear()

    def _clear(self) -> None:
        self.rest, self._pieces, self._brings, self._known = None, {}, set(), frozenset()
