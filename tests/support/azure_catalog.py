"""What a stand-in of Azure offers: types of VM, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

REGION = "westeurope"


@dataclass(frozen=True)
class Size:
    family: str
    cpus: int
    memory_gb: float
    gpus: int
    spot: bool
    zones: frozenset[str]
    hourly: float
    hourly_spot: float | None
    restriction: str | None = None
    architecture: str = "x64"
    generations: str = "V1,V2"


SIZES = {
    "Standard_D4s_v5": Size("standardDSv5Family", 4, 16, 0, True, frozenset("123"), 0.23, 0.046),
    "Standard_D8s_v5": Size("standardDSv5Family", 8, 32, 0, True, frozenset("12"), 0.46, 0.092),
    "Standard_E4s_v5": Size("cores", 4, 32, 0, True, frozenset("1"), 0.3, None, generations="V2"),
    "Standard_B2s": Size("cores", 2, 4, 0, False, frozenset("123"), 0.05, None),
    "Standard_NC4as_T4_v3": Size("cores", 4, 28, 1, True, frozenset("1"), 0.6, 0.1),
    "Standard_D4ps_v5": Size(
        "standardDPSv5Family",
        4,
        16,
        0,
        True,
        frozenset("123"),
        0.2,
        0.04,
        architecture="Arm64",
        generations="V2",
    ),
    "Standard_M8ms": Size("cores", 8, 218, 0, True, frozenset(), 2.5, 0.5, "NotAvailableForSubscription"),
}


@dataclass(frozen=True)
class Image:
    architecture: str = "x64"
    generation: str = "V2"
    disk_gb: int = 30
    system: str = "Linux"
    versions: tuple[str, ...] = ("24.04.202510010", "24.04.202604160")


IMAGES = {
    ("Canonical", "ubuntu-24_04-lts", "server"): Image(),
    ("Canonical", "ubuntu-24_04-lts", "server-arm64"): Image(architecture="Arm64"),
    ("Canonical", "ubuntu-24_04-lts", "server-gen1"): Image(generation="V1"),
    ("RedHat", "RHEL", "9-lvm-gen2"): Image(),
    ("RedHat", "rhel-byos", "rhel-lvm9-gen2"): Image(),
    ("SUSE", "opensuse-leap-15-6", "gen2"): Image(),
    ("SUSE", "sles-15-sp6", "gen2"): Image(),
    ("MicrosoftWindowsServer", "WindowsServer", "2025-datacenter-g2"): Image(system="Windows"),
}


def image(found: Image, version: str) -> dict[str, Any]:
    """As `Microsoft.Compute/locations/publishers/artifacttypes/offers/skus/versions` tells it."""
    disk = {"operatingSystem": found.system, "sizeInBytes": found.disk_gb << 30, "sizeInGb": found.disk_gb}
    properties = {
        "architecture": found.architecture,
        "hyperVGeneration": found.generation,
        "osDiskImage": disk,
        "dataDiskImages": [],
    }
    return {"name": version, "location": REGION, "properties": properties}


def sku(name: str, size: Size) -> dict[str, Any]:
    """As `Microsoft.Compute/skus` tells it."""
    abilities = {"vCPUs": size.cpus, "MemoryGB": size.memory_gb, "LowPriorityCapable": size.spot}
    abilities |= {"CpuArchitectureType": size.architecture, "HyperVGenerations": size.generations}
    if size.gpus:
        abilities["GPUs"] = size.gpus
    found: dict[str, Any] = {
        "resourceType": "virtualMachines",
        "name": name,
        "family": size.family,
        "locations": [REGION],
        "locationInfo": [{"location": REGION, "zones": sorted(size.zones)}],
        "capabilities": [{"name": key, "value": str(value)} for key, value in abilities.items()],
        "restrictions": [],
    }
    if size.restriction is not None:
        found["restrictions"] = [
            {"type": "Location", "values": [REGION], "reasonCode": size.restriction, "restrictionInfo": {}}
        ]
    return found


def prices(name: str) -> list[dict[str, Any]]:
    """As the public retail price list tells them, other things of the same name among them."""
    size = SIZES[name]
    base = {"armSkuName": name, "armRegionName": REGION, "unitOfMeasure": "1 Hour", "currencyCode": "USD"}
    short, linux = name.removeprefix("Standard_"), "Virtual Machines Series"
    rows = [
        {**base, "skuName": short, "productName": linux, "unitPrice": size.hourly},
        {**base, "skuName": short, "productName": f"{linux} Windows", "unitPrice": size.hourly * 2},
        {**base, "skuName": f"{short} Low Priority", "productName": linux, "unitPrice": size.hourly / 3},
    ]
    if size.hourly_spot is not None:
        spot = {**base, "skuName": f"{short} Spot", "unitPrice": size.hourly_spot}
        rows += [
            {**spot, "productName": linux},
            {**spot, "productName": f"{linux} Windows", "unitPrice": 9.0},
        ]
    return rows
