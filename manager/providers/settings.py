"""What a manager knows of the accounts that it rents VMs in: `<home>/clouds.yaml`, a section for each cloud.

A cloud without a section is not used. Credentials are not in it: each cloud's library finds them where that
cloud's own tools do.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..config import ConfigError
from ..spec.spec_errors import WHOLE, JobSpecError, explain
from ..spec.yaml_text import read_yaml

FILE = "clouds.yaml"


class Section(BaseModel):
    """A mapping of the file: strict types, and no key that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CloudSettings(Section):
    """The whole file."""


def read_settings(home: Path) -> CloudSettings:
    """An absent file names no cloud. Raises `ConfigError` with file, line and field of each fault."""
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
