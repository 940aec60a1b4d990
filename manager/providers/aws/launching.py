"""Builds the request to EC2 for an attempt; the same each time."""

from __future__ import annotations

import hashlib
from typing import Any

from ...spec.placement import Attempt, Market
from .. import NotAllowed
from ..settings import AwsRegion, AwsSettings

MANAGER, VM, ATTEMPT, JOB = "makara:manager", "makara:vm", "makara:attempt", "makara:job"
_TAGGED = ("instance", "volume", "network-interface")
_MOST_USER_DATA = 16 << 10  # bytes before base64, says EC2's user guide
_MOST_TOKEN = 64  # ASCII characters
_BURSTABLE = ("t2", "t3", "t3a", "t4g")


def token_of(manager: str, attempt: Attempt) -> str:
    """EC2's client token (idempotency key), valid within a zone; unique per manager of the account."""
    token = f"{attempt.name}.{manager}"
    if len(token) <= _MOST_TOKEN:
        return token
    return hashlib.sha256(token.encode()).hexdigest()


def zone_of(attempt: Attempt, region: AwsRegion) -> str:
    """The attempt's zone. Raises `NotAllowed` if the settings have no subnet there."""
    zone = attempt.placement.zone or next(iter(region.subnets))
    if zone not in region.subnets:
        raise NotAllowed(
            f"zone {zone}: clouds.yaml names no subnet there; it has {', '.join(region.subnets)}"
        )
    return zone


def launch_request(
    attempt: Attempt,
    job: str,
    *,
    manager: str,
    settings: AwsSettings,
    region: AwsRegion,
    image: str,
    root_device: str,
    user_data: bytes,
) -> dict[str, Any]:
    """The parameters of `run_instances`. Raises `NotAllowed` for values that EC2 never accepts."""
    if len(user_data) > _MOST_USER_DATA:
        raise NotAllowed(f"user data of {len(user_data)} bytes; EC2 takes {_MOST_USER_DATA}")
    if not attempt.placement.instance_type:
        raise NotAllowed(f"attempt {attempt.name} names no instance type")
    tags = {MANAGER: manager, VM: attempt.vm, ATTEMPT: str(attempt.number), JOB: job, "Name": attempt.vm}
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    spot = attempt.placement.market is Market.SPOT
    kinds = (*_TAGGED, "spot-instances-request") if spot else _TAGGED
    request: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "ClientToken": token_of(manager, attempt),
        "ImageId": image,
        "InstanceType": attempt.placement.instance_type,
        "UserData": user_data,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
            "HttpEndpoint": "enabled",
        },
        "NetworkInterfaces": [_interface(attempt, settings, region)],
        "BlockDeviceMappings": [_disk(root_device, attempt.disk_gb or settings.disk_gb)],
        "TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in kinds],
    }
    if settings.instance_profile is not None:
        request["IamInstanceProfile"] = {"Name": settings.instance_profile}
    if spot:
        request["InstanceMarketOptions"] = _spot(attempt.max_price)
    if attempt.placement.instance_type.partition(".")[0] in _BURSTABLE:
        # By default most may use more CPU than their price includes, which is billed besides (EC2's user
        # guide, "Unlimited mode for burstable performance instances").
        request["CreditSpecification"] = {"CpuCredits": "standard"}
    return request


def _interface(attempt: Attempt, settings: AwsSettings, region: AwsRegion) -> dict[str, Any]:
    return {
        "DeviceIndex": 0,
        "SubnetId": region.subnets[zone_of(attempt, region)],
        "Groups": list(region.security_groups),
        "AssociatePublicIpAddress": settings.public_addresses,
        "DeleteOnTermination": True,
    }


def _disk(device: str, size_gb: int) -> dict[str, Any]:
    ebs = {"VolumeSize": size_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    return {"DeviceName": device, "Ebs": ebs}


def _spot(max_price: float | None) -> dict[str, Any]:
    """The spot options: one-time, so that EC2 never restarts a preempted VM (the manager replaces it)."""
    options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if max_price is not None:
        options["MaxPrice"] = f"{max_price:.6f}".rstrip("0").rstrip(".")
    return {"MarketType": "spot", "SpotOptions": options}
