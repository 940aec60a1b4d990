"""Finds resources at EC2 with this manager's tag, and maps their states."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ...spec.placement import Market, Placement
from .. import Resource, ResourceStatus
from .launching import ATTEMPT, MANAGER, VM

log = logging.getLogger("makara.manager")
_STATES = {
    "pending": ResourceStatus.PENDING,
    "running": ResourceStatus.RUNNING,
    "stopping": ResourceStatus.ENDING,
    "stopped": ResourceStatus.ENDING,  # its disk is billed
    "shutting-down": ResourceStatus.ENDING,
    "terminated": ResourceStatus.GONE,  # listed for about an hour
}
_BY_ITS_OWNER = tuple(
    f"Client.{end}"
    for end in ("UserInitiatedShutdown", "InstanceInitiatedShutdown", "UserInitiatedHibernate")
)
_ENDED_AT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")
_PAGE = 500
_MOST_VALUES = 200  # of one filter, says EC2's reference


def instances(ec2: Any, manager: str, vm: str | None = None, token: str | None = None) -> list[Resource]:
    """Find instances by tag; EC2's lists may lag."""
    filters = _filters(manager, vm)
    if token is not None:
        filters.append({"Name": "client-token", "Values": [token]})
    found = [resource_of(raw) for raw in _raw_instances(_pages(ec2, "describe_instances", filters))]
    return [resource for resource in found if _is_named(resource)]


def instance(ec2: Any, identity: str) -> Resource:
    """Find an instance by id. Raises botocore's `ClientError` if EC2 does not know it, or not yet."""
    return next(map(resource_of, _raw_instances([ec2.describe_instances(InstanceIds=[identity])])))


def by_tokens(ec2: Any, vm: str, tokens: Mapping[str, int]) -> list[Resource]:
    """Find a VM's instances by the client tokens of its attempts: {token: number}."""
    names = list(tokens)
    batches = [names[start : start + _MOST_VALUES] for start in range(0, len(names), _MOST_VALUES)]
    return [
        replace(resource_of(raw), vm=vm, attempt=tokens[raw["ClientToken"]])
        for batch in batches
        for raw in _raw_instances(
            _pages(ec2, "describe_instances", [{"Name": "client-token", "Values": batch}])
        )
        if raw.get("ClientToken") in tokens
    ]


def leftovers(ec2: Any, manager: str, vm: str | None = None) -> list[Resource]:
    """Disks and interfaces without an instance; attached ones are deleted with theirs."""
    filters = _filters(manager, vm)
    found: list[Resource] = []
    for page in _pages(ec2, "describe_volumes", filters):
        for raw in page["Volumes"]:
            if raw["State"] in ("available", "error"):
                found.append(_leftover(raw["VolumeId"], "disk", _tags(raw.get("Tags", []))))
    for page in _pages(ec2, "describe_network_interfaces", filters):
        for raw in page["NetworkInterfaces"]:
            if raw["Status"] == "available":
                found.append(_leftover(raw["NetworkInterfaceId"], "interface", _tags(raw.get("TagSet", []))))
    return [resource for resource in found if _is_named(resource)]


def resource_of(raw: Mapping[str, Any]) -> Resource:
    """Convert an instance of `run_instances` or `describe_instances`."""
    tags, launched = _tags(raw.get("Tags", [])), raw.get("LaunchTime")
    return Resource(
        vm=tags.get(VM, ""),
        attempt=_attempt(tags),
        id=raw["InstanceId"],
        status=_status(raw["InstanceId"], str(raw["State"]["Name"])),
        created_at=launched.timestamp() if isinstance(launched, datetime) else None,
        placement=_placement(raw),
        private_address=str(raw.get("PrivateIpAddress", "")),
        public_address=str(raw.get("PublicIpAddress", "")),
        taken_back=_taken_back(raw),
        ran_s=_ran_s(raw),
    )


def _ran_s(raw: Mapping[str, Any]) -> float | None:
    """For how long a terminated instance ran, by EC2's clock: `User initiated (2026-11-28 04:00:00 GMT)` has
    the time of its end, where EC2 tells one
    (https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Instance.html)."""
    told, launched = _ENDED_AT.search(str(raw.get("StateTransitionReason", ""))), raw.get("LaunchTime")
    if told is None or not isinstance(launched, datetime) or str(raw["State"]["Name"]) != "terminated":
        return None
    ran_s = (datetime.fromisoformat(f"{told[1]}+00:00") - launched).total_seconds()
    return ran_s if ran_s >= 0.0 else None


def _taken_back(raw: Mapping[str, Any]) -> str:
    """Why EC2 ended an instance: an interruption, a fault of its host, or a launch that failed. The codes:
    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_StateReason.html."""
    told = raw.get("StateReason") or {}
    code, message = str(told.get("Code", "")), str(told.get("Message", ""))
    if str(raw["State"]["Name"]) in ("pending", "running") or not code or code in _BY_ITS_OWNER:
        return ""
    return message if message.startswith(code) else f"{code}: {message}"


def _placement(raw: Mapping[str, Any]) -> Placement:
    zone = str(raw.get("Placement", {}).get("AvailabilityZone", ""))
    region = re.match(r"[a-z]+(-[a-z]+)+-\d+", zone)  # also of a local zone: us-west-2-lax-1a
    return Placement(
        provider="aws",
        market=Market.SPOT if raw.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND,
        region=region[0] if region is not None else "",
        zone=zone,
        instance_type=str(raw.get("InstanceType", "")),
    )


def _pages(ec2: Any, action: str, filters: list[dict[str, Any]]) -> Any:
    return ec2.get_paginator(action).paginate(Filters=filters, PaginationConfig={"PageSize": _PAGE})


def _raw_instances(pages: Any) -> Iterator[Mapping[str, Any]]:
    for page in pages:
        for reservation in page["Reservations"]:
            yield from reservation["Instances"]


def _leftover(identity: str, kind: Any, tags: Mapping[str, str]) -> Resource:
    return Resource(
        vm=tags.get(VM, ""), attempt=_attempt(tags), id=identity, status=ResourceStatus.ENDING, kind=kind
    )


def _attempt(tags: Mapping[str, str]) -> int:
    """The attempt's number; 1 if the tag was removed or changed, since releases go by the VM's name."""
    told = tags.get(ATTEMPT, "1")
    return int(told) if told.isdecimal() and int(told) else 1


def _status(identity: str, state: str) -> ResourceStatus:
    """The status; an instance in an unknown state counts as existing."""
    if state not in _STATES:
        _warn(f"{identity} is in a state that is not known: {state}")
    return _STATES.get(state, ResourceStatus.PENDING)


def _is_named(resource: Resource) -> bool:
    """Whether it has the tag of its VM. A resource without it is left alone, since its VM is unknown."""
    if not resource.vm:
        _warn(f"{resource.kind} {resource.id} has the tag {MANAGER} and no {VM}: it is left alone")
    return bool(resource.vm)


@functools.lru_cache(maxsize=1000)
def _warn(text: str) -> None:
    """Log a warning once, since lists are repeated."""
    log.warning("AWS: %s", text)


def _filters(manager: str, vm: str | None) -> list[dict[str, Any]]:
    wanted = {MANAGER: manager} | ({VM: vm} if vm is not None else {})
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in wanted.items()]


def _tags(listed: Any) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in listed}
