"""What every trainer of a job has in common."""

from __future__ import annotations

from pydantic import Field

from ..bounds import MOST_ENTRIES, Count, Name
from .base import DeviceKind, Message


class Recipe(Message):
    """What is fixed at a job's first plan and never changes; a trainer that cannot meet it does not
    join."""

    microbatch_size: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    cuts: list[Count] = Field(max_length=MOST_ENTRIES)  # graph positions before which sections 1..K-1 begin
    graph_hash: Name
    threads: int = Field(ge=1)
    device_kind: DeviceKind
    torch_version: Name
    bundle_sha256: Name
    bits_hash: Name | None = None  # `numerics: exact`: see `fitness`; None: not known, or not compared
    kernels_hash: Name | None = None  # likewise

    @property
    def num_sections(self) -> int:
        return len(self.cuts) + 1

    @property
    def global_batch_size(self) -> int:
        return self.microbatch_size * self.num_micro_batches

    def without_bits(self) -> Recipe:
        return self.model_copy(update={"bits_hash": None, "kernels_hash": None})
