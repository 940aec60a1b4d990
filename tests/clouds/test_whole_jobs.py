"""Whole jobs on stand-ins of clouds whose VMs boot: by cloud-init, from the user data that the cloud has.

Real are the manager, its providers and their clouds' own libraries, cloud-init, what a first boot installs,
agents, trainers, TLS, addresses, the store. Played are the clouds, systemd and the machines (`booted_vm`).
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from azure_stand import azure_cloud
from azurite_server import AzuriteServer
from hypervisor import Hypervisor
from rented_vms import AzureAccountInUse, Cloud, RentingManager, cloud_of
from repository import ROOT
from s3_server import S3Server, free_ports
from service_process import ServiceProcess
from vm_image import Images, make_images
from vm_network import Network

pytestmark = pytest.mark.clouds

IDENTITY = (
    "/subscriptions/00000000-0000-4000-8000-000000000001/resourceGroups/net"
    "/providers/Microsoft.ManagedIdentity/userAssignedIdentities/worker"
)
BOOT_S = 600.0  # for a VM that installs torch while others do
JOB: dict[str, Any] = {
    "training": {"global_batch_size": 16, "steps": 200, "seed": 7, "numerics": "exact"},
    "parallelism": {"microbatch_size": 4, "num_sections": 12},
}
INTERVAL = 10
CHANGES = {
    'Path(sysconfig.get_path("stdlib"))': 'Path(__file__).parent / "text"',
    "WIDTH = 192": "WIDTH = 96",
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder = tmp_path_factory.mktemp("images")
    yield make_images(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/gpt, narrower, and on a text of its own: the image has another standard library."""
    folder = tmp_path_factory.mktemp("code") / "gpt"
    shutil.copytree(ROOT / "examples" / "gpt", folder)
    text = (folder / "train.py").read_text()
    for now, then in CHANGES.items():
        assert text.count(now) == 1
        text = text.replace(now, then)
    (folder / "train.py").write_text(text)
    for package in ("asyncio", "email", "json"):
        shutil.copytree(Path(sysconfig.get_path("stdlib")) / package, folder / "text" / package)
    return folder


@pytest.fixture(scope="module")
def reference(code: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash after the same job on local VMs."""
    service = ServiceProcess(tmp_path_factory.mktemp("local") / "manager")
    try:
        service.patience_s = BOOT_S
        service.start()
        job = service.submit(code, **JOB, resources={"max_nodes": 1}, checkpoint={"interval": 50})
        return str(service.wait_status(job, "finished")["export_sha256"])
    finally:
        service.close()


@dataclass(frozen=True)
class Scene:
    """A manager that rents in a cloud whose VMs boot."""

    cloud: Cloud
    hypervisor: Hypervisor
    manager: RentingManager
    store: S3Server | AzuriteServer

    def submit(self, code: Path) -> str:
        return self.manager.service.submit(
            code,
            dict(self.store.environment),
            **JOB,
            resources={**self.cloud.resources, "min_nodes": 2, "max_nodes": 3},
            checkpoint={
                "uri": self.store.uri("jobs"),
                "endpoint": self.store.endpoint,
                "interval": INTERVAL,
            },
        )


@contextmanager
def running(folder: Path, name: str, images: Images) -> Iterator[Scene]:
    with ExitStack() as stack:
        network = Network.open(folder / "network", ["ip"])
        stack.callback(network.close)
        if name == "azure":
            account = stack.enter_context(azure_cloud(folder, network.host))
            cloud: Cloud = AzureAccountInUse(account, IDENTITY)
            store: S3Server | AzuriteServer = AzuriteServer(folder / "store", network.store_host)
        else:
            cloud = stack.enter_context(cloud_of(name, folder))
            store = S3Server(folder / "store", network.store_host)
        store.start()
        stack.callback(store.stop)
        (port,) = free_ports(1)
        address = ("--host", network.host, "--port", str(port), "--allow-remote")
        url = ("--public-url", f"https://{network.host}:{port}")
        manager = RentingManager(folder / "manager", cloud, options=(*address, *url))
        stack.callback(manager.close)
        hypervisor = Hypervisor(cloud, folder / "vms", network, images.bare, images.with_torch)
        stack.enter_context(hypervisor)
        stack.callback(lambda: print(hypervisor.consoles()))
        manager.service.patience_s = BOOT_S
        manager.service.start()
        yield Scene(cloud, hypervisor, manager, store)


def trains_with_all(view: dict[str, Any]) -> bool:
    joined = [vm for vm in view["vms"] if vm["status"] == "joined"]
    return view["step"] > 1 and len(joined) == 3 and len(placed(view)) > 1


def placed(view: dict[str, Any]) -> list[str]:
    """The VMs of the plan that runs."""
    return [seat["vm"] for seat in view["placement"]]


def vm_of(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(vm for vm in view["vms"] if vm["vm"] == name)


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_vms_boot_by_their_user_data_and_train_through_evictions(
    name: str, images: Images, code: Path, reference: str, tmp_path: Path
) -> None:
    with running(tmp_path, name, images) as scene:
        service, hypervisor = scene.manager.service, scene.hypervisor
        job = scene.submit(code)

        view = service.wait(job, trains_with_all, "a job that trains, and three VMs")
        first = {vm["vm"] for vm in view["vms"]}
        noticed = placed(view)[-1]
        hypervisor.announce(noticed)
        view = service.wait(
            job, lambda seen: vm_of(seen, noticed)["status"] == "ended", "the VM to be released"
        )
        assert vm_of(view, noticed)["detail"] == "handed over before its notice ran out"
        taken = next(vm for vm in placed(view) if vm in first)
        hypervisor.take(taken)
        service.wait(job, lambda seen: set(placed(seen)) - first, "a VM to train that came later")
        view = service.wait_status(job, "finished")
        assert view["export_sha256"] == reference
        scene.manager.await_nothing_billed(scene.cloud)
        assert hypervisor.failures == []
        bare, ready = hypervisor.booted[:2]
        assert " -m pip install --no-input --extra-index-url" in bare.console
        assert "Requirement already satisfied: torch==" in ready.console
