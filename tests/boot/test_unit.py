"""The unit that starts the agent, as the script reads it that plays systemd for VMs of tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
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
