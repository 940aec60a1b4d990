"""The agent's unit and the timer of user data, run by systemd itself; the agent is a few lines of shell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from makara.manager.boot.payload import Payload
from makara.manager.boot.user_data import user_data
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import BootConfig, VmEnding
from metadata import AzureMetadata, serving
from systemd_machine import SystemdMachine
from vm_image import make_systemd
from written_files import files_in

pytestmark = pytest.mark.clouds

_UNIT = "makara-agent.service"
# After a start in which nothing else is done: what comes in between is not what is tested.
_INSTEAD = """[Service]
ExecStart=
ExecStart=/bin/sh /agent.sh
StandardOutput=append:/agent.log
StandardError=append:/agent.log
"""
_OBEYS = "trap 'exit 0' TERM; {} & while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("systemd")
    yield make_systemd(folder)
    shutil.rmtree(folder)


@pytest.fixture
def service() -> Iterator[AzureMetadata]:
    made = AzureMetadata()
    with serving(made):
        yield made


def user_data_of(service: AzureMetadata) -> bytes:
    boot = BootConfig(
        vm="j-vm0",
        job="j",
        manager_url="https://manager.example:8700",
        join_token="id.one-use",
        directory="/d",
        ending=VmEnding(kind="azure", metadata_url=service.url, management_url=service.url),
    )
    attempt = Attempt(vm="j-vm0", placement=Placement(provider="azure"))
    payload = Payload(wheel="w", wheel_sha256="a", constraints_sha256="b")
    return user_data(attempt, boot, payload)


@pytest.fixture
def machine(root: Path, service: AzureMetadata) -> SystemdMachine:
    """It has what user data writes."""
    made = SystemdMachine(root)
    for path, content in files_in(user_data_of(service)).items():
        made.write(path.lstrip("/"), content)
    made.write(f"etc/systemd/system/{_UNIT}.d/instead.conf", _INSTEAD)
    made.link(f"etc/systemd/system/multi-user.target.wants/{_UNIT}", f"../{_UNIT}")
    return made


@pytest.mark.parametrize(
    "agent",
    [
        "exit 0",
        "exit 1",
        "sleep 1000 & kill -9 $$",
        _OBEYS.format("(sleep 1; systemctl stop makara-agent)"),
    ],
)
def test_when_the_agent_ends_its_vm_is_deleted_and_off(
    machine: SystemdMachine, service: AzureMetadata, agent: str
) -> None:
    machine.write("agent.sh", agent)
    assert machine.run() == "off"
    assert service.deleted == [f"/subscriptions/s/resourceGroups/g/{service.name}"]


@pytest.mark.parametrize(
    ("agent", "ends"),
    [
        ("(sleep 1; systemctl reboot) & sleep 1000", "reboot"),
        (_OBEYS.format("(sleep 1; systemctl reboot)"), "reboot"),
        ("systemctl poweroff; exit 0", "off"),
    ],
)
def test_a_system_that_shuts_down_deletes_nothing(
    machine: SystemdMachine, service: AzureMetadata, agent: str, ends: str
) -> None:
    """It may be back; or somebody turns it off, who knows why."""
    machine.write("agent.sh", agent)
    assert machine.run() == ends
    assert service.deleted == []


def test_an_agent_that_never_joins_is_ended_by_the_timer(
    machine: SystemdMachine, service: AzureMetadata
) -> None:
    (command,) = yaml.safe_load(user_data_of(service))["bootcmd"]
    timer = [word.replace("--on-active=1800", "--on-active=2") for word in command]
    assert timer != command
    quoted = " ".join(f"'{word}'" for word in timer)
    machine.write("agent.sh", f"{quoted}\nsleep 1000")
    assert machine.run() == "off"
    assert service.deleted == [f"/subscriptions/s/resourceGroups/g/{service.name}"]


def test_a_vm_whose_deletion_is_refused_is_off_all_the_same(
    machine: SystemdMachine, service: AzureMetadata
) -> None:
    unit = (machine.root / "etc/systemd/system" / _UNIT).read_text()
    assert "boot.json 240\n" in unit
    machine.write(f"etc/systemd/system/{_UNIT}", unit.replace("boot.json 240\n", "boot.json 0\n"))
    machine.write("agent.sh", "exit 1")
    service.client_id = "another"
    assert machine.run() == "off"
    assert service.deleted == []
