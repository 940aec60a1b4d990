"""What a VM's first script does when something fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from makara.manager.boot import end_vm, first_boot
from makara.manager.hosting import installing, manager_boot
from shims import Shims


@pytest.mark.parametrize("script", [first_boot, end_vm, manager_boot, installing], ids=lambda s: s.__name__)
def test_an_older_python_of_an_image_loads_the_scripts(script: ModuleType) -> None:
    """Amazon Linux 2023 has 3.9. Found: `str | None` in a signature."""
    checker = str(Path(sys.executable).with_name("basedpyright"))
    found = subprocess.run(
        [checker, "--pythonversion", "3.9", str(script.__file__)], capture_output=True, text=True, check=False
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
