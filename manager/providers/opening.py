"""The providers of one manager: this machine, those that joined it, and each cloud that its settings name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator

from ...protocol.messages import BootConfig
from ..config import ConfigError, ServerConfig
from ..spec.placement import Attempt
from . import Provider
from .local import LocalProvider
from .pool import MachinePool
from .settings import FILE, CloudSettings, read_settings
from .static import StaticProvider

log = logging.getLogger("makara.manager")

Render = Callable[[Attempt, BootConfig], bytes]
"""The user data with which the VM of an attempt boots: for one attempt always the same bytes."""


def open_providers(config: ServerConfig, identity: str, render: Render | None) -> dict[str, Provider]:
    """By the name that a job file gives them. `identity` tags whatever a cloud creates for this manager.
    Without `render` no cloud is opened.

    A cloud's library is imported only if the settings name that cloud. Raises `ConfigError`.
    """
    settings = read_settings(config.home)
    if render is None:
        for name in sorted(settings.model_fields_set):
            log.warning(
                "clouds.yaml: %s is not used: this version cannot boot VMs of clouds into workers", name
            )
    clouds = {} if render is None else _clouds(settings, identity, render)
    return {
        "local": LocalProvider(config.home / "vms", command=config.agent_command),
        "static": StaticProvider(MachinePool(config.home / "machines.sqlite3")),
        **clouds,
    }


def _clouds(settings: CloudSettings, identity: str, render: Render) -> dict[str, Provider]:
    providers: dict[str, Provider] = {}
    if settings.aws is not None:
        from .aws import AwsProvider

        providers["aws"] = AwsProvider(settings.aws, manager=identity, render=render)
    if settings.azure is not None:
        with _extra("azure"):
            from .azure.opening import open_azure
        providers["azure"] = open_azure(settings.azure, identity, render)
    return providers


@contextlib.contextmanager
def _extra(cloud: str) -> Generator[None]:
    try:
        yield
    except ImportError as error:
        message = f"{FILE}: {cloud}: a library is missing ({error.name}); pip install 'makara[{cloud}]'"
        raise ConfigError(message) from error
