"""What a cloud is given for a VM: small, the same each time, and without a secret that lasts."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from makara.manager.authority import Authority
from makara.manager.boot import end_vm
from makara.manager.boot.cloud_config import MOST_BYTES, TooLarge
from makara.manager.boot.payload import Payload, payload
from makara.manager.boot.user_data import render, user_data
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import BootConfig, NoticeSource, StoreIdentity, VmEnding
from written_files import files_in

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


def test_an_attempt_has_the_same_bytes_each_time(boot: BootConfig) -> None:
    data = render(ATTEMPT, boot)
    assert data == render(ATTEMPT, boot.model_copy()) == user_data(ATTEMPT, boot, payload())
    assert data.startswith(b"#cloud-config\n")
    assert len(data) <= MOST_BYTES


def test_another_time_and_another_process_pack_the_same_bytes(boot: BootConfig, tmp_path: Path) -> None:
    """A cloud is asked again with the same token, and refuses other user data with it."""
    program = (
        "import sys, time; time.time = lambda: 7e8\n"
        "from makara.manager.boot.user_data import *\n"
        f"attempt = Attempt.model_validate_json({ATTEMPT.model_dump_json()!r})\n"
        "boot = BootConfig.model_validate_json(open(sys.argv[1]).read())\n"
        "sys.stdout.buffer.write(render(attempt, boot))\n"
    )
    (tmp_path / "boot.json").write_text(boot.model_dump_json())
    command = [sys.executable, "-c", program, str(tmp_path / "boot.json")]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout == render(ATTEMPT, boot)


def test_what_no_cloud_would_take_is_refused_before_it_is_asked(boot: BootConfig) -> None:
    with pytest.raises(TooLarge, match=r"j-vm0-2: \d+ bytes, 16384 are allowed"):
        user_data(ATTEMPT, boot.model_copy(update={"ca": secrets.token_hex(MOST_BYTES)}), PAYLOAD)


def test_the_longest_names_of_clouds_fit(boot: BootConfig) -> None:
    group = f"/subscriptions/{'0' * 36}/resourceGroups/{'g' * 90}"
    identity = f"{group}/providers/Microsoft.ManagedIdentity/userAssignedIdentities/{'i' * 128}"
    told = {
        "vm": f"{'j' * 40}-4f2a91-vm100",
        "job": f"{'j' * 40}-4f2a91",
        "manager_url": f"https://{'m' * 200}:8700",
        "join_token": "t" * 80,
        "notices": NoticeSource(kind="azure"),
        "ending": VmEnding(kind="azure", identity_id=identity),
        "store_identity": StoreIdentity(kind="azure", identity_id=identity),
    }
    data = render(ATTEMPT, boot.model_copy(update=told))
    assert len(data) <= MOST_BYTES - 4096  # room for what the scripts have yet to learn


def test_the_first_that_a_vm_does_is_to_see_to_its_end(boot: BootConfig) -> None:
    config = yaml.safe_load(user_data(ATTEMPT, boot, PAYLOAD))
    assert next(iter(config)) == "bootcmd"  # cloud-init runs it before it writes a file
    (command,) = config["bootcmd"]
    assert command[:2] == ["systemd-run", "--no-block"]
    assert "--on-active=1800" in command
    end = "timeout 300 python3 /etc/makara/end_vm.py /etc/makara/boot.json 240"
    assert command[-1] == f"test -s /var/lib/makara/worker.token || {end} || systemctl poweroff --force"
    assert 240 + 3 * end_vm.TIMEOUT_S <= 300


@pytest.mark.parametrize(("joined", "is_deleted"), [(True, False), (False, True)])
def test_a_vm_that_has_not_joined_in_time_deletes_itself_and_is_powered_off(
    boot: BootConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool, is_deleted: bool
) -> None:
    """Found: on Azure it was only powered off, and billed on."""
    config = yaml.safe_load(user_data(ATTEMPT, boot, PAYLOAD))
    done = tmp_path / "done"
    done.touch()
    for name in ("python3", "systemctl"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {done}\nexit 1\n')
        program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "worker.token").write_text("x" if joined else "")
    subprocess.run(["/bin/sh", "-c", config["bootcmd"][0][-1].replace("/var/lib/makara", str(tmp_path))])
    ends = ["python3 /etc/makara/end_vm.py /etc/makara/boot.json 240", "systemctl poweroff --force"]
    assert done.read_text().splitlines() == (ends if is_deleted else [])


def test_the_boot_file_is_for_root_alone_and_of_that_machine(boot: BootConfig) -> None:
    data = user_data(ATTEMPT, boot, PAYLOAD)
    modes = {file["path"]: file["permissions"] for file in yaml.safe_load(data)["write_files"]}
    assert modes["/etc/makara/boot.json"] == "0600"
    files = files_in(data)
    there = BootConfig.model_validate_json(files["/etc/makara/boot.json"])
    assert there == boot.model_copy(update={"directory": "/var/lib/makara"})
    assert json.loads(files["/etc/makara/payload.json"])["wheel_sha256"] == "a" * 64


def test_the_join_token_alone_is_secret_and_only_in_the_boot_file(boot: BootConfig, tmp_path: Path) -> None:
    files = files_in(user_data(ATTEMPT, boot, PAYLOAD))
    data = user_data(ATTEMPT, boot, PAYLOAD).decode() + "".join(files.values())
    assert data.count(boot.join_token) == files["/etc/makara/boot.json"].count(boot.join_token) == 1
    assert "PRIVATE KEY" not in data
    secret_files = [
        f for f in tmp_path.iterdir() if stat.S_IMODE(f.stat().st_mode) == 0o600 and "key" in f.name
    ]
    assert secret_files
    assert all(line not in data for f in secret_files for line in f.read_text().splitlines())


def test_the_agent_starts_at_each_boot_and_its_end_is_the_vms(boot: BootConfig) -> None:
    data = user_data(ATTEMPT, boot, PAYLOAD)
    unit = files_in(data)["/etc/systemd/system/makara-agent.service"]
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
