"""Finds a VM's devices."""

from __future__ import annotations

from pathlib import Path

from ...protocol.messages import BootConfig, DeviceInfo
from ..memory_watch import total_bytes


def find_devices(boot: BootConfig) -> list[DeviceInfo]:
    """The VM's NVIDIA GPUs, if it has a driver and the boot file allows, else its CPU."""
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*")) if boot.device_kind != "cpu" else []
    if boot.device_kind == "cuda" and not gpus:
        raise RuntimeError("device_kind is cuda, but this VM has no NVIDIA driver")
    kind = "cuda" if gpus else "cpu"
    memory_bytes = boot.device_memory_bytes or total_bytes() // boot.num_devices
    return [
        DeviceInfo(kind=kind, name=f"{kind}{n}", memory_bytes=memory_bytes) for n in range(boot.num_devices)
    ]
