"""A manager process whose VMs come from the stand-in of a cloud.

The stand-in boots nothing: what a VM would do with its user data, a scripted agent on this machine does.
"""

from __future__ import annotations

import base64
import ssl
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from aws_stand import TYPE, AwsStand, aws_stand
from azure_account import HOST_GROUP
from azure_stand import AzureCloud, azure_cloud
from azure_stand_in import CLIENT_SECRET
from makara.manager.providers import Provider
from makara.manager.spec.placement import Attempt
from makara.protocol.messages import BootConfig
from managers import AGENT
from provider_troubles import Trouble
from service_process import ServiceProcess, wait_for
from written_files import files_in

PUBLIC_URL = "https://192.0.2.1:8700"  # an address for documentation: no VM is there to use it
OPTIONS = ("--public-url", PUBLIC_URL)


class Cloud(ABC):
    """An account of a stand-in, as a manager of another process uses it."""

    name: str
    resources: dict[str, Any]  # of a job file
    environment: dict[str, str]  # the manager's credentials

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """Of clouds.yaml."""

    @abstractmethod
    def manager_section(self) -> dict[str, Any]:
        """Of that section, for `makara up`."""

    @abstractmethod
    def user_data(self) -> list[bytes]:
        """Of each VM that was asked for, the oldest first."""

    @abstractmethod
    def num_asked(self) -> int:
        """Requests to make a VM, whatever came of them."""

    @abstractmethod
    def billed(self) -> list[str]:
        """The VM of each thing that costs money."""

    @abstractmethod
    def settle(self) -> None:
        """What is ending has ended, and lists tell everything."""

    @abstractmethod
    def attempt(self, vm: str) -> Attempt: ...

    @abstractmethod
    def hide_new(self) -> None:
        """What is made from now on is in no list, until `settle`."""

    @abstractmethod
    def provider(self, identity: str) -> Provider:
        """As a manager with that identity has it."""


