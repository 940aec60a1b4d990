"""The `resources` of a job file: how many VMs, from where, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...simulator.validation import shown
from .fields import Amount, JobSection, Positive, Size, Time, seconds_of
from .placement import Market

PROVIDERS = ("local", "static", "aws", "azure")
CLOUDS = ("aws", "azure")
_AZURE_TYPES = ("Standard_", "Basic_")
_CLOUD_ONLY = (
    "region",
    "zones",
    "instance_type",
    "order",
    "speed",
    "image",
    "disk_gb",
    "use_spot",
    "max_price",
    "hourly_price",
    "max_hourly_cost",
    "budget",
    "on_demand_nodes",
    "on_demand_after",
)
_SPOT_ONLY = ("max_price", "on_demand_nodes", "on_demand_after")
_ON_DEMAND_AFTER_S = 600.0


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item for item in value)


def _one_or_more(value: object) -> object:
    if not (isinstance(value, str) and value) and not _is_texts(value):
        raise ValueError(f"expected a text or a list of texts, got {shown(value)}")
    return value


def _by_provider(value: object) -> object:
    texts = isinstance(value, Mapping) and all(
        isinstance(key, str) and isinstance(item, str) and item for key, item in value.items()
    )
    if not (isinstance(value, str) and value) and not texts:
        raise ValueError(f"expected a text, or a text for each provider, got {shown(value)}")
    return value


def _lists_by_provider(value: object) -> object:
    lists = isinstance(value, Mapping) and all(
        isinstance(key, str) and _is_texts(item) for key, item in value.items()
    )
    if not _is_texts(value) and not lists:
        raise ValueError(f"expected a list of texts, or such a list for each provider, got {shown(value)}")
    return value


OneOrMore = Annotated[str | list[str], BeforeValidator(_one_or_more)]
ByProvider = Annotated[str | dict[str, str], BeforeValidator(_by_provider)]
ListsByProvider = Annotated[list[str] | dict[str, list[str]], BeforeValidator(_lists_by_provider)]


class Resources(JobSection):
    """Machines. `max_nodes` VMs are requested; the job trains while at least `min_nodes` are usable.

    Money is in USD. Fields that may differ by provider are read by `region_of` and similar methods.
    """

    provider: OneOrMore
    min_nodes: Positive = 1
    max_nodes: Annotated[int, Field(ge=1, le=4096)]
    workers_per_node: Annotated[int, Field(ge=1, le=64)] = 1  # trainers (devices) on each VM
    threads: Positive = 1  # of each trainer; part of the recipe, because sums depend on it
    device_memory: Size | None = None  # bytes that a worker may use; None: all that its device has
    region: ByProvider | None = None
    zones: ListsByProvider | None = None  # of one instance type the cheapest is tried first
    instance_type: OneOrMore | None = None
    order: Literal["listed", "price"] = "listed"  # in which instance types are tried
    speed: dict[str, Amount] | None = None  # by instance type, compared with the others, until it is measured
    image: ByProvider | None = None
    disk_gb: Annotated[int, Field(ge=1, le=65536)] | None = None
    use_spot: bool | None = None  # None: on clouds
    max_price: Amount | None = None  # the bid for a spot VM, per hour
    hourly_price: Amount | None = None  # of a VM, if the provider states none
    max_hourly_cost: Amount | None = None  # of all VMs together
    budget: Amount | None = None  # of the whole job
    on_demand_nodes: Annotated[int, Field(ge=0, le=4096)] = 0  # at most, while no spot VMs are available
    on_demand_after: Time | None = None  # how long they must have been unavailable

    @property
    def most_workers(self) -> int:
        return self.max_nodes * self.workers_per_node

    @property
    def providers(self) -> tuple[str, ...]:
        """In the order in which they are tried."""
        return _texts(self.provider)

    @property
    def clouds(self) -> tuple[str, ...]:
        """The providers that bill."""
        return tuple(provider for provider in self.providers if provider in CLOUDS)

    @property
    def spot(self) -> bool:
        """Whether spot VMs are requested first."""
        return bool(self.clouds) and self.use_spot is not False

    @property
    def markets(self) -> tuple[Market, ...]:
        """In the order in which they are tried."""
        if not self.spot:
            return (Market.ON_DEMAND,)
        return (Market.SPOT, Market.ON_DEMAND) if self.on_demand_nodes else (Market.SPOT,)

    @property
    def on_demand_after_s(self) -> float:
        found = seconds_of(self.on_demand_after) if self.on_demand_after is not None else None
        return _ON_DEMAND_AFTER_S if found is None else found

    def region_of(self, provider: str) -> str | None:
        """None: the provider's own setting."""
        return _of(self.region, provider)

    def zones_of(self, provider: str) -> tuple[str, ...]:
        """Empty: any one of the region's."""
        zones = self.zones.get(provider, []) if isinstance(self.zones, dict) else self.zones
        return tuple(zones or ())

    def image_of(self, provider: str) -> str | None:
        """None: the provider's own setting."""
        return _of(self.image, provider)

    def types_of(self, provider: str) -> tuple[str, ...]:
        """Its instance types, in the order in which they are tried."""
        return tuple(name for name in _texts(self.instance_type) if _cloud_of(name) == provider)


