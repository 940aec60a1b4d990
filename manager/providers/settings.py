"""The settings of cloud accounts: `<home>/clouds.yaml`, with a section for each cloud.

A cloud without a section is not used. Credentials are not in it: each cloud's library finds them where that
cloud's own tools do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ..home import DEFAULT_PORT, ConfigError
from ..spec.fields import JobSection
from ..spec.spec_errors import WHOLE, JobSpecError, explain
from ..spec.yaml_text import read_yaml
from .azure.settings import AzureSettings

FILE = "clouds.yaml"


class AwsRegion(JobSection):
    """Where VMs are placed in one region; the user creates all of it once (docs/clouds/aws.md)."""

    # {zone: subnet}; the first is used if none is named
    subnets: Annotated[dict[str, str], Field(min_length=1)]
    security_groups: Annotated[list[str], Field(min_length=1, max_length=5)]
    image: str | None = None  # an AMI; None: each job names one


class AwsManager(JobSection):
    """The VM of `makara up aws` (docs/clouds/up.md)."""

    security_groups: Annotated[list[str], Field(min_length=1, max_length=5)]  # admit users, and workers
    instance_profile: str = "makara-manager"  # by name: what the manager may do
    region: str | None = None  # None: the first
    instance_type: str = "t3.medium"
    image: str | None = None  # None: the region's
    disk_gb: Annotated[int, Field(ge=8, le=65536)] = 30
    public_address: bool = True  # False: it is reached by its private address
    port: Annotated[int, Field(ge=1024, le=65535)] = DEFAULT_PORT  # below, only root may listen


class AwsSettings(JobSection):
    """The section aws."""

    regions: Annotated[dict[str, AwsRegion], Field(min_length=1)]  # the first is used if a job names none
    instance_profile: str | None = None  # by name: what VMs may do
    disk_gb: Annotated[int, Field(ge=1, le=65536)] = 100
    public_addresses: bool = True  # each VM gets one; False: the subnets have another way out
    manager: AwsManager | None = None  # None: there is no `makara up aws`
    endpoint_url: str | None = None  # of a compatible service; None: AWS


class CloudSettings(JobSection):
    """The whole file."""

    aws: AwsSettings | None = None
    azure: AzureSettings | None = None


def read_settings(home: Path) -> CloudSettings:
    """Read the file; if absent, no clouds. Raises `ConfigError` with file, line and field of each fault."""
    path = home / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return CloudSettings()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}") from error
    try:
        return _parse(text)
    except JobSpecError as error:
        raise ConfigError(error.located(text).in_file(path)) from error


def _parse(text: str) -> CloudSettings:
    value = read_yaml(text)
    if value is None:
        return CloudSettings()
    if not isinstance(value, dict):
        raise JobSpecError([(WHOLE, f"expected a section for each cloud, got {type(value).__name__}")])
    try:
        return CloudSettings.model_validate(value)
    except ValidationError as error:
        raise explain(error, CloudSettings) from error
