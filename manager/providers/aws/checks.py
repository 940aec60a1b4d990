"""Checks a request for VMs before any is rented. Creates nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from ...spec.job_spec import Resources
from ...spec.placement import Market
from .. import NotAllowed, ProviderError, Unauthenticated
from ..settings import AwsSettings
from ..sizes import Fault, VmType, architecture_faults, disk_faults, licence_faults, size_faults
from .clients import Clients
from .errors import RegionDisabled, UnknownToAws
from .images import Images
from .offers import NAME, Offers, region_of

log = logging.getLogger("makara.manager")

# Quotas count vCPUs of the running VMs of some families. Codes are those of Service Quotas for EC2, taken
# from the tables of other projects; families that are missing here are not checked.
_QUOTAS = {
    Market.ON_DEMAND: {
        "standard": "L-1216C47A",
        "g": "L-DB2E81BA",
        "vt": "L-DB2E81BA",
        "p": "L-417A185B",
        "f": "L-74FC7D96",
        "inf": "L-1945791B",
        "x": "L-7295265B",
    },
    Market.SPOT: {
        "standard": "L-34B43A08",
        "g": "L-3819A6DF",
        "vt": "L-3819A6DF",
        "p": "L-7212CCBC",  # p2 to p4
        "f": "L-88CF9481",
        "inf": "L-B5D1601B",
        "x": "L-E3A00192",
    },
}
_STANDARD = frozenset("acdhimrtz")
_OWN_SPOT_QUOTA = 5  # p5 and later have quotas of their own


class Checks:
    def __init__(self, settings: AwsSettings, clients: Clients, images: Images, offers: Offers) -> None:
        self._settings = settings
        self._clients = clients
        self._images = images
        self._offers = offers

    def faults(self, resources: Resources) -> list[Fault]:
        """All faults. If account or place are at fault, only those: then the others cannot be checked.

        Raises `ProviderError` while AWS does not answer.
        """
        try:
            region = region_of(resources, self._settings)
        except NotAllowed as error:
            return [("region", str(error))]
        try:
            with self._clients.translated("credentials", region):
                self._clients.sts(region).get_caller_identity()
        except RegionDisabled as error:
            return [("region", str(error))]
        except (NotAllowed, Unauthenticated) as error:
            return [("provider", f"AWS takes no request: {error}")]
        try:
            return [
                *self._zones(resources, region),
                *self._image(resources, region),
                *self._types(resources, region),
            ]
        except RegionDisabled as error:
            return [("region", str(error))]
        except NotAllowed as error:  # a right is missing
            return [("provider", str(error))]

    def _zones(self, resources: Resources, region: str) -> Iterator[Fault]:
        known = self._settings.regions[region].subnets
        for zone in resources.zones_of(NAME):
            if zone not in known:
                yield "zones", f"{zone}: clouds.yaml names no subnet there; it has {', '.join(known)}"

    def _image(self, resources: Resources, region: str) -> Iterator[Fault]:
        name = resources.image_of(NAME) or self._settings.regions[region].image
        if name is None:
            yield "image", f"is required: clouds.yaml has none for {region}"
            return
        try:
            image = self._images.of(region, name)
        except NotAllowed as error:
            yield "image", str(error)
            return
        yield from disk_faults(resources.disk_gb or self._settings.disk_gb, image)
        yield from licence_faults(image)

    def _types(self, resources: Resources, region: str) -> Iterator[Fault]:
        for name in resources.types_of(NAME):
            try:
                kind = self._offers.kind(region, name)
            except NotAllowed as error:
                yield "instance_type", str(error)
                continue
            yield from size_faults(kind, resources)
            yield from self._architecture(kind, resources, region)
            yield from self._offered(name, resources, region)
            yield from self._quota(kind, resources, region)

    def _architecture(self, kind: VmType, resources: Resources, region: str) -> Iterator[Fault]:
        name = resources.image_of(NAME) or self._settings.regions[region].image
        if name is None:
            return
        try:
            image = self._images.of(region, name)
        except NotAllowed:
            return  # reported as a fault of the image
        yield from architecture_faults(kind, image)

    def _offered(self, name: str, resources: Resources, region: str) -> Iterator[Fault]:
        zones = resources.zones_of(NAME) or tuple(self._settings.regions[region].subnets)
        with self._clients.translated(f"zones that have {name}", region):
            found = self._clients.ec2(region).describe_instance_type_offerings(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [name]}]
            )
        there = {offering["Location"] for offering in found["InstanceTypeOfferings"]}
        if not there & set(zones):
            yield "instance_type", f"{name} is not to be had in {', '.join(zones)}"

    def _quota(self, kind: VmType, resources: Resources, region: str) -> Iterator[Fault]:
        code = quota_code(kind.name, resources.markets[0])
        if code is None:
            return
        quota, needed = self._quota_of(region, code), resources.min_nodes * kind.num_cpus
        if quota is not None and quota["Value"] < needed:
            yield (
                "instance_type",
                f"{resources.min_nodes} {kind.name} have {needed} vCPUs, and quota {code} "
                f"({quota['QuotaName']}) of {region} is {quota['Value']:g}; ask AWS for more",
            )

    def _quota_of(self, region: str, code: str) -> Any | None:
        """The account's quota, or AWS's default where it has none of its own; None: AWS knows neither."""
        quotas = self._clients.quotas(region)
        for ask, right in (
            (quotas.get_service_quota, "GetServiceQuota"),
            (quotas.get_aws_default_service_quota, "GetAWSDefaultServiceQuota"),
        ):
            try:
                with self._clients.translated(f"quota {code}", region):
                    return ask(ServiceCode="ec2", QuotaCode=code)["Quota"]
            except UnknownToAws:
                continue
            except NotAllowed as error:
                raise ProviderError(f"{error}; the manager needs servicequotas:{right}") from error
        log.warning("quota %s: AWS knows none in %s, so that it was not checked", code, region)
        return None


def quota_code(instance_type: str, market: Market) -> str | None:
    """The code of the quota that counts VMs of this type; None: unknown."""
    match = re.match(r"([a-z]+)(\d+)", instance_type)
    if match is None:
        return None
    family, generation = match[1], int(match[2])
    if family == "p" and market is Market.SPOT and generation >= _OWN_SPOT_QUOTA:
        return None
    codes = _QUOTAS[market]
    if family in codes:
        return codes[family]
    return codes["standard"] if family in _STANDARD or family in ("im", "is") else None
