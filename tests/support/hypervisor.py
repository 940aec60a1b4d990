"""What a stand-in of a cloud lacks: its instances boot, are taken back and power off."""

from __future__ import annotations

import base64
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azure_account import MACHINES
from azure_stand_in import TOKEN
from booted_vm import BootedVm
from makara.manager.providers.azure.request import VM_TAG
from metadata import AwsMetadata, AzureMetadata
from rented_vms import AwsCloud, AzureAccountInUse, Cloud
from vm_image import Image
from vm_network import Network

_POLL_S = 0.2


@dataclass(frozen=True)
class Instance:
    """One that a cloud wants to run."""

    id: str
    vm: str
    user_data: bytes


class Account(ABC):
    """A stand-in as the machines below it see it."""

    @abstractmethod
    def wanted(self) -> list[Instance]: ...

    @abstractmethod
    def metadata(self, instance: Instance) -> AwsMetadata | AzureMetadata: ...

    @abstractmethod
    def announce(self, told: AwsMetadata | AzureMetadata) -> None:
        """Tell an instance that it is taken back soon."""

    @abstractmethod
    def take(self, instance: Instance) -> None:
        """Take it back."""

    @abstractmethod
    def powered_off(self, instance: Instance) -> None:
        """It shut down from inside."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """What images have for this cloud."""

    @abstractmethod
    def ended(self, instance: Instance) -> None:
        """Its processes are gone."""


class AwsAccount(Account):
    def __init__(self, cloud: AwsCloud) -> None:
        self._aws = cloud.stand.aws

    def wanted(self) -> list[Instance]:
        return [
            Instance(i.id, _tag(i), base64.b64decode(i.user_data.as_bytes()))
            for i in self._aws.ec2.all_instances()
            if i.state == "running" and i.id not in self._aws.ending
        ]

    def metadata(self, instance: Instance) -> AwsMetadata:
        return AwsMetadata()

    def announce(self, told: AwsMetadata | AzureMetadata) -> None:
        assert isinstance(told, AwsMetadata)
        told.interrupt(in_s=120.0)

    def take(self, instance: Instance) -> None:
        self._aws.ec2.terminate_instances([instance.id])

    def powered_off(self, instance: Instance) -> None:
        """As its InstanceInitiatedShutdownBehavior says."""
        made = self._aws.ec2.get_instance(instance.id)
        assert made.instance_initiated_shutdown_behavior == "terminate"
        self._aws.ec2.terminate_instances([instance.id])

    def files(self) -> dict[str, bytes]:
        return {}

    def ended(self, instance: Instance) -> None:
        self._aws.ending.discard(instance.id)


class AzureAccount(Account):
    def __init__(self, cloud: AzureAccountInUse) -> None:
        self._account = cloud.cloud.account
        self._address = cloud.cloud.stand_in.address
        self._ca_file = cloud.cloud.stand_in.ca_file

    def wanted(self) -> list[Instance]:
        with self._account.lock:
            self._account.settle()
            return [
                Instance(name, body["tags"][VM_TAG], self._account.user_data[name])
                for (kind, name), body in self._account.resources.items()
                if kind == MACHINES
            ]

    def metadata(self, instance: Instance) -> AzureMetadata:
        with self._account.lock:
            identity = self._account.resources[MACHINES, instance.id]["id"]
        return AzureMetadata(
            name=instance.id, resource_id=identity, token=TOKEN, management_url=self._address
        )

    def announce(self, told: AwsMetadata | AzureMetadata) -> None:
        assert isinstance(told, AzureMetadata)
        told.announce("Preempt", 120.0)

    def take(self, instance: Instance) -> None:
        with self._account.lock:
            self._account.evict(instance.id)

    def powered_off(self, instance: Instance) -> None:
        """It is there, and billed, until somebody deletes it."""

    def files(self) -> dict[str, bytes]:
        """The authority that Azure's certificates are of, as every system has it."""
        environment = b"SSL_CERT_FILE=/etc/cloud-ca.pem\n"
        return {"etc/environment": environment, "etc/cloud-ca.pem": self._ca_file.read_bytes()}

    def ended(self, instance: Instance) -> None:
        """Nobody waits for that."""


class Hypervisor:
    """Boots what `cloud` wants to run, from the bare image first and then from `later`. Use as a context."""

    def __init__(self, cloud: Cloud, folder: Path, network: Network, image: Image, later: Image) -> None:
        self._account = AwsAccount(cloud) if isinstance(cloud, AwsCloud) else AzureAccount(cloud)
        self._folder = folder
        self._network = network
        self._images = [image]
        self._later = later
        self._lock = threading.RLock()
        self._running: dict[str, tuple[Instance, BootedVm]] = {}
        self._off: set[str] = set()
        self._told: dict[str, AwsMetadata | AzureMetadata] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.booted: list[BootedVm] = []
        self.failures: list[Exception] = []

    def __enter__(self) -> Hypervisor:
        self._thread.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self._over.set()
        self._thread.join()
        with ExitStack() as stack:
            for _, vm in self._running.values():
                stack.callback(vm.close)

    # ---- what befalls a VM ---------------------------------------------------------------------------------

    def announce(self, vm: str) -> None:
        """Tell it that it is taken back in two minutes."""
        self._account.announce(self._told[self._instance(vm).id])

    def take(self, vm: str) -> None:
        """Take it back without a word: it stops, and then the cloud says so."""
        with self._lock:
            instance = self._instance(vm)
            self._stop(instance)
            self._account.take(instance)

    def vm(self, name: str) -> BootedVm:
        with self._lock:
            return self._running[self._instance(name).id][1]

    def consoles(self) -> str:
        """The ends of all of them, for the message of a failed test."""
        ends = [f"--- {vm.name}\n{vm.console[-6000:]}" for vm in self.booted]
        return "\n".join([*(repr(failure) for failure in self.failures), *ends])

    def _instance(self, vm: str) -> Instance:
        with self._lock:
            return next(instance for instance, _ in self._running.values() if instance.vm == vm)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                with self._lock:
                    self._step()
            except Exception as failure:
                self.failures.append(failure)
                return

    def _step(self) -> None:
        wanted = {instance.id: instance for instance in self._account.wanted()}
        for instance, vm in list(self._running.values()):
            if instance.id not in wanted:
                self._stop(instance)
            elif not vm.is_on and instance.id not in self._off:
                self._off.add(instance.id)
                self._account.powered_off(instance)
        for instance in wanted.values():
            if instance.id not in self._told:
                self._boot(instance)

    def _boot(self, instance: Instance) -> None:
        told = self._told[instance.id] = self._account.metadata(instance)
        image = self._images.pop() if self._images else self._later
        folder, data = self._folder / instance.id, instance.user_data
        vm = BootedVm(folder, image, self._network, data, told, self._account.files())
        self._running[instance.id] = (instance, vm)
        self.booted.append(vm)

    def _stop(self, instance: Instance) -> None:
        _, vm = self._running.pop(instance.id)
        vm.close()
        self._account.ended(instance)


def _tag(instance: Any) -> str:
    return next(tag["value"] for tag in instance.get_tags() if tag["key"] == "makara:vm")
