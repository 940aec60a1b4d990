"""deploy/docker-compose.yml, run for real: its image built by podman, its services by podman-compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from newest_torch import CPU_BUILDS
from podman import Podman
from repository import ROOT
from s3_server import free_ports

FILE = ROOT / "deploy" / "docker-compose.yml"
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
IMAGE = f"localhost/makara:{tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"
STORE_IMAGE = "localhost/makara-seaweedfs:tests"
_SUPPORT = ROOT / "tests" / "support" / "compose"
_SCRIPTS = Path(sys.executable).parent
_TIMEOUT_S = 600.0
_PAUSE = threading.Event()  # never set: waiting on it is how this file polls the containers


def base_image() -> str:
    """That the Containerfile names."""
    lines = CONTAINERFILE.read_text().splitlines()
    return next(line.partition("BASE=")[2] for line in lines if line.startswith("ARG BASE="))


def make_images(podman: Podman, folder: Path) -> None:
    """Makara's as the Containerfile says, and that of a store in MinIO's place."""
    base = base_image()
    podman.have_python(base)
    index = os.environ.get("MAKARA_TORCH_INDEX", CPU_BUILDS)
    podman.build(CONTAINERFILE, ROOT, IMAGE, TORCH_INDEX=index)
    folder.mkdir()
    shutil.copy(_SCRIPTS / "weed", folder / "weed")
    podman.build(_SUPPORT / "Containerfile", folder, STORE_IMAGE, BASE=base)


class Composed:
    """The services, on free ports of loopback. Use `up`, `sign_in`, then `makara`; `down` ends all."""

    def __init__(self, podman: Podman, folder: Path, name: str) -> None:
        self._podman = podman
        self._folder = folder
        self._name = name
        port, store_port = free_ports(2)
        self.url = f"https://localhost:{port}"
        settings = {
            "MINIO_ROOT_USER": "tests",
            "MINIO_ROOT_PASSWORD": "not-a-secret-of-anybody",
            "MAKARA_LISTEN": f"127.0.0.1:{port}",
            "MINIO_LISTEN": f"127.0.0.1:{store_port}",
            "MAKARA_WORKER_MEMORY": "0",  # without cgroups there is no limit
        }
        (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self._environment = {"MAKARA_SERVER": self.url, "MAKARA_CA_FILE": str(folder / "ca.pem")}

    def up(self, *services: str) -> None:
        self._compose("up", "-d", *services)

    def down(self) -> None:
        """With all volumes."""
        self._compose("down", "-v", "-t", "5")

    def kill(self, service: str) -> None:
        self._podman.run("kill", self._container(service))

    def start(self, service: str) -> None:
        self._podman.run("start", self._container(service))

    def inside(self, service: str, *command: str) -> str:
        return self._podman.run("exec", self._container(service), *command)

    def running(self) -> dict[str, bool]:
        """By service."""
        listed = json.loads(self._podman.run("ps", "-a", "--format", "json"))
        labels = "com.docker.compose.service"
        return {found["Labels"][labels]: found["State"] == "running" for found in listed}

    def logs(self) -> str:
        services = ("minio", "bucket", "manager", "admission", "worker-1", "worker-2", "worker-3")
        containers = [self._container(service) for service in services]
        told = [
            self._podman.call(["sh", "-c", f"podman logs --tail 60 {container} 2>&1 || true"])
            for container in containers
        ]
        return "\n".join(f"--- {c}\n{text}" for c, text in zip(containers, told, strict=True))

    def sign_in(self) -> None:
        """What docs/compose.md has a person do: a token of their own, and the manager's authority."""

        def answers() -> bool:
            try:
                self._environment["MAKARA_TOKEN"] = self.inside(
                    "manager", "makara", "token", "add", "ada"
                ).strip()
            except RuntimeError:
                return False
            return True

        self.wait(answers, "the manager to answer")
        self._podman.run("cp", f"{self._container('manager')}:/var/lib/makara/ca.pem", str(self._folder))

    def wait(self, check: Callable[[], bool], what: str) -> None:
        """Poll until `check`. Raises `AssertionError` with what every service said."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not check():
            assert time.monotonic() < deadline, f"waited {_TIMEOUT_S:g} s for {what}\n{self.logs()}"
            _PAUSE.wait(0.5)

    def makara(self, *arguments: str) -> str:
        """On this machine, outside all containers."""
        done = subprocess.run(
            [sys.executable, "-m", "makara.manager.cli", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, **self._environment, "MAKARA_HOME": str(self._folder / "no-home")},
        )
        assert done.returncode == 0, (
            f"makara {' '.join(arguments)}: {done.stdout}{done.stderr}\n{self.logs()}"
        )
        return done.stdout

    def apply(self, file: Path) -> str:
        return json.loads(self.makara("apply", "-f", str(file), "--detach", "--json"))["job"]

    def status(self, job: str) -> dict[str, Any]:
        return json.loads(self.makara("status", job, "--json"))

    def machines(self) -> dict[str, str | None]:
        """By name of a connected machine, which VM it is."""
        listed = json.loads(self.makara("machines", "--json"))["machines"]
        return {machine["name"]: machine["vm"] for machine in listed if machine["connected"]}

    def _container(self, service: str) -> str:
        return f"{self._name}_{service}_1"

    def _compose(self, *arguments: str) -> str:
        files = [
            "-f",
            str(FILE),
            "-f",
            str(_SUPPORT / "seaweedfs.yml"),
            "--env-file",
            str(self._folder / ".env"),
        ]
        return self._podman.call([str(_SCRIPTS / "podman-compose"), "-p", self._name, *files, *arguments])
