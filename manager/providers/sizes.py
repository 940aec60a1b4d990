"""Types of VM and images as clouds tell of them, and whether a job can have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..spec.placement import Offer, Placement, Price
from ..spec.resources import Resources

Fault = tuple[str, str]
"""(field of `resources`, message)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmType:
    """A type of VM."""

    name: str
    num_cpus: int
    memory_bytes: int
    num_gpus: int
    gpu_memory_bytes: int | None = None  # of each GPU; None: unknown
    architectures: tuple[str, ...] = ()  # as the cloud writes them; empty: unknown

    def offer(self, placement: Placement, price: Price | None, on_demand: float | None) -> Offer:
        """`on_demand`: the price of an hour without disk and address."""
        return Offer(
            placement=placement,
            price=price,
            on_demand=on_demand,
            num_cpus=self.num_cpus,
            memory_bytes=self.memory_bytes,
            num_gpus=self.num_gpus,
            gpu_memory_bytes=self.gpu_memory_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VmImage:
    """An image's requirements; empty or 0: unknown."""

    name: str
    architecture: str
    disk_gb: int  # the least size of a VM's disk
    licence: str = ""  # what is billed for the image's system beside the VM, as the cloud calls it


def size_faults(machine: VmType, resources: Resources) -> list[Fault]:
    """Why a type of VM is too small for a job's workers."""
    return [("instance_type", f"{machine.name} has {what}") for what in _too_small(machine, resources)]


def _too_small(machine: VmType, resources: Resources) -> Iterator[str]:
    workers, threads = resources.workers_per_node, resources.workers_per_node * resources.threads
    if machine.num_gpus and workers > machine.num_gpus:
        yield f"{machine.num_gpus} GPUs, fewer than workers_per_node ({workers})"
    if not machine.num_gpus and threads > machine.num_cpus:
        yield f"{machine.num_cpus} vCPUs; workers_per_node times threads is {threads}"
    has = machine.gpu_memory_bytes if machine.num_gpus else machine.memory_bytes // workers
    wanted = resources.device_memory
    if wanted is not None and has is not None and wanted > has:
        yield f"{has >> 20} MiB for a worker, fewer than device_memory"


def architecture_faults(machine: VmType, image: VmImage) -> Iterator[Fault]:
    """Why a type of VM cannot run an image's programs."""
    known = [name.lower() for name in machine.architectures]
    if known and image.architecture and image.architecture.lower() not in known:
        has = "/".join(machine.architectures)
        yield "instance_type", f"{machine.name} is {has}, but image {image.name} is {image.architecture}"


def licence_faults(image: VmImage) -> Iterator[Fault]:
    """Why an image costs more than is known: prices are those of VMs with Linux, without a licence."""
    if image.licence:
        yield (
            "image",
            f"{image.name} is billed as {image.licence}, whose price is not known here, so that no cap would "
            "hold; name one of Linux without a licence fee",
        )


def disk_faults(disk_gb: int | None, image: VmImage) -> Iterator[Fault]:
    """Why an image does not fit on a disk; None: a disk as large as the image."""
    if disk_gb is not None and disk_gb < image.disk_gb:
        yield "disk_gb", f"{disk_gb} GB, but image {image.name} needs {image.disk_gb}"
