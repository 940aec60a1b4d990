"""A machine of a Debian with systemd itself: processes of their own, with the network of this machine.

What `debian_vm` plays for VMs of tests is real here; cloud-init, agent and metadata service are not.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

_PATIENCE_S = 300.0
# Units that have no place in a container, or take long there.
_MASKED = ("console-getty.service", "getty.target", "systemd-firstboot.service")
_CGROUP = "makara-systemd-machine"
# $1: its root, $2: its cgroup. In the namespaces that systemd needs; the system call that turns a machine off
# or starts it anew ends them, by SIGINT or SIGHUP of their first process (reboot(2)).
_BOOT = """
set -e
echo $$ > "$2/cgroup.procs"
exec unshare --mount --pid --uts --ipc --cgroup --fork --kill-child sh -c '
set -e
mount --bind "$1" "$1"
mount -t proc none "$1/proc"
mount -t sysfs -o ro none "$1/sys"
mount -t tmpfs none "$1/sys/fs/cgroup"
mount -t cgroup2 none "$1/sys/fs/cgroup"
mount -t tmpfs none "$1/run"
mount --bind /dev "$1/dev"
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$1" /lib/systemd/systemd
' boot "$1"
"""
_ENDS = {130: "off", -2: "off", 129: "reboot", -1: "reboot"}


class SystemdMachine:
    def __init__(self, root: Path) -> None:
        """`root`: of a Debian with systemd, which this changes."""
        self.root = root
        (root / "etc/machine-id").write_text("")
        for unit in _MASKED:
            self.link(f"etc/systemd/system/{unit}", "/dev/null")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def link(self, path: str, to: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).unlink(missing_ok=True)
        (self.root / path).symlink_to(to)

    def run(self) -> str:
        """Boot it, and wait for its end: "off", or "reboot", after which it does not boot."""
        cgroup = _cgroups() / f"{_CGROUP}-{os.getpid()}-{time.monotonic_ns()}"
        cgroup.mkdir()
        try:
            done = subprocess.run(
                ["sh", "-c", _BOOT, "boot", str(self.root), str(cgroup)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_PATIENCE_S,
                check=False,
            )
        finally:
            _remove(cgroup)
        if done.returncode not in _ENDS:
            raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-3000:]}")
        return _ENDS[done.returncode]


def _cgroups() -> Path:
    """Where version 2 is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise RuntimeError("systemd needs cgroups of version 2")


def _remove(cgroup: Path) -> None:
    """Its processes are dead, and gone in a moment."""
    stop = time.monotonic() + _PATIENCE_S
    for folder, _, _ in os.walk(cgroup, topdown=False):
        while True:
            try:
                os.rmdir(folder)
                break
            except OSError:
                if time.monotonic() > stop:
                    raise
                time.sleep(0.05)
