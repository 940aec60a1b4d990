"""The simulated checkpoint store, and the error of a broken invariant."""

from __future__ import annotations

from dataclasses import dataclass, field

from makara.manager.core.state import order_of
from makara.protocol.messages import CheckpointRef


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Store:
    """The checkpoint store: parts, and a head that only its open generation may add to."""

    generation: int = 0
    base: CheckpointRef | None = None
    listed: list[CheckpointRef] = field(default_factory=list)  # newest first
    retired: dict[CheckpointRef, float] = field(default_factory=dict)  # since when
    parts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def open(self, generation: int) -> bool:
        if generation < self.generation:
            return False
        if generation > self.generation:
            self.generation, self.base = generation, self.listed[0] if self.listed else None
        return True

    def publish(self, ref: CheckpointRef, lineage: tuple[int, ...]) -> bool:
        if ref.generation != self.generation:
            return False
        self.parts[ref.step, ref.generation] = lineage
        if ref not in self.listed:
            self.listed = sorted([*self.listed, ref], key=order_of, reverse=True)
        return True

    def retire(self, ref: CheckpointRef, now: float) -> None:
        if ref in self.listed:
            if ref == self.base or self.listed == [ref]:
                raise Broken(f"{ref} was to be deleted, but it is the base or the only checkpoint")
            self.listed.remove(ref)
            self.retired[ref] = now

    def delete(self, ref: CheckpointRef, now: float, lease_s: float) -> None:
        if now < self.retired.get(ref, 0.0) + lease_s:
            raise Broken(f"{ref} is deleted within a lease of its leaving the head")
        self.retired.pop(ref, None)
        self.parts.pop((ref.step, ref.generation), None)

    def sweep(
        self, kept: set[CheckpointRef], newest_retired: tuple[int, int], now: float, lease_s: float
    ) -> None:
        for ref in list(self.listed):
            unwanted = ref not in kept and order_of(ref) <= newest_retired
            if unwanted and ref != self.base and len(self.listed) > 1:
                self.retire(ref, now)
        for ref in [ref for ref, at in self.retired.items() if now - at >= lease_s]:
            self.delete(ref, now, lease_s)
