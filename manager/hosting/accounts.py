"""The managers whose VMs a home knows, and their resources at each cloud of its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...protocol.messages import BootConfig
from ..providers import Provider
from ..providers.opening import open_clouds
from ..providers.settings import CloudSettings
from ..service.tokens import identity_in
from ..spec.placement import Attempt
from .host_settings import host_of
from .record import UpFolder


@dataclass(frozen=True, slots=True)
class CloudAccount:
    """One manager's resources at one cloud."""

    cloud: str
    open: Callable[[], Provider]
    """Opens a new provider, without cached lists."""


def worker_accounts(home: Path, settings: CloudSettings) -> list[CloudAccount]:
    """The accounts of this home's manager; empty if no manager has run here."""
    identity = identity_in(home / "tokens.sqlite3")
    if identity is None:
        return []
    return [account_of(cloud, settings, identity) for cloud in sorted(settings.model_fields_set)]


def manager_accounts(home: Path) -> tuple[list[CloudAccount], list[CloudAccount]]:
    """(accounts of the VM of the manager that `makara up` made, accounts of VMs that it rents). Raises
    `ConfigError`."""
    folder = UpFolder(home)
    record = folder.read()
    if record is None:
        return [], []
    settings, clouds = folder.settings, sorted(folder.settings.model_fields_set)
    own = [account_of(record.cloud, host_of(settings, record.cloud).settings, record.tag)]
    return own, [account_of(cloud, settings, record.identity) for cloud in clouds]


def account_of(cloud: str, settings: CloudSettings, identity: str) -> CloudAccount:
    alone = CloudSettings.model_validate({cloud: getattr(settings, cloud)})
    return CloudAccount(cloud, lambda: open_clouds(alone, identity, _renders_nothing)[cloud])


def _renders_nothing(attempt: Attempt, boot: BootConfig) -> bytes:
    raise AssertionError(f"{attempt.name} is not to be made: VMs are ended here")
