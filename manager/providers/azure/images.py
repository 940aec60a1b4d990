"""Requirements of images of Azure's marketplace on the VMs that boot them.

From `learn.microsoft.com/rest/api/compute/virtual-machine-images/list` and `.../get`. The disk's size,
`osDiskImage.sizeInGb`, is undocumented; without it the size is not checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from azure.core.exceptions import AzureError, ResourceNotFoundError
from azure.mgmt.compute import ComputeManagementClient

from .. import NotAllowed
from ..sizes import VmImage
from . import errors

_NEWEST = "latest"
_SUBSCRIBED = ("redhat", "suse")


class NoImage(NotAllowed):
    """Azure has no image of this name in the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(VmImage):
    generation: str  # of the hypervisor: V1, V2; empty: unknown


def find_image(client: ComputeManagementClient, region: str, name: str) -> Image:
    """Look up `publisher:offer:sku:version`. Raises `NoImage`, `ProviderError`."""
    publisher, offer, sku, version = name.split(":")
    images = client.virtual_machine_images
    try:
        if version == _NEWEST:
            found = images.list(region, publisher, offer, sku, top=1, orderby="name desc")
            version = next((str(one.name) for one in found), "")
            if not version:
                raise NoImage(f"Azure has no version of {name} in {region}")
        return _image(name, images.get(region, publisher, offer, sku, version).as_dict())
    except ResourceNotFoundError as error:
        raise NoImage(f"Azure has no image {name} in {region}: {errors.message_of(error)}") from error
    except AzureError as error:
        raise errors.of_request(error) from error


def _image(name: str, body: dict[str, Any]) -> Image:
    told = body.get("properties") or {}
    disk = told.get("osDiskImage") or {}
    return Image(
        name=name,
        architecture=str(told.get("architecture") or ""),  # x64, Arm64
        generation=str(told.get("hyperVGeneration") or ""),
        disk_gb=int(disk.get("sizeInGb") or 0),
        licence=_licence(name, str(disk.get("operatingSystem") or "")),
    )


def _licence(name: str, system: str) -> str:
    """What Azure bills beside the VM: Windows, and Linux by subscription, unless one's own is brought
    (`learn.microsoft.com/azure/virtual-machines/workloads/redhat/redhat-images`, `.../byos`)."""
    publisher, offer, sku, _ = name.lower().split(":")
    if system.lower() == "windows":
        return "Windows"
    is_free = publisher not in _SUBSCRIBED or offer.startswith("opensuse") or "byos" in f"{offer} {sku}"
    return "" if is_free else f"Linux of {publisher}"
