"""A trainer's state between generations: its sections, their step, and data of a commit not yet applied."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...checkpoint.tensors import pack, unpack
from ...morphing.recovery import MemberState
from ...protocol.messages import StepMetrics
from ..sections.grad_check import total_norm
from ..sections.grad_sums import clip_coefficient
from ..sections.ranges import RangeRuntime
from ..sections.state import Scalar
from .commit import CommitRecord
from .in_flight import InFlight
from .partial_sums import PartialSums


@dataclass(frozen=True)
class Reduced:
    """A step's reduced gradients, equal on every host of their sections: summed, divided, not yet applied."""

    step: int
    generation: int
    attempt: int
    gradients: Mapping[str, torch.Tensor]  # empty if they overflowed: the step is redone or skipped
    statistics: Mapping[str, torch.Tensor]  # buffers that the step changes, with their new values
    scales: Mapping[str, float]  # of the next step, for `numerics: exact`
    loss: float
    began: float  # by `time.monotonic`


class ModelState:
    """The sections that this trainer holds, all after the same number of committed steps.

    A commit's record is kept until the next one and reduced gradients until they are applied, because
    survivors of a failure may disagree on whether the last commit happened. Of the step in flight, partial
    sums are kept until it is committed.
    """

    def __init__(self, runtime: RangeRuntime, clip_grad_norm: float | None, sums: PartialSums) -> None:
        self.runtime = runtime
        self.in_flight = InFlight(sums)
        self.applied: int | None = None  # number of steps applied; None: no state
        self.branch = 0  # the generation of the newest commit that was applied
        self.agreed_in = 0  # the newest generation whose members agreed on this state
        self.void_until = 0  # the newest generation known whose state is void, see `distrust`
        self.bits = ""
        """Replicas of equal value compute the same bits: with `numerics: fast` a hash that tells kinds of
        processors apart."""
        self.origins: dict[int, str] = {}
        """{section: the worker whose state it is}, until all bytes were compared since it was copied."""
        self.record: CommitRecord | None = None
        self.settled: StepMetrics | None = None  # the last step that this process applied
        self.reduced: Reduced | None = None
        self.saved_at: float | None = None  # monotonic time of the newest checkpoint that it took part in
        self._clip_grad_norm = clip_grad_norm
        self._num_micro_batches = sums.num_micro_batches

    def standing(self) -> MemberState:
        """This member's state for the agreement of a forming generation."""
        record, reduced = self.record, self.reduced
        return MemberState(
            applied_step=self.applied,
            record=None if record is None else record.proof,
            reduced_step=None if reduced is None else reduced.step + 1,
            sections=frozenset(self.runtime.sections) if self.applied is not None else frozenset(),
            reduced_by=None if reduced is None else (reduced.generation, reduced.attempt),
            branch=self.branch,
            agreed_in=self.agreed_in,
            void_until=self.void_until,
        )

    def apply(self, record: CommitRecord) -> StepMetrics:
        """Apply the step that `record` commits, from the reduced gradients.

        Once begun it runs to its end: no other thread can interrupt it.
        """
        reduced = self.reduced
        assert reduced is not None, "whoever holds a record holds the reduced gradients"
        assert (reduced.step, reduced.attempt) == (record.step, record.attempt), "of the same attempt"
        total = total_norm(record.norms)
        skipped = not bool(torch.isfinite(total))
        coefficient = None if self._clip_grad_norm is None else clip_coefficient(total, self._clip_grad_norm)
        before = self.runtime.loss_scale
        assert before is not None or not skipped, "only fp16 skips a step"
        for section in self.runtime.sections.values():
            if not skipped:
                section.apply(record.step, reduced.gradients, coefficient, reduced.statistics)
            section.scales = {name: reduced.scales.get(name, 0.0) for name in section.info.trainable}
            section.loss_scale = None if before is None else before.after(skipped)
        self.applied = record.step + 1
        self.branch = record.generation
        self.record = record
        self.reduced = None
        self.in_flight.end()
        self.settled = StepMetrics(
            step=self.applied,
            generation=record.generation,
            loss=reduced.loss,
            grad_norm=float(total),
            loss_scale=None if before is None else before.scale,
            skipped=skipped,
            seconds=time.monotonic() - reduced.began,
            samples=self._num_micro_batches * self.runtime.chain.traced.microbatch_size,
        )
        return self.settled

    def forget(self) -> None:
        """Drop everything: it is older than the agreed state, or of another branch."""
        for index in list(self.runtime.sections):
            self.runtime.drop(index)
        self.applied = self.record = self.reduced = self.settled = None
        self.branch = self.agreed_in = 0
        self.in_flight.drop()

    def distrust(self, generation: int) -> None:
        """Drop everything, and let no member continue from a state of this generation or an older one: it
        may be wrong on every host."""
        self.forget()
        self.void_until = max(self.void_until, generation)

    def scales(self) -> dict[str, float]:
        """Of the step in flight, by parameter; see `GradientSum.reset`."""
        return {n: s for section in self.runtime.sections.values() for n, s in section.scales.items()}

    @property
    def loss_scale(self) -> float:
        """What the step's loss is multiplied by."""
        scale = self.runtime.loss_scale
        return 1.0 if scale is None else scale.scale

    @property
    def work(self) -> tuple[int, ...]:
        """Of each section, that of a forward: the same on all workers."""
        return self.runtime.chain.work

    def keep_only(self, wanted: range) -> None:
        for index in set(self.runtime.sections) - set(wanted):
            self.runtime.drop(index)

    def pack_section(self, index: int) -> bytes:
        """A section's whole state as one safetensors file, for a peer."""
        tensors, scalars = self.runtime.sections[index].state()
        return pack(tensors, {"scalars": json.dumps(scalars)})

    def unpack_section(self, index: int, payload: bytes) -> None:
        """Load section `index` from a peer's `pack_section`. Raises `Corrupt`, `RecipeMismatch`."""
        tensors, metadata = unpack(payload)
        self.load_section(index, tensors, json.loads(metadata["scalars"]))

    def load_section(
        self, index: int, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Scalar]
    ) -> None:
        """Host section `index` with this state. Reduced gradients, which this worker has of other sections
        only, are dropped: it could apply them to those alone."""
        self.reduced = None
        if index in self.runtime.sections:
            self.runtime.drop(index)
        self.runtime.host(index, initialise=False).load_state(tensors, scalars)
