"""A manager and VMs that can be harmed as real machines are: networks, disks and clocks of their own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
from service_process import ServiceProcess
from vm_network import Network

HERE = Path(__file__).parent
VM_DISK_BYTES = 32 << 20
PROGRAM = """
import json, logging, sys
from pathlib import Path
from makara.manager.config import ServerConfig
from makara.manager.server import serve
settings = json.loads(sys.argv[1])
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
logging.getLogger("httpx").setLevel(logging.WARNING)
config = ServerConfig(home=Path(settings["home"]), host=settings["host"], port=0, allow_remote=True,
                      local_vms=True, agent_command=tuple(settings["agent_command"]))
serve(config)
"""


class FaultService(ServiceProcess):
    """As `ServiceProcess`, on the address of `network`, with VMs in namespaces of their own.

    Each VM's folder is on a small disk of its own, which nobody else sees; `vm_file` finds what is there. The
    manager's wall clock can be set at any time by `set_clock`.
    """

    def __init__(self, folder: Path, network: Network, environment: Mapping[str, str] | None = None) -> None:
        self._clock = folder / "clock"
        self.set_clock(0.0)
        clock = {"LD_PRELOAD": str(_shifted_clock(folder)), "CLOCK_AHEAD": str(self._clock)}
        super().__init__(folder, {**(environment or {}), **clock})
        self.network = network

    def set_clock(self, ahead_s: float) -> None:
        """The manager's wall clock is ahead by so many whole seconds from now on; its others go on as they
        are."""
        with open(os.open(self._clock, os.O_WRONLY | os.O_CREAT), "wb", buffering=0) as file:
            file.write(struct.pack("d", ahead_s))  # in place: the manager has it mapped

    def _spawn(self, log: Path) -> subprocess.Popen[bytes]:
        network = {"folder": str(self.network.folder), "name": self.network.name}
        vm = {**network, "prefix": self.network.prefix, "disk_bytes": VM_DISK_BYTES}
        agent = [sys.executable, str(HERE / "vm_boot.py"), json.dumps(vm)]
        settings = {"home": str(self.home), "host": self.network.host, "agent_command": agent}
        return self._run([sys.executable, "-c", PROGRAM, json.dumps(settings)], log)

    # ---- processes of a VM ---------------------------------------------------------------------------------

    def agent(self, vm: str) -> psutil.Process:
        return next(p for p in self.vm_processes(vm) if "makara.worker.agent" in p.cmdline())

    def vm_file(self, vm: str, name: str) -> Path:
        """A file of a living VM's folder, on its own disk."""
        return Path(f"/proc/{self.agent(vm).pid}/root{self.home}/vms/{vm}/{name}")

    def vm_logs(self, vm: str) -> list[Path]:
        """Of its agent, and of its trainers while it lives."""
        found = [self.home / "vms" / vm / "agent.log"]
        if self.vm_processes(vm):
            found += sorted(self.vm_file(vm, ".").glob(f"{vm}.*.log"))
        return found

    def logs(self) -> str:
        trainers = [log for vm in self.vms_alive() for log in self.vm_logs(vm)[1:]]
        ends = [f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in trainers]
        return "\n".join([super().logs(), *ends])


def _shifted_clock(folder: Path) -> Path:
    """The library of `shifted_clock.c`."""
    library = folder / "shifted_clock.so"
    source = HERE / "shifted_clock.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
