"""The file that names the clouds."""

from __future__ import annotations

from pathlib import Path

import pytest
from makara.manager.boot.user_data import render
from makara.manager.config import ServerConfig
from makara.manager.home import ConfigError
from makara.manager.providers.opening import open_providers
from makara.manager.providers.settings import read_settings


def test_without_the_file_there_are_no_clouds(tmp_path: Path) -> None:
    providers = open_providers(ServerConfig(home=tmp_path), "manager", render)
    assert list(providers) == ["local", "static"]
    for provider in providers.values():
        provider.close()


def test_an_empty_file_names_no_cloud(tmp_path: Path) -> None:
    (tmp_path / "clouds.yaml").write_text("# none yet\n")
    assert read_settings(tmp_path) == read_settings(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gcp: {}\n", "clouds.yaml:1: gcp: unknown key"),
        ("aws: {}\n", "clouds.yaml:1: aws.regions: is required"),
        ("aws:\n  regions:\n    us-east-1: {subnets: {}}\n", "aws.regions.us-east-1.subnets"),
        (
            "aws:\n  regions:\n    us-east-1: {subnet: {a: b}}\n",
            "clouds.yaml:3: aws.regions.us-east-1.subnet: unknown key; did you mean subnets? (accepted",
        ),
        ("- aws\n", "expected a section for each cloud, got list"),
        ("aws: [\n", "not YAML"),
    ],
)
def test_a_fault_is_told_with_its_line_and_field(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "clouds.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path)
    assert told in str(caught.value)