class AwsCloud(Cloud):
    name = "aws"

    def __init__(self, stand: AwsStand, folder: Path) -> None:
        self.stand = stand
        self.resources = {"provider": "aws", "instance_type": TYPE}
        self.environment = {
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_CONFIG_FILE": str(folder / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def section(self) -> dict[str, Any]:
        return self.stand.settings.model_dump(exclude_none=True)

    def manager_section(self) -> dict[str, Any]:
        self.stand.aws.listed["t3.medium"] = 0.0416
        return {"security_groups": [self.stand.manager_group()], "instance_profile": "makara-manager"}

    def user_data(self) -> list[bytes]:
        return [base64.b64decode(form["UserData"]) for form in self.stand.aws.requests]

    def num_asked(self) -> int:
        return self.stand.aws.calls.count("RunInstances")

    def billed(self) -> list[str]:
        return self.stand.billed()

    def settle(self) -> None:
        self.stand.aws.ending.clear()
        self.stand.aws.hidden.clear()

    def attempt(self, vm: str) -> Attempt:
        return self.stand.attempt(vm)

    def hide_new(self) -> None:
        self.stand.trouble(Trouble.LATE_LISTS)

    def provider(self, identity: str) -> Provider:
        return self.stand.provider(identity)


class AzureAccountInUse(Cloud):
    name = "azure"

    def __init__(self, cloud: AzureCloud, identity_id: str | None = None) -> None:
        self.cloud = cloud
        self._identity_id = identity_id
        self.resources = {"provider": "azure", "instance_type": "Standard_D4s_v5"}
        self.environment = {
            "AZURE_TENANT_ID": "11111111-0000-4000-8000-000000000000",
            "AZURE_CLIENT_ID": "the manager",
            "AZURE_CLIENT_SECRET": CLIENT_SECRET,
            "AZURE_AUTHORITY_HOST": cloud.stand_in.address,
        }

    def section(self) -> dict[str, Any]:
        return self.cloud.settings(identity_id=self._identity_id).model_dump(exclude_none=True)

    def manager_section(self) -> dict[str, Any]:
        group = "/subscriptions/00000000-0000-4000-8000-000000000001/resourceGroups/net/providers"
        identity = f"{group}/Microsoft.ManagedIdentity/userAssignedIdentities/makara-manager"
        return {
            "resource_group": HOST_GROUP,
            "identity_id": identity,
            "subnet_id": f"{group}/Microsoft.Network/virtualNetworks/makara/subnets/manager",
            "security_group_id": f"{group}/Microsoft.Network/networkSecurityGroups/makara-manager",
        }

    def user_data(self) -> list[bytes]:
        with self.cloud.account.lock:
            return list(self.cloud.account.user_data.values())

    def num_asked(self) -> int:
        return sum(method == "PUT" for method, _ in self.cloud.stand_in.requests)

    def billed(self) -> list[str]:
        with self.cloud.account.lock:
            return [str(body["name"]) for body in self.cloud.account.resources.values()]

    def settle(self) -> None:
        with self.cloud.account.lock:
            self.cloud.account.settle()

    def attempt(self, vm: str) -> Attempt:
        return self.cloud.attempt(vm)

    def hide_new(self) -> None:
        self.cloud.account.lists_late = True

    def provider(self, identity: str) -> Provider:
        return self.cloud.provider(identity)


@contextmanager
def cloud_of(name: str, folder: Path) -> Iterator[Cloud]:
    """The stand-in of that cloud."""
    if name == "aws":
        with aws_stand(folder) as stand:
            yield AwsCloud(stand, folder)
    else:
        with azure_cloud(folder) as cloud:
            yield AzureAccountInUse(cloud)


class RentingManager:
    """Use: `start`, then `service`; `close` ends manager and agents."""

    def __init__(self, folder: Path, *clouds: Cloud, options: tuple[str, ...] = OPTIONS) -> None:
        """`options`: of `makara server`."""
        environment = {key: value for cloud in clouds for key, value in cloud.environment.items()}
        self.service = ServiceProcess(folder, environment, options)
        sections = {cloud.name: cloud.section() for cloud in clouds}
        (self.service.home / "clouds.yaml").write_text(yaml.safe_dump(sections))
        self._agents: list[subprocess.Popen[bytes]] = []

    def boot_file(self, user_data: bytes) -> BootConfig:
        return BootConfig.model_validate_json(files_in(user_data)["/etc/makara/boot.json"])

    def boot(self, user_data: bytes) -> BootConfig:
        """Have a VM come up, by the boot file in its user data; which it returns."""
        told = self.boot_file(user_data)
        here = told.model_copy(update={"manager_url": self.service.client.url})
        file = self.service.folder / f"boot-{len(self._agents)}.json"
        file.write_text(here.model_dump_json())
        with (self.service.folder / "agents.log").open("ab") as log:
            self._agents.append(
                subprocess.Popen([sys.executable, str(AGENT), str(file)], stdout=log, stderr=log)
            )
        return told

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.service.home / "ca.pem")

    def fetch(self, path: str, token: str) -> httpx.Response:
        """From the API, as a VM with this token."""
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{self.service.client.url}/api/v1/{path}"
        return httpx.get(url, headers=headers, verify=self.trust, trust_env=False)

    def await_user_data(self, cloud: Cloud, number: int) -> bytes:
        """Of the VM that was asked for as number `number`, counted from 0."""
        wait_for(lambda: len(cloud.user_data()) > number, f"VM {number} to be asked for", self.service.logs)
        return cloud.user_data()[number]

    def await_nothing_billed(self, cloud: Cloud) -> None:
        def is_empty() -> bool:
            cloud.settle()
            return not cloud.billed()

        wait_for(is_empty, "everything to be gone", lambda: f"{cloud.billed()}\n{self.service.logs()}")

    def close(self) -> None:
        self.service.close()
        for agent in self._agents:
            agent.kill()
            agent.wait()
