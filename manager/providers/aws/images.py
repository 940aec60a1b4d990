"""Properties of images that are needed to create VMs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .. import NotAllowed
from .clients import Clients
from .errors import UnknownToAws


@dataclass(frozen=True, slots=True)
class Image:
    root_device: str
    architecture: str  # as EC2 writes it: x86_64, arm64
    disk_gb: int  # the least size of a VM's disk


class Images:
    """Images, each looked up once, because images do not change."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], Image] = {}

    def root_device(self, region: str, image: str) -> str:
        return self.of(region, image).root_device

    def of(self, region: str, image: str) -> Image:
        """Look up an image. Raises `NotAllowed` if it does not exist, or this account may not use it."""
        with self._lock:
            known = self._known.get((region, image))
        if known is not None:
            return known
        try:
            with self._clients.translated(f"image {image} in {region}"):
                found = self._clients.ec2(region).describe_images(ImageIds=[image])["Images"]
        except UnknownToAws as error:
            raise NotAllowed(str(error)) from error
        if not found:
            raise NotAllowed(f"image {image} is not known in {region}")
        root = str(found[0].get("RootDeviceName", "/dev/sda1"))
        sizes = [
            int(mapping["Ebs"].get("VolumeSize", 1))
            for mapping in found[0].get("BlockDeviceMappings", [])
            if mapping.get("DeviceName") == root and "Ebs" in mapping
        ]
        made = Image(root, str(found[0].get("Architecture", "x86_64")), max(sizes, default=1))
        with self._lock:
            self._known[region, image] = made
        return made
