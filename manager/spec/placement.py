"""Placements, prices, offers, and attempts to get a VM."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from ...protocol.gpus import usable_bytes
from .frozen import Frozen


class Market(StrEnum):
    """How a VM is paid for."""

    SPOT = "spot"  # cheaper, and may be preempted at any time
    ON_DEMAND = "on_demand"


class Placement(Frozen):
    """A place where a VM can be requested; fields that a provider does not have are empty."""

    provider: str
    market: Market = Market.ON_DEMAND
    region: str = ""
    zone: str = ""
    instance_type: str = ""


STATED = "the job file"
"""The source of a price that the user states."""


class Price(Frozen):
    """A VM's price in USD an hour, including disk and address as far as known."""

    hourly: float = Field(ge=0)  # expected
    ceiling: float = Field(ge=0)  # the most that it can be: the bid if there is one, else the on-demand price
    at: float  # Unix seconds at which it was valid
    source: str  # where it comes from, for people


class Offer(Frozen):
    """A kind of VM that can be requested at a placement. None: unknown."""

    placement: Placement
    price: Price | None
    on_demand: float | None = None  # without disk and address: a spot VM's bid is never higher
    num_cpus: int | None = None
    memory_bytes: int | None = None
    num_gpus: int = 0
    gpu_memory_bytes: int | None = None  # of each
    ends_itself: bool = True  # whether a VM that sees no manager ends itself, and is billed no more

    def worker_bytes(self, num_workers: int) -> int | None:
        """What plans may use of a VM's memory for each of its workers; None: unknown."""
        if self.num_gpus:
            return None if self.gpu_memory_bytes is None else usable_bytes(self.gpu_memory_bytes)
        return None if self.memory_bytes is None else self.memory_bytes // num_workers


class Attempt(Frozen):
    """One attempt to get a VM, written to the journal before the provider is called.

    `name` is the idempotency key for the provider: repeating a call with it creates no second VM.
    """

    vm: str
    number: int = Field(default=1, ge=1)
    placement: Placement
    max_price: float | None = None  # the bid, USD an hour; None: up to the on-demand price
    image: str = ""  # empty: the provider's own setting
    disk_gb: int | None = None  # None: the provider's own setting
    num_gpus: int = 0  # what the offer says; 0 also in journals of earlier versions
    ends_itself: bool = True  # likewise

    @property
    def name(self) -> str:
        return f"{self.vm}-{self.number}"
