"""Each trainer of a VM with several GPUs has one of its own, with its memory; no GPU is needed here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from makara.protocol.gpus import shown_gpus, usable_bytes
from makara.protocol.messages import BootConfig, Phase
from makara.worker.agent import devices
from makara.worker.agent.devices import environment_of_device, find_devices, gpu_memories
from makara.worker.memory_watch import total_bytes
from scripted_manager import Manager, play

__all__ = ["play"]  # the fixture


def boot(**fields: Any) -> BootConfig:
    values = {"vm": "v1", "job": "j", "manager_url": "", "join_token": "", "directory": ""}
    return BootConfig(**{**values, **fields})


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has torch find GPUs of these sizes."""

    def found(*sizes: int) -> None:
        monkeypatch.setattr(devices, "gpu_memories", lambda: list(sizes))

    return found


def test_a_trainers_memory_is_that_of_its_gpu_and_not_the_hosts(with_gpus: Callable[..., None]) -> None:
    with_gpus(80, 40, 40)
    found = find_devices(boot(num_devices=2))
    assert [(device.kind, device.name, device.memory_bytes) for device in found] == [
        ("cuda", "cuda0", 80),
        ("cuda", "cuda1", 40),
    ]
    capped = find_devices(boot(num_devices=2, device_memory_bytes=60))
    assert [device.memory_bytes for device in capped] == [60, 40]


def test_more_trainers_than_gpus_are_an_error(with_gpus: Callable[..., None]) -> None:
    with_gpus(80)
    with pytest.raises(RuntimeError, match=r"workers_per_node is 2, but torch finds 1 GPU\(s\) on this VM"):
        find_devices(boot(num_devices=2))


def test_trainers_of_a_vm_without_gpus_share_its_memory(with_gpus: Callable[..., None]) -> None:
    with_gpus()
    found = find_devices(boot(num_devices=2))
    assert [(device.kind, device.memory_bytes) for device in found] == [("cpu", total_bytes() // 2)] * 2
    with pytest.raises(RuntimeError, match="torch finds no GPU"):
        find_devices(boot(device_kind="cuda"))


def test_gpus_are_those_that_torch_finds_where_there_is_a_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 85000000000\necho 1000\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    drivers = tmp_path / "gpus"
    assert gpu_memories(drivers) == []
    (drivers / "0000:00:1e.0").mkdir(parents=True)
    assert gpu_memories(drivers) == [usable_bytes(85_000_000_000), 0]


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"]),
        ("1,-1,0", ["1"]),
        ("0,7,1", ["0"]),
        ("", []),
        ("0,0", []),
        ("GPU-ab,0", []),
    ],
)
def test_gpus_are_named_as_the_environment_names_them(
    tmp_path: Path, shown: str | None, found: list[str]
) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert shown_gpus(environment, tmp_path) == []
    for name in ("proc/driver/nvidia/gpus/0000:00:1e.0", "proc/driver/nvidia/gpus/0000:00:1f.0", "dev"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("nvidia3", "nvidia7", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert shown_gpus(environment, tmp_path) == found


def test_gpus_that_are_the_machines_and_not_the_containers_and_parts_of_gpus_are_not_named(
    tmp_path: Path,
) -> None:
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia2").touch()
    assert shown_gpus({}, tmp_path) == ["0"]
    (tmp_path / "proc/driver/nvidia/capabilities/gpu2/mig/gi1").mkdir(parents=True)
    assert shown_gpus({}, tmp_path) == []
    assert shown_gpus({"CUDA_VISIBLE_DEVICES": "MIG-ab"}, tmp_path) == ["MIG-ab"]


@pytest.mark.parametrize(
    ("shown", "own"), [(None, ["0", "1"]), ("3,1", ["3", "1"]), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])]
)
def test_a_trainer_is_shown_one_of_the_gpus_that_its_agent_is_shown(
    shown: str | None, own: list[str]
) -> None:
    inherited = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    each = [environment_of_device("cuda", index, inherited) for index in range(2)]
    assert each == [{"CUDA_VISIBLE_DEVICES": one} for one in own]
    assert environment_of_device("cpu", 0, inherited) == {}


def test_trainers_of_one_vm_start_with_a_gpu_each(
    play: Callable[..., None], with_gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(80, 80, 80)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,4")

    async def scenario(manager: Manager, _agent: object) -> None:
        await manager.order()
        told = await manager.report(lambda report: all(w.phase is Phase.IDLE for w in report.workers))
        assert [device.memory_bytes for device in told.devices] == [80, 80]
        shown = {
            command[command.index("--worker") + 1]: child.environ()["CUDA_VISIBLE_DEVICES"]
            for child in psutil.Process().children()
            if "--worker" in (command := child.cmdline())
        }
        assert shown == {"v1.0": "5", "v1.1": "3"}

    play(scenario, num_devices=2, device_kind="auto")
