"""Where a VM is asked for, at what price, and the tries that are made to have it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from .frozen import Frozen


class Market(StrEnum):
    """How a VM is paid for."""

    SPOT = "spot"  # cheaper, and taken back at any time
    ON_DEMAND = "on_demand"


class Placement(Frozen):
    """One place to ask: empty texts where a provider has no such thing."""

    provider: str
    market: Market = Market.ON_DEMAND
    region: str = ""
    zone: str = ""
    instance_type: str = ""


STATED = "the job file"
"""The source of a price that the user says."""


class Price(Frozen):
    """What a VM costs, in USD an hour, with disk and address as far as they are known."""

    hourly: float = Field(ge=0)  # as it is expected
    ceiling: float = Field(ge=0)  # never more: the bid if there is one, else the on-demand price
    at: float  # Unix seconds: when it was so
    source: str  # who says so


class Offer(Frozen):
    """A VM that can be asked for. None: not known."""

    placement: Placement
    price: Price | None
    num_cpus: int | None = None
    memory_bytes: int | None = None
    num_gpus: int = 0
    gpu_memory_bytes: int | None = None  # of each


class Attempt(Frozen):
    """One try to have a VM, written to the journal before it is made.

    Its `name` is the provider's key of idempotence: made again with the same name, it makes no second VM.
    """

    vm: str
    number: int = Field(default=1, ge=1)
    placement: Placement
    max_price: float | None = None  # the bid, USD an hour; None: up to the on-demand price
    image: str = ""  # empty: the provider's own setting
    disk_gb: int | None = None  # None: the provider's own setting

    @property
    def name(self) -> str:
        return f"{self.vm}-{self.number}"
