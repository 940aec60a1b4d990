"""From the manager's settings to a provider."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from azure_stand import AzureCloud, user_data
from azure_stand_in import CLIENT_SECRET
from makara.manager.config import ServerConfig
from makara.manager.home import ConfigError
from makara.manager.providers.opening import open_providers
from makara.manager.providers.settings import read_settings


def write(home: Path, section: dict[str, object]) -> None:
    (home / "clouds.yaml").write_text(yaml.safe_dump({"azure": section}))


def write_settings(cloud: AzureCloud, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_TENANT_ID", "11111111-0000-4000-8000-000000000000")
    monkeypatch.setenv("AZURE_CLIENT_ID", "the manager")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", CLIENT_SECRET)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.stand_in.address)
    write(home, cloud.settings().model_dump(exclude_none=True))


def test_a_section_opens_azure_with_the_credentials_of_the_environment(
    cloud: AzureCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(cloud, tmp_path, monkeypatch)
    providers = open_providers(ServerConfig(home=tmp_path), "manager", user_data)
    assert set(providers) == {"local", "static", "azure"}
    assert list(providers["azure"].list()) == []
    for provider in providers.values():
        provider.close()


def test_prices_are_dated_by_the_managers_clock(
    cloud: AzureCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_settings(cloud, tmp_path, monkeypatch)
    providers = open_providers(ServerConfig(home=tmp_path), "manager", user_data, lambda: 5000.0)
    offers = providers["azure"].offers(cloud.resources())
    assert {offer.price.at for offer in offers if offer.price is not None} == {5000.0}
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
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[azure\]'"):
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
