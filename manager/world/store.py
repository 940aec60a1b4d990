"""The checkpoint store of a simulated world."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...protocol.messages import CheckpointRef
from ..core.state import order_of

Content = TypeVar("Content")


@dataclass
class Store(Generic[Content]):
    """A head that only its open generation may add to, and what each checkpoint consists of. That nothing is
    deleted which somebody may still read is asserted. Times are seconds of the core's clock.
    """

    generation: int = 0
    base: CheckpointRef | None = None
    """The newest checkpoint when the open generation was opened."""
    listed: list[CheckpointRef] = field(default_factory=list[CheckpointRef])
    """What the head lists, newest first."""
    retired: dict[CheckpointRef, float] = field(default_factory=dict[CheckpointRef, float])
    """Since when the head lists it no more."""
    parts: dict[CheckpointRef, Content] = field(default_factory=dict[CheckpointRef, Content])

    def open(self, generation: int) -> bool:
        """Whether the head belongs to this generation from now on, or did before."""
        if generation < self.generation:
            return False
        if generation > self.generation:
            self.generation, self.base = generation, self.listed[0] if self.listed else None
        return True

    def publish(self, ref: CheckpointRef, content: Content) -> bool:
        """Whether it is published: an older generation's is refused."""
        if ref.generation != self.generation:
            return False
        self.parts[ref] = content
        if ref not in self.listed:
            self.listed = sorted([*self.listed, ref], key=order_of, reverse=True)
        return True

    def retire(self, ref: CheckpointRef, now: float, *, ended: bool = False) -> None:
        """The head lists it no more."""
        if ref in self.listed:
            needed = (ref == self.base and not ended) or self.listed == [ref]
            assert not needed, f"{ref} was to be deleted, but it is the base or the only checkpoint"
            self.listed.remove(ref)
            self.retired[ref] = now

    def delete(self, ref: CheckpointRef, now: float, lease_s: float) -> None:
        """Its parts are gone, a lease after it left the head."""
        over = now >= self.retired.get(ref, 0.0) + lease_s
        assert over, f"{ref} is deleted within a lease of its leaving the head"
        self.retired.pop(ref, None)
        self.parts.pop(ref, None)

    def sweep(
        self,
        kept: Collection[CheckpointRef],
        newest_retired: tuple[int, int],
        now: float,
        lease_s: float,
        *,
        ended: bool = False,
    ) -> None:
        """Retire what nobody asked to keep, and delete what was retired a lease ago. `ended`: so has the job,
        and the base may go."""
        for ref in self.listed[::-1]:
            unwanted = ref not in kept and order_of(ref) <= newest_retired
            if unwanted and (ended or ref != self.base) and len(self.listed) > 1:
                self.retire(ref, now, ended=ended)
        for ref in [ref for ref, at in self.retired.items() if now - at >= lease_s]:
            self.delete(ref, now, lease_s)
