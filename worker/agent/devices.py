"""Finds a VM's devices, and shows each trainer its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ...protocol.gpus import DRIVERS, VISIBLE, usable_bytes
from ...protocol.messages import BootConfig, DeviceInfo, DeviceKind
from ..memory_watch import total_bytes

_ASK_TORCH = """
import torch
for n in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(n).total_memory)
"""


def find_devices(boot: BootConfig) -> list[DeviceInfo]:
    """A device for each trainer: the VM's GPUs, if torch finds some and the boot file allows, else its CPU.

    Raises `RuntimeError` if there are fewer GPUs than trainers.
    """
    gpus = gpu_memories() if boot.device_kind != "cpu" else []
    wanted = boot.num_devices
    if boot.device_kind == "cuda" and not gpus:
        raise RuntimeError("device_kind is cuda, but torch finds no GPU on this VM")
    if gpus and wanted > len(gpus):
        raise RuntimeError(f"workers_per_node is {wanted}, but torch finds {len(gpus)} GPU(s) on this VM")
    kind = "cuda" if gpus else "cpu"
    sizes = gpus or [total_bytes() // wanted] * wanted
    cap = boot.device_memory_bytes
    return [
        DeviceInfo(kind=kind, name=f"{kind}{n}", memory_bytes=min(size, cap or size))
        for n, size in enumerate(sizes[:wanted])
    ]


def gpu_memories(drivers: Path = DRIVERS) -> list[int]:
    """Usable bytes of each GPU that trainers started here would find; none without a driver, whose folder
    `drivers` is. Another process asks torch, which is too large to keep loaded here."""
    if not any(drivers.glob("*")):
        return []
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [usable_bytes(int(line)) for line in answer.stdout.split()]


def environment_of_device(
    kind: DeviceKind, index: int, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that show a trainer its own GPU alone, of those that the agent is shown."""
    if kind != "cuda":
        return {}
    shown = inherited.get(VISIBLE)
    return {VISIBLE: str(index) if shown is None else shown.split(",")[index].strip()}
