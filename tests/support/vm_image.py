"""What VMs of stand-in clouds boot from: Debian 12 with cloud-init, bare or with torch.

Needs root, debootstrap and a way to Debian's packages. The network of a test's VMs leads nowhere: what pip
installs in them lies in the image, and no other index is asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from makara.manager.boot.payload import constraints, torch_version
from repository import ROOT

RELEASE = "bookworm"
PYTHON = "3.11"  # of that release
WHEELS = "srv/wheels"

_PACKAGES = ("cloud-init", "python3-venv", "nftables", "iproute2", "procps", "ca-certificates")
_FILES = ROOT / "tests" / "support" / "debian_vm"
_PROGRAMS = {"boot_vm.sh": "boot-vm", "systemctl.py": "systemctl", "systemd_run.py": "systemd-run"}
_PIP = f"""[global]
no-index = true
find-links = /{WHEELS}
disable-pip-version-check = true
[install]
compile = no
"""
# The user data of a cloud's own service, as a file.
_CLOUD_INIT = "datasource_list: [NoCloud]\nnetwork: {config: disabled}\n"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive"}


@dataclass(frozen=True)
class Image:
    """Folders that lie over each other, the topmost first."""

    layers: tuple[Path, ...]


@dataclass(frozen=True)
class Images:
    bare: Image
    with_torch: Image
    """Has torch as images for deep learning have it: in an environment of its own."""


def make_images(folder: Path) -> Images:
    """Takes a minute or two. Raises `RuntimeError` that says what is missing or what failed."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise RuntimeError("VMs of stand-in clouds need root and a package: apt-get install debootstrap")
    root, torch = folder / "debian", folder / "torch"
    _debian(root)
    _wheels(root / WHEELS)
    _inside(root, "python3", "-m", "venv", "/opt/pytorch")
    _inside(root, "/opt/pytorch/bin/pip", "install", "--compile", f"torch=={torch_version(None)}")
    (torch / "opt").mkdir(parents=True)
    (root / "opt/pytorch").rename(torch / "opt/pytorch")
    return Images(bare=Image((root,)), with_torch=Image((torch, root)))


def make_systemd(folder: Path) -> Path:
    """The root of a Debian with systemd and Python. Raises `RuntimeError`."""
    root = folder / "systemd"
    packages = "--include=systemd-sysv,dbus,python3"
    _run("debootstrap", "--variant=minbase", packages, RELEASE, str(root), _mirror())
    return root


def _debian(root: Path) -> None:
    _run("debootstrap", "--variant=minbase", RELEASE, str(root), _mirror())
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    _inside(root, "apt-get", "install", "-qq", "-y", "--no-install-recommends", *_PACKAGES)
    for file, program in _PROGRAMS.items():
        shutil.copy(_FILES / file, root / "usr/local/sbin" / program)
        (root / "usr/local/sbin" / program).chmod(0o755)
    (root / "etc/cloud/cloud.cfg.d/99-seed.cfg").write_text(_CLOUD_INIT)
    (root / "etc/pip.conf").write_text(_PIP)
    (root / "etc/environment").touch()


def _mirror() -> str:
    """Where this machine has the same release from."""
    told = _run("apt-get", "indextargets", "--format", "$(CODENAME) $(SITE)", "Created-By: Packages")
    found = [line.split() for line in told.splitlines()]
    sites = [site for release, site in found if release == RELEASE and "debian" in site]
    return next((site for site in sites if not site.endswith("-security")), "http://deb.debian.org/debian")


def _wheels(folder: Path) -> None:
    """What the manager's versions are, for the image's Python."""
    folder.mkdir(parents=True)
    versions = folder / "constraints.txt"
    versions.write_bytes(constraints())
    pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:"]
    wanted = [f"torch=={torch_version(None)}", "-r", str(versions), "-c", str(versions)]
    _run(*pip, "--python-version", PYTHON, "-d", str(folder), *wanted)


def _inside(root: Path, *command: str) -> None:
    _run("chroot", str(root), *command, env=_ENVIRONMENT)


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    """What is mounted on the way is gone with it."""
    done = subprocess.run(["unshare", "--mount", *command], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
