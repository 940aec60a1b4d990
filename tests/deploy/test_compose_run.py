"""deploy/docker-compose.yml for real, as docs/compose.md says: up, apply from the host, a worker killed.

`make compose` runs this. It needs root, podman and a way to Debian's and PyPI's packages, not to a registry:
the store is SeaweedFS in MinIO's place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from composed import Composed, make_images
from podman import Podman
from repository import ROOT

pytestmark = pytest.mark.compose

EXAMPLE = ROOT / "examples" / "gpt"
STEPS = 150
WORKERS = {"worker-1", "worker-2", "worker-3"}


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """With the images. What podman keeps stays for the next run."""
    with Podman(ROOT / ".venv" / "podman") as podman:
        make_images(podman, tmp_path_factory.mktemp("images") / "store")
        yield podman


@pytest.fixture(scope="module")
def services(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """Started as far as can be from the wrong end."""
    composed = Composed(podman, tmp_path_factory.mktemp("services"), f"makara-tests-{os.getpid()}")
    try:
        composed.up("worker-3")
        composed.up("admission")
        composed.up()
        composed.sign_in()
        yield composed
    finally:
        composed.down()


def job_file(folder: Path, provider: str) -> Path:
    """The job of examples/gpt/compose.yaml, shorter."""
    spec = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
    spec["workdir"] = str(EXAMPLE)
    spec["resources"]["provider"] = provider
    spec["training"]["steps"] = STEPS
    file = folder / f"{provider}.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def test_a_worker_is_killed_and_started_again_and_the_weights_are_those_of_an_undisturbed_run(
    services: Composed, tmp_path: Path
) -> None:
    services.wait(lambda: services.machines().keys() == WORKERS, "three workers")
    job = services.apply(job_file(tmp_path, "static"))

    def trains_on(num_vms: int, step: int) -> bool:
        view = services.status(job)
        assert view["status"] not in ("finished", "failed"), f"too soon: {view['reason']}\n{services.logs()}"
        return len(view["placement"]) == num_vms and view["step"] >= step

    services.wait(lambda: trains_on(3, 3), "all three to train")
    lost = services.machines()["worker-2"]
    services.kill("worker-2")
    services.wait(lambda: trains_on(2, 5), "two to go on")
    services.start("worker-2")
    services.wait(lambda: services.machines().get("worker-2") not in (None, lost), "its return")
    weights = weights_of(services, job)
    assert services.running()["worker-2"]
    assert weights == weights_of(services, services.apply(job_file(tmp_path, "local")))


def weights_of(services: Composed, job: str) -> str:
    """Their hash, once the job has finished."""
    services.wait(lambda: services.status(job)["status"] in ("finished", "failed"), f"the end of {job}")
    view = services.status(job)
    assert view["status"] == "finished", f"{view['reason']}\n{view['traceback']}\n{services.logs()}"
    return view["export_sha256"]


def test_no_process_in_a_container_is_roots(services: Composed) -> None:
    for service in ("manager", "worker-1"):
        assert services.inside(service, "id", "-u").strip() == "10001"
        assert services.inside(service, "sh", "-c", "grep CapEff /proc/self/status").split()[1] == "0" * 16
