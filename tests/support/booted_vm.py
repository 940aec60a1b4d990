"""A VM: processes with a root, a network, process numbers and a metadata service of their own, which boot as
a cloud's VM does, by cloud-init from user data.

It is not a machine: the kernel and the clock are shared, and systemd is played by `debian_vm`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from http_answers import answering
from metadata import AwsMetadata, AzureMetadata
from vm_image import Image
from vm_network import Network

METADATA_ADDRESS = "169.254.169.254"
_SEED = "var/lib/cloud/seed/nocloud"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLONE_NEWNET = 0x40000000
# $1: the layers, $2: the VM's folder, $3: its name. Seen by the VM's own processes alone, and gone with them.
_START = """
set -e
root=$2/root
mount -t overlay -o "lowerdir=$1,upperdir=$2/disk,workdir=$2/work" none "$root"
mount -t proc none "$root/proc"
mount -t sysfs -o ro none "$root/sys"
mount --bind /dev "$root/dev"
mount -t tmpfs none "$root/dev/shm"
mount -t tmpfs none "$root/run"
exec chroot "$root" boot-vm "$3"
"""


class BootedVm:
    """Boots when it is made. `close` ends it, whatever it does, and undoes everything."""

    def __init__(
        self,
        folder: Path,
        image: Image,
        network: Network,
        user_data: bytes,
        metadata: AwsMetadata | AzureMetadata,
        files: Mapping[str, bytes],
    ) -> None:
        """`files` come on top of the image, by their paths."""
        self.name = folder.name
        self._folder = folder
        for part in ("root", "work", f"disk/{_SEED}"):
            (folder / part).mkdir(parents=True)
        (folder / "disk" / _SEED / "user-data").write_bytes(user_data)
        (folder / "disk" / _SEED / "meta-data").write_text(f"instance-id: {self.name}\n")
        for path, content in files.items():
            (folder / "disk" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "disk" / path).write_bytes(content)
        namespace, self.address = network.add(self.name)
        self._stack = ExitStack()
        self._stack.enter_context(answering(metadata.answer, _metadata_socket(namespace)))
        self._process = self._boot(namespace, image)

    def _boot(self, namespace: str, image: Image) -> subprocess.Popen[bytes]:
        own = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        layers = ":".join(str(layer) for layer in image.layers)
        start = ["sh", "-c", _START, "start", layers, str(self._folder), self.name]
        with self._console.open("ab") as console:
            return subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{namespace}", *own, *start],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={"PATH": _PATH},
                start_new_session=True,
            )

    @property
    def is_on(self) -> bool:
        return self._process.poll() is None

    @property
    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def close(self) -> None:
        """As if its plug were pulled; its disk goes, its console stays."""
        if self.is_on:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stack.close()
        shutil.rmtree(self._folder / "disk")
        shutil.rmtree(self._folder / "work")

    @property
    def _console(self) -> Path:
        return self._folder / "console.log"


def _metadata_socket(namespace: str) -> socket.socket:
    """Listens in the VM's network, at the address that every cloud's VMs ask."""
    address = ["address", "add", f"{METADATA_ADDRESS}/32", "dev", "lo"]
    subprocess.run(["ip", "-n", namespace, *address], check=True)

    def listen() -> socket.socket:
        """In a thread of its own, which ends in that network: a socket stays where it was made."""
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
        return socket.create_server((METADATA_ADDRESS, 80))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(listen).result()
