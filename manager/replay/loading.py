"""How long the bytes take in a replay: to the members of a forming generation, and to the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...morphing.in_flight import StepInFlight
from ...pipeline import Range
from ...simulator import Calibration, MorphCosts
from ..world import Beginning, Trainer


class Bytes:
    """Sizes of ranges of sections, and what moving them takes."""

    def __init__(self, calibration: Calibration, costs: MorphCosts) -> None:
        self._sizes = calibration.saved_bytes
        self._gradients = calibration.gradient_bytes
        self._link = calibration.inter_vm
        self._costs = costs

    def of(self, span: Range) -> int:
        """What a checkpoint holds of these sections."""
        return sum(self._sizes[span.start : span.stop])

    def load_s(self, beginning: Beginning, members: Sequence[Trainer], wanted: Sequence[Range]) -> float:
        """Until the slowest member has what it lacks. `wanted` is of the first members, in their order."""
        if beginning.rung == "start":
            return 0.0
        if beginning.rung == "store":
            return max(map(self.of, wanted)) / self._costs.store_bytes_per_s
        lacking: Counter[int] = Counter()  # by section: workers that must be given it
        most = 0
        for trainer, span in zip(members, wanted, strict=False):
            held = trainer.span if trainer.worker in beginning.kept else None
            missing = [section for section in span.sections if held is None or section not in held]
            lacking.update(missing)
            most = max(most, sum(self._sizes[section] for section in missing))
        if not most:
            return 0.0
        return max(most, self._most_sent(beginning, members, lacking)) / self._link.bytes_per_s

    def _most_sent(self, beginning: Beginning, members: Sequence[Trainer], lacking: Counter[int]) -> float:
        """What the busiest holder hands over, when the holders of each section share its readers."""
        spans = [t.span for t in members if t.span is not None and t.worker in beginning.kept]
        hosts = Counter(section for span in spans for section in span.sections)
        each = {section: self._sizes[section] * lacking[section] / num for section, num in hosts.items()}
        return max(sum(each[section] for section in span.sections) for span in set(spans))

    def moved_s(self, step: StepInFlight) -> float:
        """Until sums of a step in flight are with their hosts, by the busiest sender or receiver."""
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for one in step.moves:
            size_bytes = sum(self._gradients[section] for section in one.pairs.sections)
            sent[one.member] += size_bytes
            received[one.destination] += size_bytes
        return max([*sent.values(), *received.values()], default=0) / self._link.bytes_per_s

    def snapshot_s(self, stages: Sequence[Range], replicas: int) -> float:
        """How long steps wait while the slowest worker copies its share to host memory."""
        return max(map(self.of, stages)) / replicas / self._costs.snapshot_bytes_per_s

    def publish_s(self, stages: Sequence[Range], replicas: int) -> float:
        """From a snapshot until its checkpoint exists."""
        upload_s = max(map(self.of, stages)) / replicas / self._costs.store_bytes_per_s
        return upload_s + self._costs.publish_s
