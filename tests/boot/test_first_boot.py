"""What a VM's first script does when something fails."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
from http_answers import Answer, answering
from makara.manager.boot import end_vm, first_boot
from makara.manager.hosting import installing, manager_boot
from pauses import Pauses
from shims import Shims


def test_an_older_python_of_an_image_loads_the_scripts() -> None:
    """Amazon Linux 2023 has 3.9. Found: `str | None` in a signature."""
    checker = str(Path(sys.executable).with_name("basedpyright"))
    scripts = [str(script.__file__) for script in (first_boot, end_vm, manager_boot, installing)]
    found = subprocess.run(
        [checker, "--pythonversion", "3.9", *scripts], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout


def test_what_fails_at_first_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: apt's lock, which the image's own updates held, ended the VM."""
    monkeypatch.setattr(first_boot, "PAUSES_S", (0.0, 0.0))
    fails_twice = 'test "$DEBIAN_FRONTEND" = noninteractive && test $(wc -l < "$0.count") -gt 2'
    noted = Shims(tmp_path, monkeypatch).put("apt-get", f'echo x >> "$0.count"\n{fails_twice}')
    first_boot.install("nftables")
    waits = "-o DPkg::Lock::Timeout=600"
    update, install = f"{waits} update\n", f"{waits} install -y --no-install-recommends nftables\n"
    assert noted.read_text() == 3 * update + install


def test_what_goes_on_failing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_boot, "PAUSES_S", (0.0, 0.0))
    noted = Shims(tmp_path, monkeypatch).put("pip", "exit 4")
    with pytest.raises(subprocess.CalledProcessError, match="status 4"):
        first_boot.keep_trying("pip", "install", "torch")
    assert noted.read_text() == 3 * "install torch\n"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    made = Pauses()
    monkeypatch.setattr(first_boot, "time", made)
    return made


def fetch(*answers: Answer) -> bytes:
    """What a first boot fetches from a manager that answers so; the last answer is given for ever."""
    left = list(answers)
    with answering(lambda _: left.pop(0) if len(left) > 1 else left[0]) as url:
        return first_boot.fetch({"manager_url": url, "job": "j", "join_token": "t", "ca": None}, "torch")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_the_manager_goes_on_refusing_is_not_waited_for(pauses: Pauses, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError):
        fetch(Answer(status))
    assert 60.0 <= pauses.now < 90.0


def test_a_refusal_while_the_manager_restarts_is_waited_for(pauses: Pauses) -> None:
    refusals = [Answer(404)] * 10
    assert fetch(*refusals, Answer(502), *refusals, Answer(200, "2.13.0")) == b"2.13.0"
    assert pauses.now > 60.0


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("fault", [Answer(503), Answer(429), Answer(200, "2.1", num_missing=3)])
def test_a_manager_that_cannot_answer_is_waited_for(fault: Answer) -> None:
    assert fetch(*[fault] * 30, Answer(200, "2.13.0")) == b"2.13.0"


def test_a_manager_that_never_answers_is_given_up(pauses: Pauses) -> None:
    with pytest.raises(http.client.IncompleteRead):
        fetch(Answer(200, "2.1", num_missing=3))
    assert pauses.now >= first_boot.PATIENCE_S


def test_a_driver_that_is_loading_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: Pauses
) -> None:
    monkeypatch.setattr(first_boot, "GPUS", str(tmp_path / "*"))
    sleep = pauses.sleep

    def load(seconds: float) -> None:
        sleep(seconds)
        if pauses.now > 30.0:
            (tmp_path / "0000:00:1e.0").touch()

    monkeypatch.setattr(pauses, "sleep", load)
    first_boot.wait_for_gpus()
    assert 30.0 < pauses.now < 60.0


def test_an_image_without_a_driver_is_named_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: Pauses
) -> None:
    boot = tmp_path / "boot.json"
    boot.write_text(json.dumps({"directory": str(tmp_path / "state"), "device_kind": "cuda"}))
    monkeypatch.setattr(first_boot, "BOOT", str(boot))
    monkeypatch.setattr(first_boot, "GPUS", str(tmp_path / "gpus" / "*"))
    with pytest.raises(SystemExit, match="its image no NVIDIA driver"):
        first_boot.main()
    assert 60.0 <= pauses.now < 90.0
