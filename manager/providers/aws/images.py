"""Properties of images that are needed to create VMs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .. import NotAllowed
from ..shared_answers import Cache
from ..sizes import VmImage
from .clients import Clients
from .errors import UnknownToAws

# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/billing-info-fields.html
_WITHOUT_FEE = "Linux/UNIX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image(VmImage):
    root_device: str


class Images:
    """Images, each looked up once, because images do not change."""

    def __init__(self, clients: Clients, clock: Callable[[], float]) -> None:
        self._clients = clients
        self._known = Cache(self._look_up, clock, math.inf)

    def of(self, region: str, image: str) -> Image:
        """Look up an image. Raises `NotAllowed` if it does not exist, or this account may not use it."""
        return self._known.get((region, image))[1]

    def _look_up(self, key: tuple[str, str]) -> Image:
        region, name = key
        try:
            with self._clients.translated(f"image {name} in {region}", region):
                found = self._clients.ec2(region).describe_images(ImageIds=[name])["Images"]
        except UnknownToAws as error:
            raise NotAllowed(str(error)) from error
        if not found:
            raise NotAllowed(f"image {name} is not known in {region}")
        root = str(found[0].get("RootDeviceName", "/dev/sda1"))
        platform = str(found[0].get("PlatformDetails") or _WITHOUT_FEE)
        sizes = [
            int(mapping["Ebs"].get("VolumeSize", 1))
            for mapping in found[0].get("BlockDeviceMappings", [])
            if mapping.get("DeviceName") == root and "Ebs" in mapping
        ]
        return Image(
            name=name,
            root_device=root,
            architecture=str(found[0].get("Architecture", "x86_64")),
            disk_gb=max(sizes, default=1),
            licence="" if platform == _WITHOUT_FEE else platform,
        )
