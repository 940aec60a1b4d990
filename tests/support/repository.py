"""The files of this repository."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def repository_files(root: Path) -> tuple[Path, ...]:
    """What git tracks below `root`; in a copy without git, all that lies in the folders of the packages.

    A clone also holds what others wrote into it: a demo's VMs, checkpoints, a user's own model.
    """
    if (root / ".git").exists() and shutil.which("git"):
        # A checkout may belong to another user, as in a container: git refuses to read it unless told to.
        command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [root / name for name in listed.split("\0") if name]
    else:
        packages: list[str] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
            "packages"
        ]
        tops = {package.split(".")[1] for package in packages}
        paths = [path for top in tops for path in (root / top).rglob("*")]
    return tuple(path for path in sorted(paths) if path.is_file() and "__pycache__" not in path.parts)
