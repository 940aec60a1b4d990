"""The settings of a manager's VM, from the section `manager` in clouds.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from ..home import ConfigError
from ..providers.azure.settings import AzureSettings
from ..providers.settings import FILE, AwsSettings, CloudSettings
from ..spec.resources import Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The VM of a manager: one, on demand."""

    cloud: str
    settings: CloudSettings
    """The cloud's settings for a provider that creates this VM."""
    resources: Resources
    port: int
    public: bool
    """Whether it is reached by a public address."""


def host_of(
    settings: CloudSettings, cloud: str, region: str | None = None, instance_type: str | None = None
) -> Host:
    """The host by the settings; `region` and `instance_type` override them. Raises `ConfigError`."""
    section = getattr(settings, cloud)
    if section is None or section.manager is None:
        missing = cloud if section is None else f"{cloud}.manager"
        what = "is required, for it says what the manager's VM is made of"
        raise ConfigError(f"{FILE} in --home: {missing}: {what}; docs/clouds/up.md tells how to make it")
    manager = section.manager
    wish = {
        "provider": cloud,
        "max_nodes": 1,
        "use_spot": False,
        "region": region or (manager.region if isinstance(section, AwsSettings) else None),
        "instance_type": instance_type or manager.instance_type,
        "image": manager.image,
        "disk_gb": manager.disk_gb,
    }
    resources = Resources.model_validate(wish)
    if not resources.types_of(cloud):
        raise ConfigError(f"instance_type: {resources.instance_type} is none of {cloud}")
    alone = _aws(section) if isinstance(section, AwsSettings) else _azure(section)
    return Host(
        cloud=cloud,
        settings=CloudSettings.model_validate({cloud: alone}),
        resources=resources,
        port=manager.port,
        public=manager.public_address,
    )


def within_one_network(settings: CloudSettings) -> bool:
    """Whether workers reach the manager's VM by its private address, because all are in one network."""
    places = [
        *(settings.aws.regions if settings.aws is not None else ()),
        *(["azure"] if settings.azure else ()),
    ]
    return len(places) == 1


def _aws(section: AwsSettings) -> AwsSettings:
    manager = section.manager
    assert manager is not None
    groups = {"security_groups": manager.security_groups}
    return section.model_copy(
        update={
            "regions": {name: region.model_copy(update=groups) for name, region in section.regions.items()},
            "instance_profile": manager.instance_profile,
            "public_addresses": manager.public_address,
        }
    )


def _azure(section: AzureSettings) -> AzureSettings:
    """Raises `ConfigError`."""
    manager = section.manager
    assert manager is not None
    if manager.resource_group.lower() == section.resource_group.lower():
        message = "is that of worker VMs, each of which may delete the VMs there; the manager's needs another"
        raise ConfigError(f"{FILE}: azure.manager.resource_group: {message}")
    return section.model_copy(
        update={
            "resource_group": manager.resource_group,
            "identity_id": manager.identity_id,
            "store_identity_id": None,
            "subnet_id": manager.subnet_id,
            "security_group_id": manager.security_group_id,
            "public_address": manager.public_address,
        }
    )
