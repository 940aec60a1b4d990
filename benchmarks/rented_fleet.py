"""VMs of several jobs at the stand-in of AWS: each that is made gets an agent, and some are taken back."""

from __future__ import annotations

import base64
import random
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from aws_stand import TYPE, AwsStand
from makara.protocol.messages import BootConfig
from service_process import ServiceProcess
from written_files import files_in

STEP_S = 10.0
_BOOT_S = 60.0  # from a VM's creation until its agent is there
_ENDING_S = 30.0  # for which EC2 tells of a VM as shutting down


class RentedFleet:
    """A context: its end ends the agents."""

    def __init__(self, stand: AwsStand, service: ServiceProcess, folder: Path) -> None:
        folder.mkdir()
        self.stand = stand
        self._service = service
        self._folder = folder
        self._jobs: list[str] = []
        self._seen = 0  # requests for VMs
        self._booting: list[tuple[float, BootConfig]] = []
        self._up: dict[str, None] = {}
        self._ending: list[tuple[float, set[str]]] = []
        command = [sys.executable, "-m", f"{__package__}.cloud_agents", str(STEP_S)]
        self._agents = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> RentedFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._agents.kill()
        self._agents.wait()

    def submit(self, name: str, vms: int) -> None:
        resources = {"provider": "aws", "instance_type": TYPE, "max_nodes": vms, "min_nodes": 1}
        training = {"global_batch_size": 512, "steps": 10**6}
        job = self._service.submit(
            "pass\n", name=name, resources=resources, training=training, checkpoint={"interval": 10**6}
        )
        self._jobs.append(job)

    @property
    def joined(self) -> int:
        """VMs whose agent is there."""
        return len(self._up)

    def boot_and_end(self) -> None:
        """What is due: agents of new VMs come up, what was ending has ended, as EC2 does by itself."""
        now, aws = time.monotonic(), self.stand.aws
        requests = aws.requests[self._seen :]
        self._seen += len(requests)
        self._booting += [(now + _BOOT_S, self._boot_config(request)) for request in requests]
        for due, boot in list(self._booting):
            if due <= now:
                self._booting.remove((due, boot))
                self._command(boot.model_dump_json())
                self._up[boot.vm] = None
        for since, ended in list(self._ending):
            if since + _ENDING_S <= now:
                self._ending.remove((since, ended))
                aws.ending.difference_update(ended)
        known = set[str]().union(*(ended for _, ended in self._ending))
        if new := aws.ending - known:
            self._ending.append((now, new))

    def evict(self, draws: random.Random) -> None:
        """One of the VMs that are up is taken back, without a word to it."""
        not_gone = set(self.stand.billed())
        self._up = {vm: None for vm in self._up if vm in not_gone}  # the manager releases some, too
        vm = draws.choice(list(self._up))
        del self._up[vm]
        self.stand.end(vm)
        self._command(f"end {vm}")

    def generations(self) -> int:
        """So far, of all jobs."""
        views = [self._service.job(job) for job in self._jobs]
        return sum(view["generation"] for view in views)

    def journal_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._service.home.glob("journal.sqlite3*"))

    def _boot_config(self, request: dict[str, Any]) -> BootConfig:
        files = files_in(base64.b64decode(request["UserData"]))
        boot = BootConfig.model_validate_json(files["/etc/makara/boot.json"])
        here = {"manager_url": self._service.client.url, "directory": str(self._folder / boot.vm)}
        return boot.model_copy(update=here)

    def _command(self, line: str) -> None:
        assert self._agents.stdin is not None
        self._agents.stdin.write(f"{line}\n")
        self._agents.stdin.flush()