def _texts(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _of(value: str | dict[str, str] | None, provider: str) -> str | None:
    return value.get(provider) if isinstance(value, dict) else value


def _cloud_of(instance_type: str) -> str:
    return "azure" if instance_type.startswith(_AZURE_TYPES) else "aws"


# ---- faults between fields ---------------------------------------------------------------------------------


def resource_faults(resources: Resources) -> list[tuple[str, str]]:
    """Each (field, message)."""
    faults = list(_provider_faults(resources))
    if not faults:
        found = _cloud_faults(resources) if resources.clouds else _set_without_cloud(resources)
        faults = [(f"resources.{field}", message) for field, message in found]
    if resources.min_nodes > resources.max_nodes:
        message = f"{resources.min_nodes} is more than resources.max_nodes ({resources.max_nodes})"
        faults.append(("resources.min_nodes", message))
    return faults


def _provider_faults(resources: Resources) -> Iterator[tuple[str, str]]:
    field, providers = "resources.provider", resources.providers
    for name in dict.fromkeys(providers):
        if name not in PROVIDERS:
            yield field, f"unknown provider {name!r}; expected {', '.join(PROVIDERS)}"
        elif providers.count(name) > 1:
            yield field, f"{name} is named twice"
    if "local" in providers and len(set(providers)) > 1:
        yield field, "local goes with no other provider"


def _set_without_cloud(resources: Resources) -> Iterator[tuple[str, str]]:
    for field in _CLOUD_ONLY:
        if _is_set(resources, field):
            yield field, f"has no meaning with provider {resources.providers[0]}; leave it out"


def _cloud_faults(resources: Resources) -> Iterator[tuple[str, str]]:
    for field in ("region", "zones", "image"):
        yield from _place_faults(field, getattr(resources, field), resources.clouds)
    for cloud in resources.clouds:
        if not resources.types_of(cloud):
            yield "instance_type", f"none is one of {cloud}, and at least one is needed"
    for name in _texts(resources.instance_type):
        if _cloud_of(name) not in resources.clouds:
            yield "instance_type", f"{name} is one of {_cloud_of(name)}, which is not in resources.provider"
    yield from _speed_faults(resources)
    if not resources.spot:
        for field in _SPOT_ONLY:
            if _is_set(resources, field):
                yield field, "has no meaning with use_spot: false; leave it out"
    yield from _number_faults(resources)


def _speed_faults(resources: Resources) -> Iterator[tuple[str, str]]:
    if resources.speed is not None and resources.order != "price":
        yield "speed", "has no effect without order: price"
    names = _texts(resources.instance_type)
    for name in resources.speed or {}:
        if name not in names:
            yield "speed", f"{name!r} is not in resources.instance_type; expected {', '.join(names)}"


def _place_faults(field: str, value: Any, clouds: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name in value:
            if name not in clouds:
                yield field, f"{name!r} is no cloud of resources.provider; expected {', '.join(clouds)}"
    elif value is not None and len(clouds) > 1:
        yield field, f"with several clouds, one for each is expected: {{{clouds[0]}: ...}}"


def _number_faults(resources: Resources) -> Iterator[tuple[str, str]]:
    if resources.on_demand_nodes > resources.max_nodes:
        message = f"{resources.on_demand_nodes} is more than resources.max_nodes ({resources.max_nodes})"
        yield "on_demand_nodes", message
    if resources.on_demand_after is not None and resources.spot and not resources.on_demand_nodes:
        yield "on_demand_after", "has no effect without on_demand_nodes"
    most = resources.max_hourly_cost
    if most is not None and resources.max_price is not None and resources.max_price > most:
        yield "max_price", f"{resources.max_price:g} is more than resources.max_hourly_cost ({most:g})"


def _is_set(resources: Resources, field: str) -> bool:
    return getattr(resources, field) != type(resources).model_fields[field].default
