"""What there is at EC2 with this manager's tag, and what its states mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from ...spec.placement import Market, Placement
from .. import Resource, ResourceStatus
from .launching import ATTEMPT, MANAGER, VM

_STATES = {
    "pending": ResourceStatus.PENDING,
    "running": ResourceStatus.RUNNING,
    "stopping": ResourceStatus.ENDING,
    "stopped": ResourceStatus.ENDING,  # its disk is billed
    "shutting-down": ResourceStatus.ENDING,
    "terminated": ResourceStatus.GONE,  # told for about an hour
}
_PAGE = 500


def instances(ec2: Any, manager: str, vm: str | None = None, token: str | None = None) -> list[Resource]:
    """By tag, and so as late as EC2's lists are."""
    filters = _filters(manager, vm)
    if token is not None:
        filters.append({"Name": "client-token", "Values": [token]})
    pages = ec2.get_paginator("describe_instances").paginate(
        Filters=filters, PaginationConfig={"PageSize": _PAGE}
    )
    return [resource_of(raw) for raw in _raw_instances(pages)]


def instance(ec2: Any, identity: str) -> Resource:
    """By its id. Raises botocore's `ClientError` when EC2 does not know it, or not yet."""
    return next(map(resource_of, _raw_instances([ec2.describe_instances(InstanceIds=[identity])])))


def leftovers(ec2: Any, manager: str, vm: str | None = None) -> list[Resource]:
    """Disks and interfaces that hang on no instance: those that do are ended with it."""
    filters = _filters(manager, vm)
    volumes = ec2.get_paginator("describe_volumes").paginate(
        Filters=filters, PaginationConfig={"PageSize": _PAGE}
    )
    interfaces = ec2.get_paginator("describe_network_interfaces").paginate(
        Filters=filters, PaginationConfig={"PageSize": _PAGE}
    )
    found: list[Resource] = []
    for raw in (raw for page in volumes for raw in page["Volumes"]):
        if raw["State"] in ("available", "error"):
            found.append(_leftover(raw["VolumeId"], "disk", _tags(raw.get("Tags", []))))
    for raw in (raw for page in interfaces for raw in page["NetworkInterfaces"]):
        if raw["Status"] == "available":
            found.append(_leftover(raw["NetworkInterfaceId"], "interface", _tags(raw.get("TagSet", []))))
    return found


def resource_of(raw: Mapping[str, Any]) -> Resource:
    """An instance as `run_instances` and `describe_instances` tell of it."""
    tags, launched = _tags(raw.get("Tags", [])), raw.get("LaunchTime")
    return Resource(
        vm=tags.get(VM, ""),
        attempt=int(tags.get(ATTEMPT, "1")),
        id=raw["InstanceId"],
        status=_STATES[raw["State"]["Name"]],
        created_at=launched.timestamp() if isinstance(launched, datetime) else None,
        placement=_placement(raw),
        private_address=str(raw.get("PrivateIpAddress", "")),
        public_address=str(raw.get("PublicIpAddress", "")),
    )


def _placement(raw: Mapping[str, Any]) -> Placement:
    zone = str(raw.get("Placement", {}).get("AvailabilityZone", ""))
    region = re.match(r"[a-z]+(-[a-z]+)+-\d+", zone)  # of a zone in a city as well: us-west-2-lax-1a
    return Placement(
        provider="aws",
        market=Market.SPOT if raw.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        region=region[0] if region is not None else "",
        zone=zone,
        instance_type=str(raw.get("InstanceType", "")),
    )


def _raw_instances(pages: Any) -> Iterator[Mapping[str, Any]]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def _leftover(identity: str, kind: Any, tags: Mapping[str, str]) -> Resource:
    return Resource(
        vm=tags[VM], attempt=int(tags[ATTEMPT]), id=identity, status=ResourceStatus.ENDING, kind=kind
    )


def _filters(manager: str, vm: str | None) -> list[dict[str, Any]]:
    wanted = {MANAGER: manager} | ({VM: vm} if vm is not None else {})
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in wanted.items()]


def _tags(listed: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in listed}
