"""Which versions of torch Makara may be installed with, and the newest of them that pip finds."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

# Builds without CUDA. PyPI's for Linux bring some gigabytes of it.
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"


def torch_range(root: Path) -> SpecifierSet:
    """What pyproject.toml of `root` allows."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    (found,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    return found.specifier


def newest_allowed(versions: Iterable[str], allowed: SpecifierSet) -> str:
    """Without the build that follows a `+`."""
    return max((Version(one) for one in versions if one in allowed), default=Version("0")).public


def versions_that_pip_finds() -> list[str]:
    """Final releases, in the indexes that pip is set up with. Raises `CalledProcessError`."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Available versions: (.*)", listed)
    return found[1].split(", ") if found else []
