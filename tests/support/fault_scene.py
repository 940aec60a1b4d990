"""A running job to which faults are done, and what its own records say of them."""

from __future__ import annotations

import errno
import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import faulty_model
import models
import pytest
import service_process
from fault_service import FaultService
from s3_server import S3Server
from service_process import wait_for
from vm_network import Network

INTERVAL = 5  # steps between checkpoints
BATCH = {"global_batch_size": 8, "seed": 7}
SHAPE = {"microbatch_size": 2, "num_sections": 8}
MAX_NODES = 3
# Less than training takes on one worker, so that a plan has a depth and workers wait for each other.
DEVICE_MEMORY = "1800KB"
STORE_BYTES = 512 << 20
PATIENCE_S = 300.0  # for what has no bound of its own, on a machine that others use as well


@dataclass(frozen=True)
class Noticed:
    """`at`: Unix seconds, from the record (`by`) in which the system says that it noticed."""

    at: float
    by: str


Sign = Callable[["Scene"], Noticed | None]
"""What shows that a fault was noticed; None: not yet."""


@dataclass
class Scene:
    """One job on machines that can be harmed. `chance` picks victims; `since` is the newest fact before the
    present fault."""

    service: FaultService
    network: Network
    store: S3Server
    job: str
    chance: random.Random
    harm_folder: Path
    since: int = 0
    _seen: list[dict[str, Any]] = field(default_factory=list)

    # ---- what the job is -----------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        return self.service.job(self.job)

    def vms(self) -> list[str]:
        """VMs that train, in the order of their ranks. None do for a moment between two generations."""
        view = self.service.wait(self.job, lambda view: bool(view["placement"]), "VMs that train")
        seats = sorted(view["placement"], key=lambda seat: seat["rank"])
        return list(dict.fromkeys(seat["vm"] for seat in seats))

    def some_vm(self) -> str:
        return self.chance.choice(self.vms())

    def mark(self) -> None:
        """Records from before count no more."""
        facts = self.service.client.get(f"/jobs/{self.job}/events")["events"]
        self.since = facts[-1]["sequence"]

    def facts(self) -> list[dict[str, Any]]:
        """Facts since `mark`. Their times are true whatever the manager's wall clock is set to."""
        entries = self.service.client.get(f"/jobs/{self.job}/events", since=self.since)["events"]
        return [{**entry["fact"], "at": entry["at"]} for entry in entries]

    def lines(self, vm: str, pattern: str) -> list[Noticed]:
        """Lines that match, of the logs of a VM's agent and trainers, with the times that they carry."""
        found: list[Noticed] = []
        for file in self.service.vm_logs(vm):
            for line in file.read_text(errors="replace").splitlines():
                if re.search(pattern, line) and re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line):
                    at = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    found.append(Noticed(at, f"log: {line[24:80]}"))
        return sorted(found, key=lambda noticed: noticed.at)

    # ---- steps ---------------------------------------------------------------------------------------------

    def applied(self) -> list[dict[str, Any]]:
        """Each step that a trainer applied: when, which, and whose; in no order."""
        file = self.harm_folder / faulty_model.STEPS_LOG
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step_after(self, at: float) -> float | None:
        """When the first step after that was applied."""
        return min((row["at"] for row in self.applied() if row["at"] > at), default=None)

    def wait_steady(self) -> None:
        """All VMs there, and three steps by one generation."""

        def steady(view: dict[str, Any]) -> bool:
            formed = [morph for morph in view["morphs"] if morph["step"] is not None]
            ready = view["status"] == "running" and view["num_live_vms"] == MAX_NODES
            joined = all(vm["status"] in ("joined", "ended") for vm in view["vms"])
            return ready and joined and bool(formed) and view["step"] >= formed[-1]["step"] + 3

        self.service.wait(self.job, steady, "the job to be steady")

    # ---- harm by the job's own code ------------------------------------------------------------------------

    def order(self, kind: str) -> tuple[float, str]:
        """Have some trainer's own code do harm: (when it began, the worker)."""
        (self.harm_folder / f"{kind}.order").touch()
        taken = self.harm_folder / f"{kind}.taken"
        wait_for(taken.exists, f"a trainer to take the order {kind}", self.service.logs)
        value = json.loads(taken.read_text())
        taken.unlink()
        return value["at"], value["worker"]


@contextmanager
def running_scene(folder: Path, chance: random.Random) -> Iterator[Scene]:
    """A network, a store on a disk of its own, a manager, and a job that steps steadily on three VMs."""
    network = Network.open(folder / "network")
    disk = mount_disk(folder / "s3", STORE_BYTES)
    store = S3Server(disk, network.store_host)
    service = FaultService(folder, network, store.environment)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in store.environment.items():
                patch.setenv(name, value)  # for what a test reads of the store itself
            patch.setattr(service_process, "TIMEOUT_S", PATIENCE_S)
            store.start()
            service.start()
            scene = Scene(service, network, store, submit(service, store), chance, folder / "harm")
            scene.wait_steady()
            yield scene
    finally:
        service.close()
        store.stop(kill=True)
        unmount_disk(disk)
        network.close()


def mount_disk(folder: Path, size_bytes: int) -> Path:
    """A disk of that size at `folder`, in memory, for what a SeaweedFS stores. Its index is elsewhere: a full
    disk breaks that for good, as no store that is run with care would."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder], check=True)
    index, elsewhere = folder / "filerldb2", folder.with_name(f"{folder.name}-index")
    index.mkdir()
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", elsewhere, index], check=True)
    return folder


def unmount_disk(folder: Path) -> None:
    subprocess.run(["umount", folder / "filerldb2"], check=True)
    subprocess.run(["umount", folder], check=True)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """No space is left where `folder` is, until the end."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    try:
        yield
    finally:
        filler.unlink()


def submit(service: FaultService, store: S3Server) -> str:
    harm_folder = service.folder / "harm"
    harm_folder.mkdir()
    code = service.folder / "code"
    code.mkdir()
    for module in (models, faulty_model):
        file = Path(module.__file__)
        (code / file.name).write_text(file.read_text())
    return service.submit(
        code,
        secrets=store.environment,
        entrypoint="faulty_model:build",
        envs={"HARM_FOLDER": str(harm_folder)},
        training={**BATCH, "steps": 100_000, "numerics": "exact"},
        parallelism=SHAPE,
        resources={"min_nodes": 2, "max_nodes": MAX_NODES, "device_memory": DEVICE_MEMORY},
        checkpoint={
            "uri": store.uri("faults"),
            "endpoint": store.endpoint,
            "region": store.region,
            "interval": INTERVAL,
        },
        retry={"max_restarts_on_errors": 5},
    )
