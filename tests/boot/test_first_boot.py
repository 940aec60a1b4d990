"""What a VM's first script does when something fails, and how it ends the VM without an agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from http_answers import Answer
from makara.manager.boot import first_boot
from makara.protocol.messages import BootConfig, VmEnding
from metadata import AzureMetadata, serving

Shim = Callable[[str, str], Path]


def test_an_older_python_of_an_image_loads_the_script() -> None:
    """Amazon Linux 2023 has 3.9. Found: `str | None` in a signature."""
    checker = str(Path(sys.executable).with_name("basedpyright"))
    found = subprocess.run(
        [checker, "--pythonversion", "3.9", first_boot.__file__], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout


@pytest.fixture
def shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shim:
    """Puts a program into the PATH: it notes its arguments in the file that is returned, and runs a body."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def put(name: str, body: str) -> Path:
        noted = tmp_path / f"{name}.txt"
        (programs / name).write_text(f'#!/bin/sh\necho "$@" >> {noted}\n{body}\n')
        (programs / name).chmod(0o700)
        return noted

    return put


@pytest.fixture(autouse=True)
def powers_nothing_off(shim: Shim) -> None:
    """This machine least of all."""
    shim("systemctl", "echo running")


# ---- what others hold or refuse for a while ----------------------------------------------------------------


def test_what_fails_at_first_is_tried_again(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: apt's lock, which the image's own updates held, ended the VM."""
    monkeypatch.setattr(first_boot, "PAUSES_S", (0.0, 0.0))
    fails_twice = 'test "$DEBIAN_FRONTEND" = noninteractive && test $(wc -l < "$0.count") -gt 2'
    noted = shim("apt-get", f'echo x >> "$0.count"\n{fails_twice}')
    first_boot.install("nftables")
    waits = "-o DPkg::Lock::Timeout=600"
    update, install = f"{waits} update\n", f"{waits} install -y --no-install-recommends nftables\n"
    assert noted.read_text() == 3 * update + install


def test_what_goes_on_failing_is_named(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_boot, "PAUSES_S", (0.0, 0.0))
    noted = shim("pip", "exit 4")
    with pytest.raises(subprocess.CalledProcessError, match="status 4"):
        first_boot.keep_trying("pip", "install", "torch")
    assert noted.read_text() == 3 * "install torch\n"


# ---- the end of a VM that has no agent ---------------------------------------------------------------------

_POWERED_OFF = "is-system-running\npoweroff --force\n"


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[VmEnding], None]:
    """Plays `first_boot.py --end` for a VM with this boot file."""
    monkeypatch.setattr(first_boot, "BOOT", str(tmp_path / "boot.json"))
    monkeypatch.setattr(first_boot, "PAUSE_S", 0)

    def run(ending: VmEnding) -> None:
        boot = BootConfig(
            vm="j-vm0", job="j", manager_url="https://m", join_token="t", directory="/d", ending=ending
        )
        (tmp_path / "boot.json").write_text(boot.model_dump_json())
        first_boot.end()

    return run


def azure_ending(service: AzureMetadata, identity_id: str = "") -> VmEnding:
    url = service.url
    return VmEnding(kind="azure", metadata_url=url, management_url=url, identity_id=identity_id)


def test_a_vm_of_azure_is_deleted_and_then_powered_off(shim: Shim, end: Callable[[VmEnding], None]) -> None:
    """Found: one that never joined was only powered off, which Azure bills on."""
    noted = shim("systemctl", "echo running")
    service = AzureMetadata(identity_id="/subscriptions/s/the one", deletions=[Answer(429), Answer(503)])
    with serving(service):
        end(azure_ending(service, service.identity_id))
    assert service.deleted == [f"/subscriptions/s/resourceGroups/g/{service.name}"]
    assert noted.read_text() == _POWERED_OFF


@pytest.mark.parametrize(
    "broken", [Answer(404), Answer(200, "<html>"), Answer(200, "{}", "application/json")]
)
def test_one_that_cannot_be_deleted_is_powered_off(
    shim: Shim,
    end: Callable[[VmEnding], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: Answer,
) -> None:
    monkeypatch.setattr(first_boot, "END_S", 0.2)
    noted = shim("systemctl", "echo running")
    service = AzureMetadata(broken=broken)
    with serving(service):
        end(azure_ending(service))
    assert noted.read_text() == _POWERED_OFF
    assert "this VM cannot be deleted yet" in capsys.readouterr().err


def test_a_right_that_is_missing_is_told_without_the_token(
    shim: Shim,
    end: Callable[[VmEnding], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(first_boot, "END_S", 0.2)
    shim("systemctl", "echo running")
    service = AzureMetadata(deletions=[Answer(403, "no right")] * 10_000)
    with serving(service):
        end(azure_ending(service))
    told = capsys.readouterr().err
    assert "403" in told
    assert service.token not in told


def test_a_vm_of_aws_is_powered_off(shim: Shim, end: Callable[[VmEnding], None]) -> None:
    noted = shim("systemctl", "echo starting")
    end(VmEnding(kind="power_off"))
    assert noted.read_text() == _POWERED_OFF


def test_a_vm_that_reboots_is_left_alone(shim: Shim, end: Callable[[VmEnding], None]) -> None:
    noted = shim("systemctl", "echo stopping; exit 1")
    service = AzureMetadata()
    with serving(service):
        end(azure_ending(service))
    assert service.deleted == []
    assert noted.read_text() == "is-system-running\n"


@pytest.mark.parametrize("content", [None, "", json.dumps({"ending": {}})])
def test_a_vm_whose_boot_file_is_no_use_is_powered_off(
    shim: Shim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(first_boot, "BOOT", str(tmp_path / "boot.json"))
    if content is not None:
        (tmp_path / "boot.json").write_text(content)
    noted = shim("systemctl", "echo running")
    with pytest.raises((OSError, ValueError, KeyError)):
        first_boot.end()
    assert noted.read_text() == _POWERED_OFF


def test_it_is_the_script_itself_that_ends_the_vm(shim: Shim) -> None:
    """By the option that the timer and the unit give."""
    noted = shim("systemctl", "echo stopping")
    subprocess.run([sys.executable, first_boot.__file__, "--end"], check=True)
    assert noted.read_text() == "is-system-running\n"
