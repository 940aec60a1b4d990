"""podman on a machine that was not set up for it: images built and containers run, as root and nothing else.

Needs root and Debian's packages podman, crun, netavark, aardvark-dns, iptables, catatonit, and debootstrap
where no image can be pulled. What podman keeps lies in a folder of its own; the machine's own containers,
settings and cgroups are not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NEEDED = ("podman", "crun", "iptables", "catatonit", "unshare", "nsenter")
RELEASE = "bookworm"  # of Debian

# crun refuses cgroups of the hybrid kind, as some VMs have them; the right to raise limits may be missing.
_CONTAINERS = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
cgroups = "disabled"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{folder}/networks"
"""
_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""
_NAMESPACE = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; echo made; exec sleep infinity"


class Podman:
    """Images stay in `folder` for the next time. Use as a context: containers live in its mount namespace."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if os.geteuid() != 0 or missing:
            packages = "podman crun netavark aardvark-dns iptables catatonit debootstrap"
            raise RuntimeError(f"containers need root and apt-get install {packages}; missing: {missing}")
        self._folder = folder
        for name, text in (("containers.conf", _CONTAINERS), ("storage.conf", _STORAGE)):
            (folder / "networks").mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text.format(folder=folder))

    def __enter__(self) -> Podman:
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", _NAMESPACE], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "made\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.communicate()

    def run(self, *arguments: str) -> str:
        """`podman ...`; what it prints. Raises `RuntimeError` with its errors."""
        return self.call(["podman", *arguments])

    def call(self, command: list[str], **environment: str) -> str:
        """Any program that speaks to podman."""
        own = {
            "CONTAINERS_CONF": str(self._folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self._folder / "storage.conf"),
            "DISABLE_HC_SYSTEMD": "true",
        }
        inside = ["nsenter", "-t", str(self._holder.pid), "-m", f"--wdns={os.getcwd()}", *command]
        variables = {**os.environ, **own, **environment}
        done = subprocess.run(inside, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-6000:]}")
        return done.stdout

    def has(self, image: str) -> bool:
        return image in self.run("images", "--format", "{{.Repository}}:{{.Tag}}").splitlines()

    def build(self, file: Path, context: Path, image: str, **arguments: str) -> None:
        """With this machine's network and pip settings, of which nothing stays in the image."""
        given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        mounts = [f"--volume={source}:{place}:ro" for source, place in self._pip_mounts()]
        command = ["build", "--isolation", "chroot", "--network", "host", "--pull=never", *mounts, *given]
        self.run(*command, "-f", str(file), "-t", image, str(context))

    def have_python(self, image: str) -> None:
        """The base image: pulled, or else made of Debian's Python under the same name."""
        if self.has(image):
            return
        try:
            self.run("pull", "--quiet", image)
        except RuntimeError:
            self._import_debian(image)

    def _import_debian(self, image: str) -> None:
        root = self._folder / "debian"
        packages = "--include=python3-venv,ca-certificates"
        self.call(["debootstrap", "--variant=minbase", packages, RELEASE, str(root)])
        archive = self._folder / "debian.tar"
        self.call(["tar", "-C", str(root), "-cf", str(archive), "."])
        self.run("import", str(archive), image)
        archive.unlink()
        shutil.rmtree(root)

    def _pip_mounts(self) -> list[tuple[str, str]]:
        """A file with all settings of this machine's pip, and the folders that it names."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        ).stdout
        pairs = [line.partition("=") for line in listed.splitlines()]
        settings = {name.rpartition(".")[2]: value.strip("'") for name, _, value in pairs}
        settings.pop("require-virtualenv", None)
        file = self._folder / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        words = " ".join(settings.values()).replace("file://", "").split()
        # Not the very folders: an index of files points to its neighbours.
        folders = {
            str(Path(*Path(word).parts[:3])) for word in words if Path(word).exists() and word[0] == "/"
        }
        return [(str(file), "/etc/pip.conf"), *((folder, folder) for folder in sorted(folders))]
