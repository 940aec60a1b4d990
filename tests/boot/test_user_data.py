"""What a cloud is given for a VM: small, the same each time, and without a secret that lasts."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from makara.manager.authority import Authority
from makara.manager.boot.payload import Payload, payload
from makara.manager.boot.user_data import MOST_BYTES, TooLarge, render, user_data
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import BootConfig

ATTEMPT = Attempt(vm="j-vm0", number=2, placement=Placement(provider="aws", zone="eu-west-1a"))
PAYLOAD = Payload(wheel="makara-1-py3-none-any.whl", wheel_sha256="a" * 64, constraints_sha256="b" * 64)


@pytest.fixture
def boot(tmp_path: Path) -> BootConfig:
    return BootConfig(
        vm="j-vm0",
        job="j",
        manager_url="https://manager.example:8700",
        ca=Authority(tmp_path, ["manager.example"]).certificate,
        join_token="id.one-use",
        directory="/home/of/the/manager/vms/j-vm0",
    )


def written(data: bytes) -> dict[str, dict[str, Any]]:
    return {file["path"]: file for file in yaml.safe_load(data)["write_files"]}


def test_an_attempt_has_the_same_bytes_each_time(boot: BootConfig) -> None:
    data = render(ATTEMPT, boot)
    assert data == render(ATTEMPT, boot.model_copy()) == user_data(ATTEMPT, boot, payload())
    assert data.startswith(b"#cloud-config\n")
    assert len(data) <= MOST_BYTES


def test_what_no_cloud_would_take_is_refused_before_it_is_asked(boot: BootConfig) -> None:
    with pytest.raises(TooLarge, match=r"j-vm0-2: \d+ bytes, 16384 are allowed"):
        user_data(ATTEMPT, boot.model_copy(update={"ca": "x" * MOST_BYTES}), PAYLOAD)


def test_the_first_that_a_vm_does_is_to_see_to_its_end(boot: BootConfig) -> None:
    config = yaml.safe_load(user_data(ATTEMPT, boot, PAYLOAD))
    assert next(iter(config)) == "bootcmd"  # cloud-init runs it before it writes a file
    (command,) = config["bootcmd"]
    assert command[:2] == ["systemd-run", "--no-block"]
    assert "--on-active=1800" in command
    assert command[-1] == "test -s /var/lib/makara/worker.token || systemctl poweroff --force"


def test_the_boot_file_is_for_root_alone_and_of_that_machine(boot: BootConfig) -> None:
    files = written(user_data(ATTEMPT, boot, PAYLOAD))
    assert files["/etc/makara/boot.json"]["permissions"] == "0600"
    there = BootConfig.model_validate_json(files["/etc/makara/boot.json"]["content"])
    assert there == boot.model_copy(update={"directory": "/var/lib/makara"})
    assert json.loads(files["/etc/makara/payload.json"]["content"])["wheel_sha256"] == "a" * 64


def test_the_join_token_alone_is_secret_and_only_in_the_boot_file(boot: BootConfig, tmp_path: Path) -> None:
    data = user_data(ATTEMPT, boot, PAYLOAD).decode()
    assert data.count(boot.join_token) == 1
    assert "PRIVATE KEY" not in data
    secret_files = [
        f for f in tmp_path.iterdir() if stat.S_IMODE(f.stat().st_mode) == 0o600 and "key" in f.name
    ]
    assert secret_files
    assert all(line not in data for f in secret_files for line in f.read_text().splitlines())


def test_the_agent_starts_at_each_boot_and_its_end_is_the_vms(boot: BootConfig) -> None:
    data = user_data(ATTEMPT, boot, PAYLOAD)
    unit = written(data)["/etc/systemd/system/makara-agent.service"]["content"]
    assert "ExecStart=/usr/bin/python3 /etc/makara/first_boot.py" in unit
    assert "SuccessAction=poweroff" in unit
    assert "FailureAction=poweroff" in unit
    assert ["systemctl", "enable", "makara-agent.service"] in yaml.safe_load(data)["runcmd"]


@pytest.mark.clouds
def test_cloud_init_finds_no_fault_in_it(boot: BootConfig, tmp_path: Path) -> None:
    assert shutil.which("cloud-init") is not None, "apt-get install cloud-init"
    file = tmp_path / "user-data"

    def checked(data: bytes) -> subprocess.CompletedProcess[str]:
        file.write_bytes(data)
        command = ["cloud-init", "schema", "--config-file", str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    data = user_data(ATTEMPT, boot, payload())
    found = checked(data)
    assert "Valid" in found.stdout + found.stderr
    assert found.returncode == 0
    assert checked(data.replace(b"bootcmd:", b"bootcmd: 7\nother:")).returncode != 0
