"""A network of its own for the VMs of a test: a namespace with an address for each, on one bridge.

Needs root and iproute2; its faults need iptables. Rules that drop packets are only ever set inside the VMs'
namespaces.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DEBIAN = {"ip": "iproute2", "iptables": "iptables", "cc": "gcc libc6-dev", "mount": "mount"}


@dataclass(frozen=True)
class Network:
    """`folder` remembers which VM has which address. `open` makes the bridge, `close` undoes everything."""

    folder: Path
    name: str
    """At most eight characters: begins the name of each device and namespace."""
    prefix: str
    """The first three numbers of each address."""

    @classmethod
    def open(cls, folder: Path, programs: Iterable[str] = tuple(DEBIAN)) -> Network:
        """`programs`: what is used of `DEBIAN`."""
        require_root_and(programs)
        folder.mkdir(parents=True)
        chance = random.SystemRandom()
        # 198.18.0.0/15 is set aside for tests of networks (RFC 2544): nothing real is there.
        prefix = f"198.{chance.randrange(18, 20)}.{chance.randrange(1, 255)}"
        network = cls(folder, f"mk{chance.randrange(16**5):05x}", prefix)
        _run("ip", "link", "add", network.name, "type", "bridge")
        for address in (network.host, network.store_host):
            _run("ip", "address", "add", f"{address}/24", "dev", network.name)
        _run("ip", "link", "set", network.name, "up")
        return network

    @property
    def host(self) -> str:
        """Where the manager listens."""
        return f"{self.prefix}.1"

    @property
    def store_host(self) -> str:
        return f"{self.prefix}.254"

    def close(self) -> None:
        for namespace in self._namespaces():
            _run("ip", "netns", "delete", namespace)
        _run("ip", "link", "delete", self.name)

    # ---- VMs -----------------------------------------------------------------------------------------------

    def add(self, vm: str) -> tuple[str, str]:
        """A namespace for `vm`: (its name, its address). The VM's boot calls it, each in its own process."""
        number = self._take_number(vm)
        namespace, device = f"{self.name}-{number}", f"{self.name}v{number}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", device, "master", self.name, "up")
        self._inside(namespace, "ip", "address", "add", f"{self.prefix}.{number}/24", "dev", "eth0")
        self._inside(namespace, "ip", "link", "set", "eth0", "up")
        self._inside(namespace, "ip", "link", "set", "lo", "up")
        return namespace, f"{self.prefix}.{number}"

    def address(self, vm: str) -> str:
        return f"{self.prefix}.{self._number(vm)}"

    # ---- faults --------------------------------------------------------------------------------------------

    def cut(self, vm: str, other: str) -> None:
        """No packet passes between `vm` and the address `other`, in either direction."""
        namespace = f"{self.name}-{self._number(vm)}"
        self._inside(namespace, "iptables", "-A", "INPUT", "-s", other, "-j", "DROP")
        self._inside(namespace, "iptables", "-A", "OUTPUT", "-d", other, "-j", "DROP")

    def cut_connection(self, vm: str, port: int, other: str, other_port: int) -> None:
        """No packet of this one TCP connection passes: both ends take it for open. Others are as before."""
        namespace = f"{self.name}-{self._number(vm)}"
        here, there = ["--dport", f"{port}"], ["--sport", f"{other_port}"]
        rule = ["-p", "tcp", "-s", other, *here, *there, "-j", "DROP"]
        self._inside(namespace, "iptables", "-A", "INPUT", *rule)
        here, there = ["--sport", f"{port}"], ["--dport", f"{other_port}"]
        rule = ["-p", "tcp", "-d", other, *here, *there, "-j", "DROP"]
        self._inside(namespace, "iptables", "-A", "OUTPUT", *rule)

    def connections(self, vm: str, process: int, other: str) -> list[tuple[int, int]]:
        """The ports, here and there, of the TCP connections that a process of `vm` has to the address
        `other`."""
        command = ["ip", "netns", "exec", f"{self.name}-{self._number(vm)}", "ss", "-Htnp"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found: list[tuple[int, int]] = []
        for line in listed.splitlines():
            state, _, _, here, there, *owners = line.split()
            address, _, port = there.rpartition(":")
            theirs = address.strip("[]").removeprefix("::ffff:") == other
            if state == "ESTAB" and theirs and f"pid={process}," in " ".join(owners):
                found.append((int(here.rpartition(":")[2]), int(port)))
        return found

    def heal(self) -> None:
        """All packets pass."""
        for namespace in self._namespaces():
            self._inside(namespace, "iptables", "-F")

    # ---- names ---------------------------------------------------------------------------------------------

    def _take_number(self, vm: str) -> int:
        for number in range(2, 254):
            try:
                with open(self.folder / f"{number}", "x") as file:
                    file.write(vm)
            except FileExistsError:
                continue
            return number
        raise RuntimeError("no address is left in the network")

    def _number(self, vm: str) -> int:
        return next(int(file.name) for file in self.folder.iterdir() if file.read_text() == vm)

    def _namespaces(self) -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
        names = [line.split()[0] for line in listed.splitlines() if line]
        return [name for name in names if name.startswith(f"{self.name}-")]

    def _inside(self, namespace: str, *command: str) -> None:
        _run("ip", "netns", "exec", namespace, *command)


def require_root_and(programs: Iterable[str]) -> None:
    """Raises `RuntimeError` that says what to do."""
    if os.geteuid() != 0:
        raise RuntimeError("networks, disks and clocks of VMs are played as root: run this as root")
    missing = sorted(DEBIAN[program] for program in programs if shutil.which(program) is None)
    if missing:
        raise RuntimeError(f"VMs of tests need packages: apt-get install {' '.join(missing)}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
