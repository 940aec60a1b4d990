"""deploy/docker-compose.yml and what goes with it, as files: docs/compose.md says the same."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from composed import CONTAINERFILE, FILE, IMAGE, base_image
from makara.manager.spec.job_file import read_job
from repository import ROOT, repository_files

WORKERS = ["worker-1", "worker-2", "worker-3"]
EXAMPLE = ROOT / "deploy" / ".env.example"
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(:[-?])([^}]*)\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_every_image_is_pinned_by_a_tag(compose: dict[str, Any]) -> None:
    tag = re.compile(r"(quay\.io/minio/minio:RELEASE\.[\dTZ-]+|localhost/makara:\d+\.\d+\.\d+)")
    for name, service in compose["services"].items():
        assert tag.fullmatch(service["image"]), name
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-\w+", base_image())
    assert "latest" not in FILE.read_text() + CONTAINERFILE.read_text()


def test_the_image_has_this_version_and_is_made_by_the_manager_alone(compose: dict[str, Any]) -> None:
    own = {name: s for name, s in compose["services"].items() if s["image"].startswith("localhost/")}
    assert sorted(own) == ["admission", "manager", *WORKERS]
    assert {service["image"] for service in own.values()} == {IMAGE}
    assert [name for name, service in own.items() if "build" in service] == ["manager"]
    assert (FILE.parent / own["manager"]["build"]["context"]).resolve() == ROOT


def test_no_service_waits_for_the_start_or_the_health_of_another(compose: dict[str, Any]) -> None:
    assert [name for name, service in compose["services"].items() if "depends_on" in service] == []


def test_whatever_is_kept_is_in_a_volume_of_its_own(compose: dict[str, Any]) -> None:
    services = compose["services"]
    mounts = {name: service.get("volumes", []) for name, service in services.items()}
    assert mounts["minio"] == ["minio:/data"]
    for name in ("manager", *WORKERS):
        assert f"{name}:/var/lib/makara" in mounts[name]
    for name in WORKERS:
        assert "join:/var/lib/makara-join:ro" in mounts[name], "workers have no use for the manager's home"
        assert len(mounts[name]) == 2
    used = {mount.partition(":")[0] for mounted in mounts.values() for mount in mounted}
    assert used == set(compose["volumes"])


def test_everything_listens_on_loopback_unless_told_otherwise(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published == ["${MINIO_LISTEN:-127.0.0.1:9000}:9000", "${MAKARA_LISTEN:-127.0.0.1:8700}:8700"]


def test_secrets_have_no_defaults_and_all_settings_are_explained() -> None:
    used: dict[str, set[tuple[str, str]]] = {}
    for name, kind, text in VARIABLE.findall(FILE.read_text()):
        used.setdefault(name, set()).add((kind, text))
    explained = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", EXAMPLE.read_text(), re.M))
    assert set(used) == set(explained)
    page = (ROOT / "docs" / "compose.md").read_text()
    for name, uses in used.items():
        ((kind, text),) = uses
        assert (kind == ":?") == name.startswith("MINIO_ROOT"), name
        assert explained[name] == ("" if kind == ":?" else text), name
        assert f"`{name}`" in page, name


def test_the_image_is_made_with_the_tested_versions_and_runs_as_no_administrator() -> None:
    text = CONTAINERFILE.read_text()
    assert "$(grep '^torch==' /src/constraints.txt)" in text
    assert "-c /src/constraints.txt /src" in text
    last = text.rpartition("\nFROM ")[2]
    assert "\nUSER 10001:10001\n" in last
    assert "COPY . " not in last, "settings and secrets of a clone would stay in the image"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "**/.env"} <= set(ignored)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert not {package.split(".")[1] for package in packages} & set(ignored)


def test_the_example_of_a_job_goes_to_the_workers_and_the_store_of_the_compose_file(
    compose: dict[str, Any],
) -> None:
    spec, workdir = read_job(ROOT / "examples" / "gpt" / "compose.yaml")
    assert workdir == ROOT / "examples" / "gpt"
    assert spec.resources.providers == ("static",)
    assert spec.checkpoint.endpoint == "http://minio:9000"
    assert spec.checkpoint.uri.startswith("s3://makara/")
    assert f"--allow-store={spec.checkpoint.endpoint}" in compose["services"]["manager"]["command"]


def test_no_clone_holds_settings_of_its_own() -> None:
    assert ROOT / "deploy" / ".env" not in repository_files(ROOT)
    assert "deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()
