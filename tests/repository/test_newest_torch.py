"""The tests of exactness, with the newest torch that Makara may be installed with. `make soak` runs this.

It installs CPU builds, from PyTorch's index or from that in MAKARA_TORCH_INDEX, into a virtual environment of
its own. Where the newest is installed already, that is said, and the tests are run with it as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from newest_torch import CPU_BUILDS, newest_allowed, torch_range, versions_that_pip_finds
from packaging.version import Version

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]
OF_EXACTNESS = ("test_sections.py", "test_sums.py", "test_reduction.py", "test_commit.py", "test_check.py")


def test_the_tests_of_exactness_pass_with_the_newest_torch_that_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = newest_allowed(versions_that_pip_finds(), torch_range(ROOT))
    installed = Version(torch.__version__).public
    with capsys.disabled():
        if newest == installed:
            print(f"\nthe newest torch that is allowed is the installed one, {installed}")
            python = sys.executable
        else:
            print(f"\ntorch {newest} instead of {installed}")
            python = installed_with(newest, tmp_path / "venv")
    tests = [str(next((ROOT / "tests").rglob(name))) for name in OF_EXACTNESS]
    subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, check=True)


def installed_with(version: str, folder: Path) -> str:
    """A virtual environment with that torch, and all else as it is pinned; its Python."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "torch==" not in line]
    (folder / "constraints.txt").write_text("\n".join(pins))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("MAKARA_TORCH_INDEX", CPU_BUILDS)
    subprocess.run([*install, "--index-url", index, f"torch=={version}"], check=True)
    subprocess.run([*install, "-c", str(folder / "constraints.txt"), "-e", f"{ROOT}[dev]"], check=True)
    return python
