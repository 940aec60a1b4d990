"""From the manager's settings to a provider, and what a manager may do on Azure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from azure_stand import AzureCloud, azure_cloud, user_data
from azure_stand_in import CLIENT_SECRET
from makara.manager.config import ConfigError, ServerConfig
from makara.manager.providers.opening import open_providers
from makara.manager.providers.settings import read_settings
from provider_stands import boot_of
from repository import ROOT


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[AzureCloud]:
    with azure_cloud(tmp_path) as made:
        yield made


def write(home: Path, section: dict[str, object]) -> None:
    (home / "clouds.yaml").write_text(yaml.safe_dump({"azure": section}))


def test_a_section_opens_azure_with_the_credentials_of_the_environment(
    cloud: AzureCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_TENANT_ID", "11111111-0000-4000-8000-000000000000")
    monkeypatch.setenv("AZURE_CLIENT_ID", "the manager")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", CLIENT_SECRET)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.stand_in.address)
    write(tmp_path, cloud.settings().model_dump(exclude_none=True))
    providers = open_providers(ServerConfig(home=tmp_path), "manager", user_data)
    assert set(providers) == {"local", "static", "azure"}
    assert list(providers["azure"].list()) == []
    for provider in providers.values():
        provider.close()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("subnet_id", "workers", "azure.subnet_id"),
        ("region", "West Europe", "azure.region"),
        ("resource_manager", "http://localhost:1", "azure.resource_manager"),
        ("client_secret", "x", "azure.client_secret: unknown key"),
    ],
)
def test_a_fault_of_the_section_is_told_with_its_field(
    cloud: AzureCloud, tmp_path: Path, field: str, value: str, told: str
) -> None:
    write(tmp_path, {**cloud.settings().model_dump(exclude_none=True), field: value})
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path)
    assert told in str(caught.value)


def test_a_missing_library_is_told_with_what_to_install(
    cloud: AzureCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, cloud.settings().model_dump(exclude_none=True))
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    monkeypatch.delitem(sys.modules, "makara.manager.providers.azure.opening", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'makara\[azure\]'"):
        open_providers(ServerConfig(home=tmp_path), "manager", user_data)


def test_a_manager_without_a_section_imports_nothing_of_azure(tmp_path: Path) -> None:
    code = (
        "import sys, makara.manager.server, makara.manager.providers.opening as opening\n"
        "from makara.manager.config import ServerConfig\n"
        "from pathlib import Path\n"
        "home = ServerConfig(home=Path(sys.argv[1]))\n"
        "opening.open_providers(home, 'm', bytes)['local'].close()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('azure', 'msal')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# ---- the template ------------------------------------------------------------------------------------------

_RIGHTS = {
    ("GET", "Microsoft.Compute/virtualMachines"): "Microsoft.Compute/virtualMachines/read",
    ("PUT", "Microsoft.Compute/virtualMachines"): "Microsoft.Compute/virtualMachines/write",
    ("DELETE", "Microsoft.Compute/virtualMachines"): "Microsoft.Compute/virtualMachines/delete",
    ("POST", "Microsoft.Compute/virtualMachines"): (
        "Microsoft.Compute/virtualMachines/retrieveBootDiagnosticsData/action"
    ),
    ("GET", "Microsoft.Compute/disks"): "Microsoft.Compute/disks/read",
    ("DELETE", "Microsoft.Compute/disks"): "Microsoft.Compute/disks/delete",
    ("GET", "Microsoft.Network/networkInterfaces"): "Microsoft.Network/networkInterfaces/read",
    ("DELETE", "Microsoft.Network/networkInterfaces"): "Microsoft.Network/networkInterfaces/delete",
    ("GET", "Microsoft.Compute/locations"): "Microsoft.Compute/locations/operations/read",
    ("GET", "Microsoft.Compute/skus"): "Microsoft.Compute/skus/read",
}


def roles() -> dict[str, set[str]]:
    """The actions of each role that the template defines."""
    text = (ROOT / "deploy" / "azure" / "manager.bicep").read_text()
    found = re.findall(r"roleName: '\$\{name\} (\w+)'.*?actions: \[(.*?)\]", text, re.S)
    return {role: set(re.findall(r"'([^']+)'", actions)) for role, actions in found}


def test_a_worker_may_delete_vms_and_nothing_else() -> None:
    assert roles()["leaver"] == {
        "Microsoft.Compute/virtualMachines/read",
        "Microsoft.Compute/virtualMachines/delete",
    }


def test_a_manager_may_do_what_it_asks_for(cloud: AzureCloud, tmp_path: Path) -> None:
    provider, attempt = cloud.provider(), cloud.attempt()
    provider.create(attempt, boot_of(attempt, tmp_path))
    provider.console("gpt-vm0")
    provider.offers(cloud.resources())
    provider.list()
    name = cloud.names()[0]
    cloud.account.resources.pop(("Microsoft.Compute/virtualMachines", name))
    while not provider.release("gpt-vm0"):
        pass
    asked = {
        (method, "/".join(path.partition("/providers/")[2].split("/")[:2]))
        for method, path in cloud.stand_in.requests
        if "/providers/" in path
    }
    allowed = {action for role in ("renter", "attacher", "shopper") for action in roles()[role]}
    assert {_RIGHTS[call] for call in asked} <= allowed
    assert not any("*" in action for action in allowed)
