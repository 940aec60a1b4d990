"""The unit that starts the agent, as the script reads it that plays systemd for VMs of tests."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from makara.manager.boot import end_vm
from repository import ROOT

UNIT = ROOT / "deploy" / "makara-agent.service"


@pytest.fixture
def systemctl() -> ModuleType:
    path = ROOT / "tests" / "support" / "debian_vm" / "systemctl.py"
    spec = importlib.util.spec_from_file_location("systemctl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_of_the_unit_is_one_that_vms_of_tests_play(systemctl: ModuleType) -> None:
    found = systemctl.settings_of(str(UNIT))
    assert found["execstart"] == "/usr/bin/python3 /etc/makara/first_boot.py"
    assert found["failureaction"] == found["successaction"] == "poweroff"


def test_a_setting_that_they_do_not_play_is_named(systemctl: ModuleType, tmp_path: Path) -> None:
    unit = tmp_path / "some.service"
    unit.write_text(UNIT.read_text().replace("[Install]", "Restart=always\n[Install]"))
    with pytest.raises(SystemExit, match="restart: not played here"):
        systemctl.settings_of(str(unit))


def test_a_trainer_that_is_killed_for_memory_does_not_end_the_vm(systemctl: ModuleType) -> None:
    """Found: by default systemd ends the whole unit then, which powers the VM off."""
    assert systemctl.settings_of(str(UNIT))["oompolicy"] == "continue"


def test_a_vm_whose_agent_ends_is_deleted_where_a_shutdown_is_billed_on(systemctl: ModuleType) -> None:
    found = systemctl.settings_of(str(UNIT))
    program, for_s = found["execstoppost"].rsplit(maxsplit=1)
    assert program == "/usr/bin/python3 /etc/makara/end_vm.py /etc/makara/boot.json"
    assert int(found["timeoutstopsec"]) >= int(for_s) + 3 * end_vm.TIMEOUT_S


@pytest.mark.clouds
def test_systemd_finds_no_fault_in_it(tmp_path: Path) -> None:
    def checked(text: str) -> str:
        unit = tmp_path / UNIT.name
        unit.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert checked(UNIT.read_text()) == ""
    assert "OOM policy" in checked(UNIT.read_text().replace("OOMPolicy=continue", "OOMPolicy=go-on"))


def test_a_manager_is_started_again_for_ever_and_tells_the_console() -> None:
    """One that gave up, or that is seen by nobody, would be billed on."""
    lines = (ROOT / "deploy" / "makara-manager.service").read_text().splitlines()
    wanted = {"Restart=always", "StartLimitIntervalSec=0", "StandardOutput=journal+console"}
    assert wanted <= set(lines)
    assert lines.index("StartLimitIntervalSec=0") < lines.index("[Service]")  # elsewhere systemd ignores it


def test_the_first_boot_of_a_managers_vm_is_not_repeated_once_it_is_installed() -> None:
    lines = (ROOT / "deploy" / "makara-manager-boot.service").read_text().splitlines()
    assert lines.index("ConditionPathExists=!/etc/makara-manager/installed") < lines.index("[Service]")
