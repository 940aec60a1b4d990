"""How a VM is ended that has no agent, or no manager: by one script, whoever calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from http_answers import Answer
from makara.manager.boot import end_vm
from makara.protocol.messages import BootConfig, VmEnding
from metadata import AzureMetadata, serving
from pauses import Pauses
from shims import Shims

_POWERED_OFF = "is-system-running\npoweroff --force\n"
End = Callable[[VmEnding, float], None]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(end_vm, "time", made)
    return made


@pytest.fixture
def shims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shims:
    """Nothing is powered off, this machine least of all."""
    made = Shims(tmp_path, monkeypatch)
    made.put("systemctl", "echo running")
    return made


@pytest.fixture
def end(shims: Shims, tmp_path: Path) -> End:
    """Of a VM with this boot file."""

    def run(ending: VmEnding, for_s: float) -> None:
        boot = BootConfig(
            vm="j-vm0", job="j", manager_url="https://m", join_token="t", directory="/d", ending=ending
        )
        (tmp_path / "boot.json").write_text(boot.model_dump_json())
        end_vm.main(str(tmp_path / "boot.json"), for_s)

    return run


def azure_ending(service: AzureMetadata, identity_id: str = "") -> VmEnding:
    url = service.url
    return VmEnding(kind="azure", metadata_url=url, management_url=url, identity_id=identity_id)


def test_a_vm_of_azure_is_deleted_and_then_powered_off(shims: Shims, end: End, pauses: Pauses) -> None:
    """Found: one that never joined was only powered off, which Azure bills on."""
    noted = shims.put("systemctl", "echo running")
    service = AzureMetadata(identity_id="/subscriptions/s/the one", deletions=[Answer(429), Answer(503)])
    with serving(service):
        end(azure_ending(service, service.identity_id), 240.0)
    assert service.deleted == [f"/subscriptions/s/resourceGroups/g/{service.name}"]
    assert pauses.slept == [end_vm.PAUSE_S, end_vm.PAUSE_S]
    assert noted.read_text() == _POWERED_OFF


def test_what_was_accepted_and_did_not_happen_is_asked_for_again(
    shims: Shims, end: End, pauses: Pauses
) -> None:
    noted = shims.put("systemctl", "echo running")
    service = AzureMetadata()
    with serving(service):
        end(azure_ending(service), 600.0)
    assert len(service.deleted) == 3
    assert pauses.slept == [end_vm.DELETED_S, end_vm.DELETED_S]
    assert noted.read_text() == _POWERED_OFF


@pytest.mark.parametrize(
    "broken", [Answer(404), Answer(200, "<html>"), Answer(200, "{}", "application/json")]
)
def test_one_that_cannot_be_deleted_is_powered_off(
    shims: Shims, end: End, pauses: Pauses, capsys: pytest.CaptureFixture[str], broken: Answer
) -> None:
    noted = shims.put("systemctl", "echo running")
    service = AzureMetadata(broken=broken)
    with serving(service):
        end(azure_ending(service), 60.0)
    assert pauses.now == 60.0
    assert noted.read_text() == _POWERED_OFF
    assert "this VM cannot be deleted yet" in capsys.readouterr().err


@pytest.mark.usefixtures("pauses")
def test_a_right_that_is_missing_is_told_without_the_token(
    end: End, capsys: pytest.CaptureFixture[str]
) -> None:
    service = AzureMetadata(deletions=[Answer(403, "no right")] * 10_000)
    with serving(service):
        end(azure_ending(service), 60.0)
    told = capsys.readouterr().err
    assert "403" in told
    assert service.token not in told


def test_a_vm_of_aws_is_powered_off(shims: Shims, end: End) -> None:
    noted = shims.put("systemctl", "echo starting")
    end(VmEnding(kind="power_off"), 240.0)
    assert noted.read_text() == _POWERED_OFF


def test_a_vm_that_reboots_is_left_alone(shims: Shims, end: End) -> None:
    noted = shims.put("systemctl", "echo stopping; exit 1")
    service = AzureMetadata()
    with serving(service):
        end(azure_ending(service), 240.0)
    assert service.deleted == []
    assert noted.read_text() == "is-system-running\n"


@pytest.mark.parametrize("content", [None, "", json.dumps({"ending": {}})])
def test_a_vm_whose_boot_file_is_no_use_is_powered_off(
    shims: Shims, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "boot.json").write_text(content)
    noted = shims.put("systemctl", "echo running")
    with pytest.raises((OSError, ValueError, KeyError)):
        end_vm.main(str(tmp_path / "boot.json"), 240.0)
    assert noted.read_text() == _POWERED_OFF


def test_one_that_stays_on_is_told_to_who_called(shims: Shims, tmp_path: Path) -> None:
    """The timer's shell and the unit have a power-off of their own."""
    shims.put("systemctl", "test $1 = is-system-running")
    (tmp_path / "boot.json").write_text(json.dumps({"ending": {"kind": "power_off"}}))
    done = subprocess.run([sys.executable, end_vm.__file__, str(tmp_path / "boot.json"), "240"], check=False)
    assert done.returncode != 0


def test_the_script_is_given_its_boot_file_and_a_time(shims: Shims, tmp_path: Path) -> None:
    """As by the timers and the unit."""
    noted = shims.put("systemctl", "echo running")
    service = AzureMetadata()
    with serving(service):
        boot = {"ending": azure_ending(service).model_dump()}
        (tmp_path / "boot.json").write_text(json.dumps(boot))
        subprocess.run(
            [sys.executable, "-I", end_vm.__file__, str(tmp_path / "boot.json"), "240"], check=True
        )
    assert len(service.deleted) == 1
    assert noted.read_text() == _POWERED_OFF
