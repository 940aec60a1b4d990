"""Opens the providers of a manager: this machine, joined machines, and each cloud that its settings name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from ...protocol.messages import BootConfig
from ..clock import SteadyClock
from ..config import ServerConfig
from ..home import ConfigError
from ..spec.placement import Attempt
from . import Provider, ProviderError
from .guarded import Guarded
from .local import LocalProvider
from .pool import MachinePool
from .settings import FILE, CloudSettings, read_settings
from .static import StaticProvider

Render = Callable[[Attempt, BootConfig], bytes]
"""Makes the user data of an attempt's VM; the same bytes for the same attempt."""


def open_providers(
    config: ServerConfig, identity: str, render: Render, clock: Callable[[], float] | None = None
) -> dict[str, Provider]:
    """{name in job files: provider}. `identity` tags whatever a cloud creates for this manager. `clock`: the
    manager's (None: one of their own).

    A cloud's library is imported only if the settings name that cloud. Raises `ConfigError`.
    """
    clouds = open_clouds(read_settings(config.home), identity, render, clock)
    others: dict[str, Provider] = {"static": StaticProvider(MachinePool(config.home / "machines.sqlite3"))}
    if not config.offers_local:
        return {**others, **clouds}
    return {"local": LocalProvider(config.home / "vms", command=config.agent_command), **others, **clouds}


def open_clouds(
    settings: CloudSettings, identity: str, render: Render, clock: Callable[[], float] | None = None
) -> dict[str, Provider]:
    """The clouds that the settings name. Raises `ConfigError`."""
    clock = clock or SteadyClock()
    providers: dict[str, Provider] = {}
    if settings.aws is not None:
        from .aws import AwsProvider

        try:
            aws = AwsProvider(settings.aws, manager=identity, render=render, clock=clock)
        except ProviderError as error:
            raise ConfigError(f"{FILE}: {error}") from error
        providers["aws"] = Guarded("aws", aws)
    if settings.azure is not None:
        with _extra("azure"):
            from .azure.opening import open_azure
        providers["azure"] = Guarded("azure", open_azure(settings.azure, identity, render, clock))
    return providers


@contextlib.contextmanager
def _extra(cloud: str) -> Generator[None]:
    try:
        yield
    except ImportError as error:
        remedy = f"in Makara's folder, pip install -e '.[{cloud}]'"
        raise ConfigError(f"{FILE}: {cloud}: a library is missing ({error.name}); {remedy}") from error
